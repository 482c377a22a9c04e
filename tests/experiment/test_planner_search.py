"""A search for a configuration: the job is asked of it, grid, plan and averager only where they are to be kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.backend.cuda.choose import DEVICE_VARIABLE
from hpctrain.config.load import load
from hpctrain.errors import HpctrainError
from hpctrain.experiment.planner_search import SearchTask, job_of, space_of
from hpctrain.parallel.parallel_plan import Parallelism
from hpctrain.planner.averaging_costs import AveragerChoice
from tests.planner.test_computation_costs import MACHINE
from tests.support.emulated import EmulatedDeviceFactory

GRID = Path(__file__).parents[2] / "configs" / "quickstart-grid.yaml"
IMAGE = (28, 28, 1)


def task(*overrides: str, ranks: int = 4, keep: tuple[str, ...] = ()) -> SearchTask:
    config, _ = load(GRID, ("backend=numpy", *overrides))
    return SearchTask(config, ranks, MACHINE, keep=keep, image=IMAGE, classes=10)


@pytest.mark.parametrize("ranks", [1, 3, 7, 12, 1000])
def test_the_job_does_not_depend_on_the_configured_grid(ranks: int) -> None:
    """Neither a grid of two rows on 3 ranks nor fewer samples than ranks are in its way."""
    job = job_of(task("batch=8", ranks=ranks))
    assert job.plan.rows * job.plan.cols == ranks
    assert job.image_shape == IMAGE
    assert len(job.specs) == len(job_of(task("batch=8", ranks=1)).specs)


def test_nothing_is_fixed_but_what_is_kept() -> None:
    free = task("averager=bucketed", "micro_batches=2")
    space = space_of(free, job_of(free))
    assert (space.fixed_grid, space.fixed_plan, space.fixed_averager, space.fixed_micro_batches) == (None, None, None, None)
    kept = task(
        "averager={name: bucketed, bucket_bytes: 4096}", "micro_batches=2", keep=("grid", "plan", "averager", "micro_batches")
    )
    space = space_of(kept, job_of(kept))
    assert space.fixed_grid == (2, 2)
    assert space.fixed_averager == AveragerChoice("bucketed", {"bucket_bytes": 4096})
    assert space.fixed_micro_batches == 2
    assert space.fixed_plan is not None
    assert space.fixed_plan.use_of("stage1.conv") is Parallelism.DOMAIN


@pytest.mark.parametrize(("keep", "grid"), [((), (1, 4)), (("grid",), (2, 2))])
def test_on_devices_one_row_is_searched_unless_a_grid_is_kept(
    keep: tuple[str, ...], grid: tuple[int, int], emulated_device: EmulatedDeviceFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEVICE_VARIABLE, "emulated")
    kept = task("backend=cuda", keep=keep)
    assert space_of(kept, job_of(kept)).fixed_grid == grid


@pytest.mark.parametrize(("ranks", "words"), [(3, "nearest legal grid"), (5, "nearest legal grid")])
def test_a_kept_grid_must_be_one_of_the_ranks(ranks: int, words: str) -> None:
    kept = task(ranks=ranks, keep=("grid",))
    with pytest.raises(HpctrainError, match=words):
        space_of(kept, job_of(kept))
