"""Automatic choices: searched by rank 0, equal on all ranks, kept by resumed runs; machines and operator times."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from hpctrain.averaging.averagers import AveragerChoice
from hpctrain.backend.choice import DEVICE_VARIABLE, Backend, NodePlace, make_backend
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import KernelSet
from hpctrain.cli import simulation_tables
from hpctrain.comm.base import Communicator, SingleCommunicator
from hpctrain.config.load import load
from hpctrain.config.schema import Config
from hpctrain.core.errors import CheckpointError, ConfigError
from hpctrain.job.automatic_choice import CHOICE_META, AutomaticChoice, PredictedStep, Resolved, machine_digest, model_digest
from hpctrain.optim.optimizers import Lars, Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.planner import planned_run
from hpctrain.planner.costs import machine_file
from hpctrain.planner.costs.machine import Link, LinkSegment, Machine, OperatorClass, OperatorRate
from hpctrain.planner.costs.operator_times import OperatorTimes, Setting, cache_file
from hpctrain.planner.job import Candidate
from hpctrain.planner.measure import calibration, measurement, program_timing
from hpctrain.planner.measure.measurement import TimedOperators, measured_times
from hpctrain.planner.planned_run import PlannedRun, prepare
from hpctrain.planner.search import configured_search
from hpctrain.planner.search.search_space import SearchSpace
from hpctrain.process import earlier_choices
from hpctrain.process.earlier_choices import choose_again
from hpctrain.run import automatic_search as start_search
from hpctrain.run import build
from hpctrain.run.automatic_search import Automatic, StartedJob, named, on_root, optimizer_factory
from hpctrain.runs.directory import RunDirectory
from hpctrain.storage import checkpoint
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.trace import time_budget
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual
from tests.support import nets, planned
from tests.support.emulated import EmulatedDeviceFactory
from tests.support.tiny_runs import prepare as prepare_folder
from tests.support.training import Task

CONFIG = """
{{name: tiny, backend: numpy, model: {{name: small, channels: [3, 4], hidden: 5}}, data: {{train: {folder}/train.h5}},
 batch: 8, epochs: 1, optimizer: {{name: sgd, lr: 0.05}}, schedule: constant, grid: auto, plan: auto, averager: auto,
 machine: {folder}/machine.yaml, output: {folder}/runs}}
"""


class _Search:
    """Stands in for the search: a split of half of the ranks, and what it was asked."""

    def __init__(self) -> None:
        self.spaces: list[SearchSpace] = []

    def __call__(self, job: Any, machine: Any, costs: Any, ranks: int, space: SearchSpace, **_: Any) -> SimpleNamespace:
        self.spaces.append(space)
        rows = 2 if ranks % 2 == 0 else 1
        best = ParallelPlan(rows, ranks // rows, use={"classifier.fc*": "model"} if rows > 1 else {})
        choice = _choice(Candidate(best, AveragerChoice("bucketed", {"window": 3})), 0.25)
        return SimpleNamespace(choices=(choice,), best=choice, default=None)


def _choice(candidate: Candidate, seconds: float) -> SimpleNamespace:
    step = SimpleNamespace(seconds=seconds, exposed_seconds=seconds / 8)
    return SimpleNamespace(candidate=candidate, prediction=SimpleNamespace(step=step, measured_share=0.5))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    machine_file.write(tmp_path / "machine.yaml", planned.machine())
    return prepare_folder(tmp_path, CONFIG.format(folder=tmp_path), 16, 0)


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> _Search:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(start_search, "_TIMING_SECONDS", 0.0)  # only rates
    fake = _Search()
    for module in (start_search, configured_search):
        monkeypatch.setattr(module, "search", fake)
    return fake


def _config(folder: Path, *overrides: str) -> Config:
    return load(folder / "tiny.yaml", overrides)[0]


def _resolved(folder: Path, ranks: int, *overrides: str, resume: str | None = None) -> list[Resolved]:
    config = _config(folder, *overrides)
    return run_virtual(ranks, lambda comm: start_search.choose(config, StartedJob(comm, 1, 60.0), resume))


def _run(folder: Path, resolved: Resolved, *, keep: bool = True) -> RunDirectory:
    """A run directory with a checkpoint, as a run leaves it."""
    directory = RunDirectory.create(folder / "runs", "tiny", config="name: tiny\n", versions={}, git={})
    build.keep_choice(resolved, directory)
    meta = {} if resolved.choice is None or not keep else {CHOICE_META: resolved.choice.to_meta()}
    checkpoint.write(checkpoint.checkpoint_path(directory.checkpoints, 3), CheckpointContent({}, meta))
    return directory


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_gets_the_choice_of_rank_0(folder: Path, search: _Search, ranks: int) -> None:
    outcomes = _resolved(folder, ranks)
    first, config = outcomes[0], outcomes[0].recipe.config
    assert len(search.spaces) == 1
    assert all(replace(outcome, recipe=first.recipe) == first and outcome.recipe.config == config for outcome in outcomes)
    assert config.automatic == ()
    assert config.grid.rows * (config.grid.cols or 0) == ranks
    assert (config.averager.name, config.averager.options) == ("bucketed", {"window": 3})
    assert first.choice is not None
    assert first.choice.prediction.seconds == 0.25
    (line,) = first.lines
    assert "; predicted 0.25 s per step" in line


def test_a_search_makes_the_backend_of_each_rank_once(folder: Path, search: _Search, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first backend that a process makes chooses the GPU of its number on the node."""
    places: list[NodePlace] = []

    def made(*arguments: Any) -> Backend:
        places.append(arguments[-1])
        return make_backend(*arguments)

    for module in (start_search, planned_run):
        monkeypatch.setattr(module, "make_backend", made)
    expected = [NodePlace(2, 0, 2), NodePlace(2, 1, 2)]
    assert all(outcome.backend is not None for outcome in _resolved(folder, 2, "grid={}", "plan={}"))
    assert sorted(places, key=lambda place: place.local_rank) == expected
    places.clear()
    network = Automatic(nets.narrow(), (9, 7, 3), backend="numpy", machine=str(folder / "machine.yaml"))
    first, second = run_virtual(2, lambda comm: network.best(StartedJob(comm, 1, 60.0), 8))
    assert (first, sorted(places, key=lambda place: place.local_rank)) == (second, expected)


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
        patch.setenv(DEVICE_VARIABLE, "hpctrain_testing.emulator")
        _resolved(folder, 2, "backend=cuda", *overrides)
    (space,) = search.spaces
    assert space.fixed_grid == grid


def test_a_named_plan_is_fixed_also_where_the_grid_is_open(folder: Path, search: _Search) -> None:
    config = _resolved(folder, 2, "plan={default: domain, 'classifier.fc*': model}")[0].recipe.config
    (space,) = search.spaces
    assert space.fixed_grid is None
    assert space.fixed_plan is not None
    assert (str(space.fixed_plan.default), dict(space.fixed_plan.use)) == ("domain", {"classifier.fc*": "model"})
    assert (config.plan.default, config.plan.patterns) == ("domain", {"classifier.fc*": "model"})


@pytest.mark.parametrize("source", ["auto", "directory", "file"])
def test_a_resume_on_as_many_ranks_keeps_the_choice(folder: Path, search: _Search, source: str) -> None:
    first = _resolved(folder, 2)[0]
    directory = _run(folder, first)
    names = {"auto": "auto", "directory": directory.path, "file": checkpoint.checkpoint_path(directory.checkpoints, 3)}
    for outcome in _resolved(folder, 2, "batch=6", resume=str(names[source])):
        config = outcome.recipe.config
        assert (outcome.choice, config.averager, config.batch) == (first.choice, first.recipe.config.averager, 6)
        assert "kept from" in outcome.lines[0]
    assert len(search.spaces) == 1


@pytest.mark.slow
def test_a_resume_on_other_ranks_decides_again_and_says_so(folder: Path, search: _Search) -> None:
    _run(folder, _resolved(folder, 2)[0])
    for outcome in _resolved(folder, 4, resume="auto"):
        assert outcome.choice is not None
        assert (outcome.choice.ranks, outcome.lines[0]) == (4, "4 ranks instead of 2: choosing grid and plan and averager again")
    assert len(search.spaces) == 2


@pytest.mark.parametrize("kept", [True, False])
def test_what_another_resume_leaves_open_is_decided_again(folder: Path, search: _Search, kept: bool) -> None:
    _run(folder, _resolved(folder, 2)[0], keep=kept)
    outcome = _resolved(folder, 2, "averager=sharded", resume="auto")[0]
    assert outcome.choice is not None
    assert set(outcome.choice.sections) == {"grid", "plan"}
    assert outcome.lines[:-1] == (
        ("auto was set for grid and plan and averager until now: choosing grid and plan again",) if kept else ()
    )


def test_a_start_on_the_same_nodes_keeps_the_links_and_the_choice_unless_the_links_have_changed(
    folder: Path, search: _Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Find a choice for another link, model, batch or library that is reused, and one from disturbed measurements.

    Also find links that are measured again for another job, and rates of an earlier job instead of this one's.
    """
    seconds, measured, machine = [0.4], list[Machine](), planned.machine()
    rates = dict.fromkeys(machine.rates, RATE)
    timed = TimedOperators(OperatorTimes(Setting("", "")), frozenset(), rates)

    def measure(comm: Communicator, *_: Any, **__: Any) -> Machine:
        measured.extend([machine] * (comm.rank == 0))
        return machine

    monkeypatch.setattr(start_search, "measured", measure)
    monkeypatch.setattr(start_search, "measured_times", lambda *arguments: timed)
    monkeypatch.setattr(earlier_choices, "check_links", lambda comm, progress: seconds[0])
    monkeypatch.setattr(earlier_choices, "oversubscribed", lambda *arguments: False)
    monkeypatch.setattr(time_budget, "_BUSY_SHARE", -1.0)

    def reused(*overrides: str, library: str = "MPI 1") -> str:
        config, before, measured_before = _config(folder, "machine=null", *overrides), len(search.spaces), len(measured)
        first, second = run_virtual(2, lambda comm: choose_again(config, StartedJob(comm, 1, 60.0), None, library))
        assert (first.choice, first.machine) == (second.choice, second.machine)
        if len(search.spaces) == before:
            assert "kept from an earlier start" in first.lines[0]
            return "choice"
        assert first.machine is not None
        assert first.machine.between == machine.between
        assert first.machine.rates == (rates if len(measured) == measured_before else machine.rates)
        return "nothing" if len(measured) > measured_before else "links"

    assert [reused(), reused()] == ["nothing", "nothing"]
    monkeypatch.setattr(time_budget, "_BUSY_SHARE", 9.0)
    assert [reused(), reused(), reused("epochs=2")] == ["nothing", "choice", "choice"]
    assert [reused("batch=6"), reused("model.hidden=6"), reused(library="MPI 2")] == ["links", "links", "nothing"]
    seconds[0] = 0.43
    assert [reused(), reused("batch=4")] == ["choice", "links"]
    seconds[0] = 0.48
    assert [reused("batch=4"), reused("batch=6"), reused()] == ["choice", "nothing", "links"]
    file = folder / "cache" / "hpctrain" / "choices.json"
    file.write_text(json.dumps({key: {} for key in json.loads(file.read_text())}))
    assert [reused(), reused()] == ["nothing", "choice"]


def test_a_run_without_checkpoints_has_no_choice_to_keep(folder: Path, search: _Search) -> None:
    assert (len(_resolved(folder, 2, resume="auto")[0].lines), len(search.spaces)) == (1, 1)
    assert (_resolved(folder, 1)[0].choice, len(search.spaces)) == (None, 1)  # one rank has nothing to choose


@pytest.mark.parametrize(
    ("change", "words"),
    [("model.hidden=6", "layers or parameters of the model have changed"), ("model={name: resnet20}", "No layer matches")],
)
def test_a_choice_for_another_model_is_refused_on_every_rank(folder: Path, search: _Search, change: str, words: str) -> None:
    _run(folder, _resolved(folder, 2)[0])
    config = _config(folder, change)

    def refused(comm: Communicator) -> str:
        with pytest.raises(CheckpointError) as caught:
            start_search.choose(config, StartedJob(comm, 1, 60.0), resume="auto")
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
    build.keep_choice(Resolved(first.recipe, first.choice, planned.machine()), directory)
    assert machine_file.read(directory.machine_path).ranks_per_node == planned.machine().ranks_per_node
    build.keep_choice(Resolved(first.recipe), directory)
    assert not directory.choice_path.exists()


VGG16 = Path(__file__).parents[2] / "configs" / "imagenet-vgg16.yaml"
OPEN = ("model={name: vgg11_bn, width: 0.05}", "batch=14", "backend=numpy", "grid=auto", "plan=auto", "averager=auto")
SECTIONS = {
    "grid": {"rows": 2, "cols": 2, "tiles": None},
    "plan": {"default": "batch", "features.*": "domain", "classifier.*": "model"},
    "averager": {"name": "sharded", "fc_exchange": "never"},
}
LINK = Link((LinkSegment(0, 1e-6, 1e-9),))
RATE = OperatorRate(1e10, 1e10, 1e-6)
MACHINE = Machine("two nodes", 2, 2, 1.0, 1 << 30, LINK, LINK, 2, dict.fromkeys(OperatorClass, RATE))


def _open_config(*overrides: str) -> Config:
    return load(VGG16, [*OPEN, *overrides])[0]


def _task(*overrides: str) -> PlannedRun:
    config = load(VGG16, [*OPEN[:3], *overrides])[0]
    return prepare(config, 1, (35, 35, 3), 10)


def _choice_for(task: PlannedRun, **changes: object) -> AutomaticChoice:
    prediction = PredictedStep(0.4523, 0.0412, 0.9, MACHINE.name, machine_digest(MACHINE))
    return replace(AutomaticChoice(SECTIONS, 4, model_digest(task), prediction), **changes)


def test_a_choice_is_read_back_as_it_was_kept() -> None:
    choice = _choice_for(_task())
    meta = json.loads(json.dumps(choice.to_meta() | {"next_best": "of an earlier version"}, sort_keys=True))
    read = AutomaticChoice.from_meta(meta, "here")
    assert read == choice
    for one in (choice, read):
        assert list(one.sections) == ["grid", "plan", "averager"]
        assert list(one.sections["plan"]) == ["default", "features.*", "classifier.*"]  # the last that matches counts


@pytest.mark.parametrize("meta", [None, 5, {}, {"sections": {}}, {"prediction": {}}, {"prediction": 3, "ranks": 2}])
def test_what_is_no_choice_is_refused_in_one_sentence(meta: object) -> None:
    with pytest.raises(CheckpointError, match=r"^Cannot read the automatic choice in runs/x .*; set grid, plan and averager"):
        AutomaticChoice.from_meta(meta, "runs/x")


def test_what_is_open_gets_the_chosen_values_and_nothing_else_changes() -> None:
    config, choice = _open_config(), _choice_for(_task(), why="2.1 times as fast")
    applied = choice.applied(config)
    assert applied.automatic == ()
    line = choice.line(applied, _task().job.graph_of(1))
    assert line.endswith("; predicted 0.452 s per step; 2.1 times as fast; batch norm takes its statistics over 7 samples")
    assert (applied.grid.rows, applied.grid.cols) == (2, 2)
    assert applied.plan.patterns == {"features.*": "domain", "classifier.*": "model"}
    assert (applied.averager.name, applied.averager.options) == ("sharded", {"fc_exchange": "never"})
    others = set(Config.model_fields) - set(SECTIONS)
    assert applied.model_dump(include=others) == config.model_dump(include=others)


def test_digests_tell_machines_and_models_apart() -> None:
    assert machine_digest(MACHINE) == machine_digest(replace(MACHINE))
    assert machine_digest(MACHINE) != machine_digest(MACHINE.scaled(latency=2.0))
    assert model_digest(_task()) == model_digest(_task("batch=28"))
    assert model_digest(_task()) != model_digest(_task("model={name: vgg11, width: 0.1}"))


JOB = planned.job_of(Task(nets.narrow, NumpyKernelSet(), Sgd))


def test_work_of_rank_0_that_fails_fails_everywhere() -> None:
    def fail() -> None:
        raise ConfigError("There is nothing to choose from.")

    def program(comm: Communicator) -> None:
        with pytest.raises(ConfigError, match="nothing to choose from"):
            on_root(comm, fail)

    run_virtual(2, program)
    assert run_virtual(2, lambda comm: on_root(comm, lambda: comm.rank + 7)) == [7, 7]


def _times(comm: ThreadCommunicator, budget_seconds: float, space: SearchSpace) -> TimedOperators:
    return measured_times(comm, JOB, space, 1, 60.0, budget_seconds, 1 << 30)


def test_what_was_measured_once_on_a_quiet_machine_is_known_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measurement, "usable_cores", lambda cpus: 2)
    space = SearchSpace(fixed_grid=(1, 2), fixed_micro_batches=1)
    for nothing in run_virtual(2, partial(_times, budget_seconds=0.0, space=space)):
        assert (len(nothing.times), nothing.uses, nothing.rates) == (0, frozenset(), None)
    for busy in (True, False):  # times of a busy machine must not stay
        monkeypatch.setattr(time_budget, "_BUSY_SHARE", -1.0 if busy else 9.0)
        first, other = run_virtual(2, partial(_times, budget_seconds=60.0, space=space))
        assert len(OperatorTimes(first.times.setting, cache_file())) == (0 if busy else len(first.times))
        assert (first.uses, first.rates) == (other.uses, other.rates)
    monkeypatch.setattr(program_timing.TimedProgram, "measure", lambda *arguments: pytest.fail("measured again"))
    again, _ = run_virtual(2, partial(_times, budget_seconds=60.0, space=space))
    assert (len(again.times), again.uses) == (len(first.times), {(1, Parallelism.BATCH)})


def test_nodes_time_different_candidates_with_one_rank_per_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Find times that rank 0 lacks, candidates that two nodes time, and ranks that share a core and both measure."""
    asked, original = list[tuple[int, int]](), program_timing.rank_programs

    def noted(job: planned.Job, candidate: Candidate) -> Iterator[program_timing.RankProgram]:
        asked.append((candidate.plan.rows, candidate.plan.cols))
        return original(job, candidate)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measurement, "usable_cores", lambda cpus: 1)
    monkeypatch.setattr(program_timing, "rank_programs", noted)
    found = run_virtual(4, partial(_times, budget_seconds=60.0, space=SearchSpace()), ranks_per_node=2)
    assert sorted(asked) == [(1, 4), (2, 2), (2, 2), (4, 1), (4, 1)]
    assert {rows for rows, _ in found[0].uses} == {1, 2, 4}
    assert all((one.uses, one.rates) == (found[0].uses, found[0].rates) for one in found)


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    space = SearchSpace(fixed_grid=(1, 1), fixed_plan=ParallelPlan(), fixed_micro_batches=1)
    (timed,) = run_virtual(1, partial(_times, budget_seconds=60.0, space=space))
    assert len(timed.times) > 5


def test_names_and_options_come_as_in_a_configuration() -> None:
    assert named("sgd") == ("sgd", {})
    assert named({"name": "sgd", "momentum": 0.5}) == ("sgd", {"momentum": 0.5})
    with pytest.raises(ConfigError, match="has no key"):
        named({"momentum": 0.5})
    assert optimizer_factory({"name": "lars"})().needs_norms
    made = partial(Lars, momentum=0.5)
    assert optimizer_factory(made) is made


@pytest.fixture
def known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {kind: OperatorRate(1e10, 2e9, 3e-6) for kind in OperatorClass}
    monkeypatch.setattr(calibration, "measure_rates_of", lambda kernels, threads, before, dtypes: rates)


def test_bfloat16_is_measured_only_if_the_processors_of_all_ranks_multiply_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find ranks that measure different precisions, which wait for each other forever, and rates of an emulation."""
    asked: list[list[str]] = []

    def rates(
        kernels: KernelSet, threads: int, before: Callable[[], None], dtypes: Sequence[str]
    ) -> dict[OperatorClass, OperatorRate]:
        asked.append(list(dtypes))
        return {kind.of_dtype(dtype): OperatorRate(1e10, 2e9, 3e-6) for kind in OperatorClass for dtype in dtypes}

    monkeypatch.setattr(calibration, "measure_rates_of", rates)
    for able, expected in (((True, True), ["float32", "bfloat16"]), ((True, False), ["float32"])):

        def program(comm: Communicator, able: tuple[bool, ...] = able) -> Machine:
            kernels = NumpyKernelSet()
            setattr(kernels, "multiplies_bfloat16", able[comm.rank])  # noqa: B010  an attribute of oneDNN's set
            return measurement.measured(comm, kernels, 1, 60.0, 1.0, dtypes=("float32", "bfloat16"))

        machines = run_virtual(2, program)
        assert all(dtypes == expected for dtypes in asked)
        assert machines[0] == machines[1]
        assert bool(machines[0].estimate_note("bfloat16")) == (expected == ["float32"])
        asked.clear()


@pytest.mark.usefixtures("known_rates")
def test_one_process_writes_a_machine_and_says_what_it_could_not_measure(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(simulation_tables, "_MACHINE_COLUMNS", 200)  # so that no cell is folded
    out = tmp_path / "laptop.yaml"
    machine = measurement.run_calibration(SingleCommunicator(), NumpyKernelSet(), 1, 5.0, out, 60.0)
    simulation_tables.print_machine(machine)
    assert (machine_file.read(out), machine.name) == (machine, "laptop")
    assert machine.rates[OperatorClass.CONVOLUTION].flops_per_second == 1e10
    printed = capsys.readouterr().out
    words = " ".join(printed.split())
    assert "not measured: one node" in words
    assert "10.0 Gflop/s, 2 GB/s, 3 us per call" in words
    assert "rates.memory_bfloat16" in words


def test_rates_of_one_thread_are_measured_under_a_limit_of_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Find networks that are built outside the limit, whose kernels then use all threads."""
    calls: list[tuple[int, int]] = []

    def rates(
        kernels: KernelSet, threads: int, before: Callable[[], None], dtypes: Sequence[str]
    ) -> dict[OperatorClass, OperatorRate]:
        calls.append((threads, max(pool["num_threads"] for pool in threadpool_info())))
        return {kind: OperatorRate(1e10 * threads, 2e9, 3e-6) for kind in OperatorClass}

    monkeypatch.setattr(calibration, "measure_rates_of", rates)
    monkeypatch.setattr(calibration, "measure_memory_traffic", lambda threads, before: 1e9 * threads)
    monkeypatch.setattr(measurement, "usable_cores", lambda cpus: 2)
    with threadpool_limits(limits=2):
        machine = measurement.run_calibration(SingleCommunicator(), NumpyKernelSet(), 2, 5.0, tmp_path / "m.yaml", 60.0)
    assert calls == [(2, 2), (1, 1)]
    assert machine.rates[OperatorClass.PRODUCT].flops_per_second == 2e10
    assert machine.single_thread_rates[OperatorClass.PRODUCT].flops_per_second == 1e10
    assert machine.node_bytes_per_second == 2e9
    assert machine_file.read(tmp_path / "m.yaml") == machine


@pytest.mark.usefixtures("known_rates")
def test_a_file_that_cannot_be_written_is_reported_before_anything_is_measured(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(measurement, "calibrate", lambda *words, **names: pytest.fail("measured"))
    with pytest.raises(OSError, match="nowhere"):
        measurement.run_calibration(SingleCommunicator(), NumpyKernelSet(), 1, 5.0, tmp_path / "nowhere" / "machine.yaml", 60.0)
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text("as it was")
    for path in (old, new):
        with pytest.raises(pytest.fail.Exception, match="measured"):  # which comes after the check
            measurement.run_calibration(SingleCommunicator(), NumpyKernelSet(), 1, 5.0, path, 60.0)
    assert old.read_text() == "as it was"
    assert not new.exists()
