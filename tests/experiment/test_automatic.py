"""What a configuration leaves open: decided once, by rank 0, alike on every rank, and kept by runs that go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpctrain.backend.cuda.choose import DEVICE_VARIABLE
from hpctrain.comm.base import Communicator
from hpctrain.config.load import load
from hpctrain.config.schema import Config
from hpctrain.data import format as data_format
from hpctrain.errors import CheckpointError, ConfigError
from hpctrain.experiment import automatic, automatic_search, start_search
from hpctrain.experiment.automatic_choice import META, Resolved
from hpctrain.experiment.start_search import StartedJob
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.planner import machine_file
from hpctrain.planner.job import Candidate
from hpctrain.planner.search_space import SearchSpace
from hpctrain.storage import checkpoint
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.storage.run_directory import RunDirectory
from hpctrain.virtual.run import run_virtual
from tests.support import planned
from tests.support.emulated import EmulatedDeviceFactory

CONFIG = """
name: tiny
backend: numpy
model: {{name: small, channels: [3, 4], hidden: 5}}
data: {{train: {folder}/train.h5}}
batch: 8
epochs: 1
optimizer: {{name: sgd, lr: 0.05}}
schedule: constant
grid: auto
plan: auto
averager: auto
machine: {folder}/machine.yaml
output: {folder}/runs
"""


class _Search:
    """Stands in for the search: a split of half of the ranks, and what it was asked."""

    def __init__(self) -> None:
        self.spaces: list[SearchSpace] = []

    def __call__(self, job: Any, machine: Any, costs: Any, ranks: int, space: SearchSpace, **_: Any) -> SimpleNamespace:
        self.spaces.append(space)
        rows = 2 if ranks % 2 == 0 else 1
        best = ParallelPlan(rows, ranks // rows, use={"classifier.fc*": "model"} if rows > 1 else {})  # type: ignore[dict-item]
        return SimpleNamespace(
            choices=(
                _choice(Candidate(best, "bucketed", {"window": 3}), 0.25),
                _choice(Candidate(ParallelPlan(1, ranks), "sharded", {}), 0.5),
            )
        )


def _choice(candidate: Candidate, seconds: float) -> SimpleNamespace:
    step = SimpleNamespace(seconds=seconds, exposed_seconds=seconds / 8)
    return SimpleNamespace(candidate=candidate, prediction=SimpleNamespace(step=step, measured_share=0.5))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (16, 9, 8, 1), dtype=np.uint8)
    data_format.write(tmp_path / "train.h5", 16, (9, 8, 1), ["a", "b", "c"], [(images, random.integers(0, 3, 16))])
    (tmp_path / "tiny.yaml").write_text(CONFIG.format(folder=tmp_path))
    machine_file.write(tmp_path / "machine.yaml", planned.machine())
    return tmp_path


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> _Search:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(start_search, "_TIMING_SECONDS", 0.0)  # only rates
    fake = _Search()
    monkeypatch.setattr(start_search, "search", fake)
    return fake


def _config(folder: Path, *overrides: str) -> Config:
    return load(folder / "tiny.yaml", overrides)[0]


def _resolved(folder: Path, ranks: int, *overrides: str, **earlier: str) -> list[Resolved]:
    config = _config(folder, *overrides)
    return run_virtual(ranks, lambda comm: automatic.resolve(config, StartedJob(comm, 1, 60.0), **earlier))


def _run(folder: Path, resolved: Resolved, *, keep: bool = True) -> RunDirectory:
    """A run directory with a checkpoint, as a run leaves it."""
    directory = RunDirectory.create(folder / "runs", "tiny", config="name: tiny\n", versions={}, git={})
    automatic.keep(resolved, directory)
    meta = {} if resolved.choice is None or not keep else {META: resolved.choice.to_meta()}
    checkpoint.write(checkpoint.checkpoint_path(directory.checkpoints, 3), CheckpointContent({}, meta))
    return directory


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_gets_the_choice_of_rank_0(folder: Path, search: _Search, ranks: int) -> None:
    outcomes = _resolved(folder, ranks)
    assert len(search.spaces) == 1
    assert all(outcome == outcomes[0] for outcome in outcomes)
    config = outcomes[0].config
    assert config.automatic == ()
    assert config.grid.rows * (config.grid.cols or 0) == ranks
    assert (config.averager.name, config.averager.options) == ("bucketed", {"window": 3})
    assert outcomes[0].choice is not None
    assert outcomes[0].choice.prediction.seconds == 0.25
    (line,) = outcomes[0].lines
    assert "predicted 0.25 s a step (next best 1 x" in line


def test_nothing_open_needs_nothing(folder: Path, search: _Search) -> None:
    overrides = ("grid={}", "plan={}", "averager=sharded", "machine=nowhere.yaml")
    for outcome in _resolved(folder, 2, *overrides):
        assert outcome == Resolved(_config(folder, *overrides))
    assert search.spaces == []


@pytest.mark.parametrize(
    ("override", "fixed"),
    [
        ("grid.rows=2", {"fixed_grid": (2, 1)}),
        ("averager={name: bucketed, window: 7}", {"fixed_averager": ("bucketed", {"window": 7})}),
        ("micro_batches=2", {"fixed_micro_batches": 2}),
    ],
)
def test_what_is_named_is_fixed(folder: Path, search: _Search, override: str, fixed: dict[str, Any]) -> None:
    _resolved(folder, 2, override)
    (space,) = search.spaces
    for name, value in fixed.items():
        given = getattr(space, name)
        assert (given.name, dict(given.options)) == value if name == "fixed_averager" else given == value
    open_names = {"fixed_grid", "fixed_plan", "fixed_averager"} - set(fixed)
    assert all(getattr(space, name) is None for name in open_names)


@pytest.mark.parametrize(("overrides", "grid"), [((), (1, 2)), (("grid.rows=2",), (2, 1))])
def test_on_devices_one_row_is_taken_unless_a_grid_is_named(
    folder: Path, search: _Search, emulated_device: EmulatedDeviceFactory, overrides: tuple[str, ...], grid: tuple[int, int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DEVICE_VARIABLE, "emulated")
        _resolved(folder, 2, "backend=cuda", *overrides)
    (space,) = search.spaces
    assert space.fixed_grid == grid


def test_a_named_plan_is_fixed_also_where_the_grid_is_open(folder: Path, search: _Search) -> None:
    config = _resolved(folder, 2, "plan={default: domain, 'classifier.fc*': model}")[0].config
    (space,) = search.spaces
    assert space.fixed_grid is None
    assert space.fixed_plan is not None
    assert (str(space.fixed_plan.default), dict(space.fixed_plan.use)) == ("domain", {"classifier.fc*": "model"})
    assert (config.plan.default, config.plan.patterns) == ("domain", {"classifier.fc*": "model"})


def test_a_machine_that_is_not_there_is_told_alike_on_every_rank(folder: Path, search: _Search) -> None:
    with pytest.raises(ConfigError, match="no machine file") as caught:
        _resolved(folder, 3, "machine=nowhere.yaml")
    assert len(str(caught.value).splitlines()) == 1


def test_a_job_that_fits_in_no_plan_is_told_alike_on_every_rank(
    folder: Path, search: _Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **_: Any) -> None:
        raise ConfigError("No plan fits; the smallest memory that would do is 3 GB.")

    def failure(comm: Communicator) -> str:
        with pytest.raises(ConfigError) as caught:
            automatic.resolve(config, StartedJob(comm, 1, 60.0))
        return str(caught.value)

    monkeypatch.setattr(start_search, "search", refuse)
    config = _config(folder)
    outcomes = run_virtual(3, failure)
    assert all(outcome.startswith("No plan fits; the smallest memory that would do is 3 GB.") for outcome in outcomes)


@pytest.mark.parametrize("source", ["auto", "directory", "file"])
def test_a_resume_on_as_many_ranks_keeps_the_choice(folder: Path, search: _Search, source: str) -> None:
    first = _resolved(folder, 2)[0]
    directory = _run(folder, first)
    names = {"auto": "auto", "directory": directory.path, "file": checkpoint.checkpoint_path(directory.checkpoints, 3)}
    for outcome in _resolved(folder, 2, "batch=6", resume=str(names[source])):
        assert outcome.choice == first.choice
        assert outcome.config.averager == first.config.averager
        assert outcome.config.batch == 6
        assert "kept from" in outcome.lines[0]
    assert len(search.spaces) == 1


def test_a_resume_on_other_ranks_decides_again_and_says_so(folder: Path, search: _Search) -> None:
    _run(folder, _resolved(folder, 2)[0])
    for outcome in _resolved(folder, 4, resume="auto"):
        assert outcome.choice is not None
        assert outcome.choice.ranks == 4
        assert outcome.lines[0] == "4 ranks instead of 2: grid and plan and averager chosen again"
    assert len(search.spaces) == 2


@pytest.mark.parametrize("kept", [True, False])
def test_what_another_resume_leaves_open_is_decided_again(folder: Path, search: _Search, kept: bool) -> None:
    _run(folder, _resolved(folder, 2)[0], keep=kept)
    outcome = _resolved(folder, 2, "averager=sharded", resume="auto")[0]
    assert outcome.choice is not None
    assert set(outcome.choice.sections) == {"grid", "plan"}
    assert outcome.lines[:-1] == (("grid and plan and averager auto until now: grid and plan chosen again",) if kept else ())


def test_a_run_without_checkpoints_has_no_choice_to_keep(folder: Path, search: _Search) -> None:
    assert len(_resolved(folder, 2, resume="auto")[0].lines) == 1
    assert len(search.spaces) == 1


@pytest.mark.parametrize("from_file", [True, False])
def test_a_run_whose_averaging_is_repeated_lends_its_choice(folder: Path, search: _Search, from_file: bool) -> None:
    first = _resolved(folder, 2)[0]
    directory = _run(folder, first)
    source = checkpoint.checkpoint_path(directory.checkpoints, 3) if from_file else directory.path
    assert _resolved(folder, 2, repeated=str(source))[0].choice == first.choice
    assert len(search.spaces) == 1


@pytest.mark.parametrize(
    ("change", "words"), [("model.hidden=6", "other layers or parameters"), ("model={name: resnet20}", "No layer matches")]
)
def test_a_choice_for_another_model_is_refused_on_every_rank(folder: Path, search: _Search, change: str, words: str) -> None:
    _run(folder, _resolved(folder, 2)[0])
    config = _config(folder, change)

    def refused(comm: Communicator) -> str:
        with pytest.raises(CheckpointError) as caught:
            automatic.resolve(config, StartedJob(comm, 1, 60.0), resume="auto")
        return str(caught.value)

    for sentence in run_virtual(2, refused):
        assert "no longer matches the model" in sentence
        assert words in sentence
        assert len(sentence.splitlines()) == 1


def test_the_run_directory_keeps_the_choice_of_its_latest_start(folder: Path, search: _Search) -> None:
    first = _resolved(folder, 2)[0]
    directory = _run(folder, first)
    assert directory.choice_path.exists()
    assert not directory.machine_path.exists()  # it has a file of its own
    automatic.keep(Resolved(first.config, first.choice, planned.machine()), directory)
    assert machine_file.read(directory.machine_path).ranks_per_node == planned.machine().ranks_per_node
    automatic.keep(Resolved(first.config), directory)
    assert not directory.choice_path.exists()


def test_a_plan_without_a_job_says_what_is_missing(folder: Path, search: _Search) -> None:
    planned_config: Callable[..., Config] = automatic_search.planned
    config = _config(folder)
    assert planned_config(config, 2, None, None, None).automatic == ()
    with pytest.raises(
        ConfigError, match=r"^grid and plan and averager are auto, which follows from the number of ranks; give --ranks"
    ):
        planned_config(config, None, None, None, None)
    bare = config.model_copy(update={"machine": None})
    with pytest.raises(ConfigError, match=r"follows from the machine; give --machine, or values in place of auto\.$"):
        planned_config(bare, 2, None, None, None)
    assert planned_config(bare, 2, str(folder / "machine.yaml"), None, None).automatic == ()
    closed = _config(folder, "grid={}", "plan={}", "averager=sharded")
    assert planned_config(closed, None, None, None, None) is closed
