"""Costs of a job: of its dtype, on the machine as it is or computing faster; measured ones only where they were measured."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.config.load import load
from hpctrain.experiment.dry_run import PlannedRun, prepare
from hpctrain.experiment.planner_costs import concurrency, costs, is_here, setting
from hpctrain.planner.machine import Machine
from hpctrain.planner.measured_costs import update_key
from hpctrain.planner.operator_times import OperatorTimes, cache_file
from hpctrain.planner.program_timing import processor_model
from tests.planner.test_computation_costs import MACHINE

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
ELEMENTS = 1 << 20


def task(*overrides: str, ranks: int = 2) -> PlannedRun:
    config, _ = load(QUICKSTART, ("backend=numpy", *overrides))
    return prepare(config, ranks, (28, 28, 1), 10)


def machine(source: str) -> Machine:
    return replace(MACHINE, sources={"rates.convolution.flops_per_second": source, "nodes": "measured"})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Machine, PlannedRun, float], None]:
    """Keeps a time of updates in the cache of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def keep(where: Machine, job: PlannedRun, seconds: float) -> None:
        times = OperatorTimes(setting(where, job), cache_file())
        times.put(update_key(ELEMENTS), seconds)
        times.save()

    return keep


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_job_has_the_costs_of_its_dtype_and_of_the_ranks_compute(dtype: str) -> None:
    job = task(f"dtype={dtype}")
    item_bytes = {"float32": 4, "float64": 8}[dtype]
    usual = costs(MACHINE, job)
    assert usual.update_seconds(ELEMENTS) == pytest.approx(6 * item_bytes * ELEMENTS / 5e9)
    assert costs(MACHINE, job, compute=2.0).update_seconds(ELEMENTS) == pytest.approx(usual.update_seconds(ELEMENTS) / 2)


def test_a_machine_is_here_where_its_rates_were_measured_on_such_a_processor() -> None:
    assert is_here(machine(f"measured 2026-01-31 on {processor_model()}, 2 ranks"))
    assert not is_here(machine("measured 2026-01-31 on another processor"))
    assert not is_here(machine(f"not measured; as of {processor_model()}"))
    assert not is_here(MACHINE)


def test_times_count_where_they_were_measured(cache: Callable[[Machine, PlannedRun, float], None]) -> None:
    here, elsewhere = machine(f"measured on {processor_model()}"), machine("measured on another processor")
    job = task()
    assert costs(here, job).measured_share() == 0.0  # nothing is known yet
    cache(here, job, 0.125)
    known = costs(here, job)
    assert known.update_seconds(ELEMENTS) == 0.125
    assert known.measured_share() == 1.0
    assert costs(here, job, compute=2.0).update_seconds(ELEMENTS) == 0.0625
    assert costs(elsewhere, job).update_seconds(ELEMENTS) != 0.125
    assert costs(here, task("threads=2")).update_seconds(ELEMENTS) != 0.125
    assert costs(here, task(ranks=1)).update_seconds(ELEMENTS) != 0.125


def test_as_many_ranks_compute_at_the_same_time_as_a_node_has_of_the_job() -> None:
    assert [concurrency(MACHINE, ranks) for ranks in (1, 2, 4)] == [1, 2, 2]
