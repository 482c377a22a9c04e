"""Planned runs: schedules without ranks, jobs and candidates of planners, costs and memory."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hpctrain.assembly.recipe import Recipe
from hpctrain.averaging import averagers
from hpctrain.averaging.averagers import AveragerChoice
from hpctrain.averaging.base import PlannedGroup, Strategy
from hpctrain.averaging.collective_schedule import CollectiveSchedule
from hpctrain.averaging.strategies.priority import Priority
from hpctrain.backend.choice import DEVICE_VARIABLE
from hpctrain.cli.main import cli
from hpctrain.comm.groups import ProcessGrid
from hpctrain.comm.link import LinkModel
from hpctrain.config.load import load, parse
from hpctrain.config.schema import Config
from hpctrain.core.errors import ConfigError, HpctrainError
from hpctrain.core.registry import Registry
from hpctrain.models import catalogue
from hpctrain.nn.parameter import GroupLayout
from hpctrain.optim.optimizers import OPTIMIZERS
from hpctrain.parallel.groups import GridGroups
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.parallel.rank_graph import make_network
from hpctrain.planner.costs.compute_costs import RateCosts, update_key
from hpctrain.planner.costs.machine import Link, LinkSegment, Machine, OperatorClass, OperatorRate
from hpctrain.planner.costs.operator_times import OperatorTimes, cache_file, processor_model
from hpctrain.planner.job import Candidate
from hpctrain.planner.measure.measurement import measure
from hpctrain.planner.planned_run import (
    PlannedRun,
    averaging_bytes,
    prepare,
)
from hpctrain.planner.program.group_schedules import group_schedules, group_strategies
from hpctrain.planner.program.step_program import step_program
from hpctrain.planner.search import configured_search
from hpctrain.planner.search.configured_search import (
    SearchTask,
    SimulatedPoint,
    configured_costs,
    configured_setting,
    is_here,
    on_any_grid,
    overrides,
    ranks_per_node_choices,
    run_search,
    search_layouts,
    with_candidate,
    written,
)
from hpctrain.planner.search.estimates import GridEstimates
from hpctrain.planner.search.search import UNCERTAIN_SHARE, search
from hpctrain.planner.search.search_space import SearchSpace, configured_space
from hpctrain.training.replica import Replica
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine
from tests.planner.costs.test_computation_costs import MACHINE
from tests.support import predictions
from tests.support.emulated import EmulatedDeviceFactory
from tests.support.sampling import amount
from tests.support.simulated import machine_of

CONFIG = Path(__file__).parents[2] / "configs" / "imagenet-vgg16.yaml"
SMALL = ("model={name: vgg11, width: 0.05}", "batch=14", "plan.features.*=domain", "plan.classifier.*=model", "backend=numpy")

STRATEGIES = (
    "averager={name: sharded, bucket_bytes: 4096}",
    "averager={name: sharded, bucket_bytes: 4096, fc_exchange: never, window: 2}",
    "averager={name: bucketed, bucket_bytes: 4096}",
    "averager={name: priority, slice_parameters: 2000, window: 3}",
    "averager=overlap",
)


def task_of(*overrides: str, ranks: int) -> PlannedRun:
    config, _ = load(CONFIG, [*SMALL, *overrides])
    return prepare(config, ranks, (35, 35, 3), 10)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "lars"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("rows", "ranks", "per_node"), [(1, 3, None), (2, 4, None), (3, 6, None), (1, 4, 2), (2, 8, 4), (2, 8, 5)]
)
def test_planned_schedules_are_those_of_the_ranks(
    strategy: str, rows: int, ranks: int, per_node: int | None, optimizer: str
) -> None:
    task = task_of(strategy, f"optimizer={{name: {optimizer}, lr: 0.1}}", f"grid.rows={rows}", ranks=ranks)
    found = run_virtual(ranks, lambda comm: agreed(task, comm), ranks_per_node=per_node)
    planned = group_schedules(task.job, task.candidate, LinkModel(1e-5, 1e-9), per_node)
    for row, schedules in found:
        assert {each.group: (each.schedule, each.order) for each in planned if row in each.split_ranks} == schedules


@pytest.mark.parametrize("rows", [1, 2])
def test_frozen_layers_are_in_no_schedule(rows: int) -> None:
    frozen = "init.freeze=['features.*', classifier.0]"
    task = task_of(STRATEGIES[2], f"grid.rows={rows}", frozen, ranks=4)
    planned = group_schedules(task.job, task.candidate, LinkModel(1e-5, 1e-9))
    names = {name for each in planned if each.schedule for piece in each.schedule.slices for name in piece.parameters}
    assert names == {f"classifier.{place}.{role}" for place in (3, 6) for role in ("weight", "bias")}
    for row, schedules in run_virtual(4, lambda comm: agreed(task, comm)):
        assert {each.group: (each.schedule, each.order) for each in planned if row in each.split_ranks} == schedules


Agreed = dict[str, tuple[CollectiveSchedule | None, tuple[int, ...] | None]]


def agreed(task: PlannedRun, comm: ThreadCommunicator) -> tuple[int, Agreed]:
    """This rank's row, and by group the schedule that its averager has agreed on, and the order of ranks in it."""
    config, plan, progress = task.config, task.plan, virtual_engine(comm)
    groups = GridGroups(ProcessGrid(comm, plan.rows, plan.cols))
    model = catalogue.build(config.model.name, {"classes": 10, **config.model.options})
    kernels, dtype = task.job.kernels, config.dtype
    network = make_network(
        model, task.job.image_shape, kernels, groups=groups, progress=progress, plan=plan, dtype=dtype, frozen=config.init.freeze
    )
    replica = Replica(
        network,
        groups=groups,
        progress=progress,
        strategy=AveragerChoice(config.averager.name, config.averager.options).strategy,
        optimizer=partial(OPTIMIZERS.create, config.optimizer.name, config.optimizer.options),
        nominal_batch=config.batch,
    )
    replica.agree()
    levels = {name: strategy.levels for name, strategy in replica.strategies.items()}
    orders = {name: None if found is None else found.order for name, found in levels.items()}
    return groups.split_rank, {name: (averager.schedule, orders[name]) for name, averager in replica.averagers.items()}


def test_bytes_of_all_ranks_are_those_of_an_allreduce_where_nothing_is_split() -> None:
    task = task_of("averager=blocking", "plan.features.*=batch", "plan.classifier.*=batch", ranks=5)
    (group,) = group_schedules(task.job, task.candidate, LinkModel(0.0, 0.0))
    assert sum(averaging_bytes(task, [group])) == 4 * 2 * (5 - 1) * group.elements


CIFAR = Path(__file__).parents[2] / "configs" / "cifar10-resnet20.yaml"


@pytest.mark.parametrize(("optimizer", "norms_needed"), [("{name: sgd, lr: 0.1}", "none"), ("{name: lars, lr: 0.1}", "layer")])
def test_a_job_is_what_the_configuration_trains(optimizer: str, norms_needed: str) -> None:
    overrides = ["batch=12", "backend=numpy", f"optimizer={optimizer}", "averager={name: priority, window: 3}", "micro_batches=2"]
    config, _ = load(CIFAR, overrides)
    task = prepare(config, 2, (32, 32, 3), 10)
    training, chosen = task.job, task.candidate
    assert (training.model, training.batch, training.dtype, training.image_shape) == ("resnet20", 12, "float32", (32, 32, 3))
    assert (training.norms_needed, training.momentum) == (norms_needed, 0.9)
    assert training.kernels is task.job.kernels
    assert chosen == Candidate(task.plan, AveragerChoice("priority", {"window": 3}), 2)
    group = PlannedGroup(GroupLayout(training.specs, "float32"), 2)
    assert isinstance(chosen.averager.strategy(group), Priority)


def test_a_plan_refuses_the_averager_that_a_run_refuses() -> None:
    """Where it depends on the optimiser, too."""
    overrides = ["batch=12", "backend=numpy", "averager={name: sparse, momentum_correction: 0.9, two_level: false}"]
    config, _ = load(CIFAR, [*overrides, "optimizer={name: sgd, lr: 0.1, momentum: 0.0}"])
    task = prepare(config, 2, (32, 32, 3), 10)
    assert group_strategies(task.job, task.candidate)
    of_both = replace(task.job, momentum=0.9)
    with pytest.raises(ConfigError, match=r"momentum_correction is 0.9, but the optimizer already has a momentum of 0.9"):
        group_strategies(of_both, task.candidate)


@pytest.mark.parametrize(
    ("overrides", "arrays"),
    [
        (("optimizer.momentum=0.0",), 0),
        ((), 1),
        (("optimizer={name: adamw, lr: 0.1}",), 2),
        (("optimizer={name: adamw, lr: 0.1}", "ema.decay=0.9"), 3),
    ],
)
def test_a_job_knows_the_state_of_its_optimiser_and_of_its_average(overrides: tuple[str, ...], arrays: int) -> None:
    config, _ = load(CIFAR, ["batch=12", "backend=numpy", *overrides])
    assert prepare(config, 2, (32, 32, 3), 10).job.state_arrays == arrays


@pytest.mark.parametrize("averager", ["blocking", "bucketed", "priority", "sharded"])
@pytest.mark.parametrize(
    ("optimizer", "decay", "accesses", "passes", "norms"),
    [
        ("{name: sgd, lr: 0.1, momentum: 0.0}", "null", 3, 2, False),
        ("{name: sgd, lr: 0.1, weight_decay: 1.0e-4}", "null", 5, 3, False),
        ("{name: sgd, lr: 0.1, nesterov: true, weight_decay: 1.0e-4}", "null", 5, 5, False),
        ("{name: sgd, lr: 0.1, weight_decay: 1.0e-4, clip_norm: 1.0}", "null", 5, 3, True),
        ("{name: lars, lr: 0.1, weight_decay: 1.0e-4}", "null", 5, 3, True),
        ("{name: adamw, lr: 0.1}", "null", 7, 6, False),
        ("{name: lamb, lr: 0.1}", "null", 10, 8, True),
        ("{name: adamw, lr: 0.1}", "0.9", 10, 7, False),
    ],
)
def test_the_step_contains_the_memory_traffic_of_its_optimiser(
    averager: str, optimizer: str, decay: str, accesses: int, passes: int, norms: bool
) -> None:
    """Optimisers do not all cost as much as SGD, and norms cost time with every averager."""
    config, _ = load(CIFAR, ["batch=12", "backend=numpy", f"averager={averager}", f"optimizer={optimizer}", f"ema.decay={decay}"])
    job = prepare(config, 1, (32, 32, 3), 10).job
    machine = machine_of(ranks_per_node=1, flops_per_second=1e12)
    updates = 0.0
    for alike in step_program(job, Candidate(ParallelPlan(1, 1), AveragerChoice(averager)), machine, RateCosts(machine)).classes:
        updates += sum(alike.update_seconds.values())
    of_update = 1 + 5 * (accesses + 2 * passes) / 11  # in accesses, with the check of the result
    in_operation = averager in ("priority", "sharded")  # whose norms are an operation of their own
    expected = of_update + 8 * (norms and not in_operation)
    assert updates == pytest.approx(expected * 4 / 1e12)
    with_norms = job.element_seconds(RateCosts(machine), 1000, squares=True)
    assert with_norms == pytest.approx((of_update + 8 * norms) * 4 / 1e12)


LINK = Link((LinkSegment(0, 1e-5, 1e-8),))
SLOW = Machine("slow", 4, 1, 1.0, 1 << 34, LINK, LINK, 1, dict.fromkeys(OperatorClass, OperatorRate(1e10, 1e10, 1e-6)))
CONFIGS = Path(__file__).parents[2] / "configs"
CANDIDATES = [
    Candidate(ParallelPlan(1, 4)),
    Candidate(ParallelPlan(2, 2, "domain", {"classifier.*": "model"}), AveragerChoice("bucketed", {"bucket_bytes": 1 << 20}), 2),
    Candidate(
        ParallelPlan(4, 1, "domain", tiles=(2, 2)),
        AveragerChoice("sharded", {"window": None}),
    ),
    Candidate(
        ParallelPlan(2, 1, "batch", {"stage*": "domain", "stage2.conv": "batch"}),
        AveragerChoice("sharded", {"fc_exchange": "never"}),
    ),
]


@pytest.mark.parametrize("number", range(len(CANDIDATES)))
@pytest.mark.parametrize("name", ["quickstart", "quickstart-grid"])
def test_every_way_leads_to_the_candidate(name: str, number: int, tmp_path: Path) -> None:
    candidate, path = CANDIDATES[number], CONFIGS / f"{name}.yaml"
    before, _ = load(path)
    config = with_candidate(before, candidate)
    assert load(path, overrides(candidate))[0] == config
    assert parse(written(before, candidate, ("Chosen.", "In two lines.")))[0] == config
    plan = Recipe.of(config, grid=(config.grid.rows, config.grid.cols or 0)).plan
    averager = AveragerChoice(config.averager.name, config.averager.options)
    assert Candidate(plan, averager, config.micro_batches) == candidate
    untouched = set(Config.model_fields) - {"grid", "plan", "averager", "micro_batches"}
    assert all(getattr(config, key) == getattr(before, key) for key in untouched)


def test_what_a_search_chooses_is_what_a_run_with_its_keys_does() -> None:
    path = CONFIGS / "quickstart.yaml"
    changes = ("model={name: small, batch_norm: false, hidden: 512}", "batch=4", "backend=numpy")
    planned = prepare(load(path, changes)[0], 2).job
    result = search(planned, SLOW, RateCosts(SLOW), 2, SearchSpace(simulated=3))
    assert {choice.candidate.plan.rows for choice in result.choices} > {1}
    for choice in result.choices:
        config, _ = load(path, [*changes, *overrides(choice.candidate)])
        assert prepare(config, 2).candidate == choice.candidate


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
        times = OperatorTimes(configured_setting(where, job), cache_file())
        times.put(update_key(ELEMENTS), seconds)
        times.save()

    return keep


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_job_has_the_costs_of_its_dtype_and_of_the_ranks_compute(dtype: str) -> None:
    job = task(f"dtype={dtype}")
    item_bytes = {"float32": 4, "float64": 8}[dtype]
    usual = configured_costs(MACHINE, job)
    assert usual.update_seconds(ELEMENTS) == pytest.approx(6 * item_bytes * ELEMENTS / 5e9)
    assert configured_costs(MACHINE, job, compute=2.0).update_seconds(ELEMENTS) == pytest.approx(
        usual.update_seconds(ELEMENTS) / 2
    )


def test_a_machine_is_here_where_its_rates_were_measured_on_such_a_processor() -> None:
    assert is_here(machine(f"measured 2026-01-31 on {processor_model()}, 2 ranks"))
    assert not is_here(machine("measured 2026-01-31 on another processor"))
    assert not is_here(machine(f"not measured; as of {processor_model()}"))
    assert not is_here(MACHINE)


def test_times_count_where_they_were_measured(cache: Callable[[Machine, PlannedRun, float], None]) -> None:
    here, elsewhere = machine(f"measured on {processor_model()}"), machine("measured on another processor")
    job = task()
    assert configured_costs(here, job).measured_share() == 0.0  # nothing is known yet
    cache(here, job, 0.125)
    known = configured_costs(here, job)
    assert (known.update_seconds(ELEMENTS), known.measured_share()) == (0.125, 1.0)
    assert configured_costs(here, job, compute=2.0).update_seconds(ELEMENTS) == 0.0625
    assert configured_costs(elsewhere, job).update_seconds(ELEMENTS) != 0.125
    assert configured_costs(here, task("threads=2")).update_seconds(ELEMENTS) != 0.125
    assert configured_costs(here, task(ranks=1)).update_seconds(ELEMENTS) != 0.125


def test_as_many_ranks_compute_at_the_same_time_as_a_node_has_of_the_job() -> None:
    assert [configured_setting(MACHINE, task(ranks=ranks)).concurrency for ranks in (1, 2, 4)] == [1, 2, 2]


def measured_task(source: str) -> SearchTask:
    config, _ = load(QUICKSTART, ("backend=numpy", "model.width=0.25", "batch=4"))
    machine = replace(MACHINE, sources={"rates.memory.bytes_per_second": source})
    return SearchTask(config, 2, machine, image=(28, 28, 1), classes=10)


def nodes_of_cores(cores: int, ranks_per_node: int, *, scales: bool, bytes_per_second: float = 1e9) -> Machine:
    """Return a machine with `cores` cores per node, on which threads speed up arithmetic, and everything else on request.

    Args:
        scales: whether threads also speed up memory-bound work and calls.
        bytes_per_second: rate of messages.
    """
    threads = cores // ranks_per_node
    serial = 1.0 if scales else threads
    full = OperatorRate(1e9 * threads, 1e9 * threads / serial, 1e-5 / threads * serial)
    return replace(
        machine_of(ranks_per_node=ranks_per_node, bytes_per_second=bytes_per_second),
        cores_per_rank=float(threads),
        rates=dict.fromkeys(OperatorClass, full),
        single_thread_rates=dict.fromkeys(OperatorClass, OperatorRate(1e9, 1e9, 1e-5)),
    )


def layout_task(machine: Machine, ranks: int, *words: str) -> SearchTask:
    config, _ = load(QUICKSTART, ("backend=numpy", "model.width=0.25", "batch=64", *words))
    keep = ("grid", "plan", "averager", "micro_batches")
    return SearchTask(config, ranks, machine, keep=keep, image=(28, 28, 1), classes=10)


@settings(max_examples=amount(4, 30), deadline=None, phases=(Phase.generate,))  # shrinking would repeat whole searches
@given(
    cores=st.sampled_from([4, 6, 8, 16, 32]),
    number=st.integers(0, 9),
    nodes=st.integers(1, 3),
    scales=st.booleans(),
)
def test_ranks_per_node_follow_from_what_threads_speed_up(cores: int, number: int, nodes: int, scales: bool) -> None:
    """Find a search that ignores the effect of threads: serial work favours many ranks, slow links favour many threads."""
    divisors = [count for count in range(1, cores) if cores % count == 0]
    present = divisors[number % len(divisors)]
    machine = nodes_of_cores(cores, present, scales=scales, bytes_per_second=1e6 if scales else 1e12)
    outcome = search_layouts(layout_task(machine, nodes * present))
    tried = sorted(layout.ranks_per_node for layout in outcome.layouts)
    assert outcome.layouts[0].ranks_per_node == present
    assert all(layout.ranks_per_node * layout.threads <= cores for layout in outcome.layouts)
    most = max(layout.ranks_per_node for layout in outcome.layouts if not layout.refusal)
    chosen = outcome.task.machine.ranks_per_node
    if chosen != (tried[0] if scales else most):  # it is within the error of the machine's number
        assert chosen == present
        assert "within the error of predictions" in outcome.note
    assert (outcome.task.ranks, outcome.task.config.threads) == (nodes * chosen, cores // chosen)
    assert outcome.result.best.candidate.ranks == nodes * chosen
    assert outcome.seconds <= (1 + UNCERTAIN_SHARE) * min(one.outcome.seconds for one in outcome.layouts if one.outcome)


@pytest.mark.parametrize(
    ("cores", "present", "threads", "choices"),
    [
        (128, 8, None, (8, 4, 16, 2, 32)),
        (96, 8, None, (8, 4, 16, 2, 32)),
        (96, 6, None, (6, 8, 4, 16, 2)),
        (15, 5, None, (5, 1, 3, 15)),
        (64, 4, 16, (4, 2, 1)),
        (7, 3, None, (3, 1, 7)),  # the machine's number need not divide the cores
    ],
)
def test_ranks_per_node_to_compare(cores: int, present: int, threads: int | None, choices: tuple[int, ...]) -> None:
    """Find choices that exceed the cores, or that prefer other divisors to powers of two."""
    machine = replace(machine_of(ranks_per_node=present), cores_per_rank=cores / present)
    assert ranks_per_node_choices(machine, threads) == choices


@pytest.mark.parametrize(
    ("words", "ranks", "reason"),
    [
        (("grid.rows=1",), 3, "Ranks per node are not compared: a job of 3 ranks does not fill nodes of 2 ranks."),
        (("grid.rows=1", "grid.cols=2"), 2, "Ranks per node are not compared: the kept grid has 2 ranks."),
    ],
)
def test_ranks_per_node_that_are_not_compared_have_a_reason(words: tuple[str, ...], ranks: int, reason: str) -> None:
    machine = nodes_of_cores(8, 2, scales=True)
    outcome = search_layouts(layout_task(machine, ranks, *words))
    assert (outcome.note, outcome.layouts, outcome.task.config.threads) == (reason, (), "auto")
    unknown = search_layouts(layout_task(replace(machine, single_thread_rates={}), ranks, *words))
    assert "the file of machine toy has no single_thread_rates" in unknown.note


def test_configured_threads_and_the_batch_limit_the_ranks_per_node() -> None:
    """Find ranks and threads that exceed the cores, and a search on more ranks than samples."""
    machine = nodes_of_cores(8, 2, scales=False)
    outcome = search_layouts(layout_task(machine, 2, "threads=2", "batch=3"))
    assert [(one.ranks_per_node, one.threads) for one in outcome.layouts] == [(2, 2), (1, 2), (4, 2)]
    assert [one.refusal for one in outcome.layouts] == ["", "", "4 ranks exceed the batch of 3 samples"]
    fixed = search_layouts(layout_task(machine, 6, "threads=2"), 3)
    assert [(one.ranks_per_node, one.threads, one.task.ranks) for one in fixed.layouts] == [(3, 2, 6)]
    wide = search_layouts(layout_task(machine, 2, "threads=5"))  # 2 ranks of 5 threads exceed the 8 cores, 1 rank does not
    assert "too few for 2 ranks per node with 5 threads" in wide.layouts[0].refusal
    assert (wide.task.ranks, wide.note) == (1, "The fastest choice is 1 rank per node with 5 threads per rank.")
    smaller = search_layouts(layout_task(machine, 2, "batch=1"))  # the machine's number is impossible, another one is not
    assert "batch" in smaller.layouts[0].refusal
    assert (smaller.task.ranks, smaller.note) == (1, "The fastest choice is 1 rank per node with 8 threads per rank.")
    with pytest.raises(ConfigError, match="batch is 3, "):
        search_layouts(layout_task(machine, 12, "batch=3"))


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_search_that_compares_no_layouts_has_the_configured_threads(threads: int) -> None:
    """A rank with fewer or more threads does not have the times of one thread per core."""
    machine = nodes_of_cores(8, 4, scales=True)
    outcome = run_search(layout_task(machine, 3, f"threads={threads}"))
    assert outcome.task.machine.ranks_per_node == min(4, 8 // threads)
    usual = run_search(layout_task(machine, 3))
    on_layout = outcome.result.best.prediction.step.table.total.compute_seconds
    assert on_layout == pytest.approx(usual.result.best.prediction.step.table.total.compute_seconds * 2 / threads, rel=0.2)
    unknown = replace(machine, single_thread_rates={})
    assert run_search(layout_task(unknown, 3, f"threads={threads}")).task.machine == unknown


def test_another_machine_cannot_be_measured_here() -> None:
    with pytest.raises(ConfigError, match="but machine test was not measured on it"):
        measure(measured_task("measured on another processor"), [Candidate(ParallelPlan(1, 2))], 1.0)


@pytest.mark.job
@pytest.mark.slow
def test_both_ranks_of_a_node_measure_and_one_keeps_the_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = measured_task(f"measured on {processor_model()}")
    candidates = [Candidate(ParallelPlan(1, 2)), Candidate(ParallelPlan(2, 1, "domain"))]
    coverage = measure(here, candidates, 30.0)
    assert coverage.programs >= 2
    assert coverage.covered == tuple(candidates)
    times = OperatorTimes(configured_search.configured_setting(here.machine, on_any_grid(here)), cache_file())
    assert times.setting.concurrency == 2
    assert len(times) > 10
    again = measure(here, candidates, 30.0)
    assert again.programs == 0  # all is known


GRID = Path(__file__).parents[2] / "configs" / "quickstart-grid.yaml"
IMAGE = (28, 28, 1)


def grid_task(*overrides: str, ranks: int = 4, keep: tuple[str, ...] = ()) -> SearchTask:
    config, _ = load(GRID, ("backend=numpy", *overrides))
    return SearchTask(config, ranks, MACHINE, keep=keep, image=IMAGE, classes=10)


@pytest.mark.parametrize("ranks", [1, 3, 7, 12, 1000])
def test_the_job_does_not_depend_on_the_configured_grid(ranks: int) -> None:
    """Neither a grid of two rows on 3 ranks nor fewer samples than ranks are in its way."""
    planned = on_any_grid(grid_task("batch=8", ranks=ranks))
    assert (planned.plan.rows * planned.plan.cols, planned.job.image_shape) == (ranks, IMAGE)
    assert len(planned.job.specs) == len(on_any_grid(grid_task("batch=8", ranks=1)).job.specs)


def space_of(searched: SearchTask) -> SearchSpace:
    return configured_space(searched.config, searched.ranks, searched.keep, on_any_grid(searched).job.kernels)


def test_nothing_is_fixed_but_what_is_kept() -> None:
    free = grid_task("averager=bucketed", "micro_batches=2")
    space = space_of(free)
    assert (space.fixed_grid, space.fixed_plan, space.fixed_averager, space.fixed_micro_batches) == (None, None, None, None)


@pytest.mark.parametrize("plan", ["kept", "open"])
def test_a_kept_grid_keeps_its_tiles(plan: str) -> None:
    words = ("grid.rows=4", "grid.cols=1", "plan.default=domain", "grid.tiles=[2,2]")
    kept = grid_task(*words, keep=("grid", "averager", "micro_batches", *(("plan",) if plan == "kept" else ())))
    space, job = space_of(kept), on_any_grid(kept).job
    for choice in (AveragerChoice(), AveragerChoice("blocking")):
        for estimate in GridEstimates(job, MACHINE, RateCosts(MACHINE), space, (4, 1)).best(choice):
            assert estimate.candidate.plan.tiles == (2, 2)
            assert with_candidate(kept.config, estimate.candidate).grid.tiles == (2, 2)
    opened = space_of(grid_task(*words, keep=("plan",)))
    assert opened.fixed_plan is not None
    assert opened.fixed_plan.tiles is None


@pytest.mark.parametrize(("keep", "grid"), [((), (1, 4)), (("grid",), (2, 2))])
def test_on_devices_one_row_is_searched_unless_a_grid_is_kept(
    keep: tuple[str, ...], grid: tuple[int, int], emulated_device: EmulatedDeviceFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEVICE_VARIABLE, "hpctrain_testing.emulator")
    kept = grid_task("backend=cuda", keep=keep)
    assert space_of(kept).fixed_grid == grid


@pytest.mark.parametrize("ranks", [3, 5])
def test_a_kept_grid_must_be_one_of_the_ranks(ranks: int) -> None:
    with pytest.raises(HpctrainError, match=rf"grid.rows \* grid.cols must be {ranks}"):
        space_of(grid_task(ranks=ranks, keep=("grid",)))


def points() -> list[SimulatedPoint]:
    """Weak scaling over 1, 2 and 4 ranks."""
    return [
        SimulatedPoint("sharded", 2**k, 32 * 2**k, (1, 2**k), predictions.prediction(value, 0.1 * k))
        for k, value in enumerate((0.5, 0.6, 0.9))
    ]


def test_efficiency_is_that_of_bench_scaling() -> None:
    weak = points()
    assert [point.efficiency(weak[0]) for point in weak] == pytest.approx([1.0, 0.5 / 0.6, 0.5 / 0.9])
    strong = [
        SimulatedPoint("a", ranks, 64, (1, ranks), predictions.prediction(seconds)) for ranks, seconds in ((2, 0.4), (8, 0.2))
    ]
    assert strong[1].efficiency(strong[0]) == pytest.approx(2 * 0.4 / (8 * 0.2))


TWO_ROWS = ("model={name: vgg11, width: 0.05}", "batch=14", "backend=numpy", "grid.rows=2", "grid.cols=1")
SPLIT = ("plan.classifier.*=model",)
WHOLE = ("plan.features.*=domain",)
NORMS = {
    "lars": "optimizer={name: lars, lr: 0.1}",
    "lamb": "optimizer={name: lamb, lr: 0.1}",
    "clipping": "optimizer={name: sgd, lr: 0.1, clip_norm: 1.0}",
}
NO_NORMS = "optimizer={name: sgd, lr: 0.1}"
SENTENCE = (
    "The averager plain computes no norms (its class does not set adds_norms), which optimizer.clip_norm, lars and lamb require; "
    "remove clip_norm and use sgd, adam or adamw, or use another averager."
)
#: a strategy of somebody's own that has never heard of norms
PLAIN_STRATEGY = """
from hpctrain.averaging.base import GradientAverager
from hpctrain.averaging.base import Strategy

class PlainAverager(GradientAverager):
    def begin_step(self, lr, counts=None): ...
    def grad_ready(self, parameter): ...
    def end_backward(self): ...
    def before_forward(self, parameters): ...
    def drain(self): ...

class Plain(Strategy):
    def __init__(self, group, *, pieces: int = 1) -> None:
        super().__init__(group)

    def averager(self, setup, agreement):
        return PlainAverager(setup)
"""


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Overrides for a strategy that computes no norms."""
    package = tmp_path / "own_strategies"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "plain.py").write_text(PLAIN_STRATEGY)
    monkeypatch.syspath_prepend(tmp_path)
    given = averagers.AVERAGERS.given
    monkeypatch.setattr(averagers, "AVERAGERS", Registry("own_strategies", "averager", Strategy, given))
    return (*TWO_ROWS, "averager=plain")


def _command(*words: str) -> Callable[..., None]:
    """A command of the configuration, whose refusal is raised."""

    def run(*overrides: str) -> None:
        image = () if words[0] == "config" else ("--image", "35", "35", "3", "--classes", "9")
        result = CliRunner().invoke(cli, [*words, str(CONFIG), *overrides, *image])
        if result.exit_code:
            assert (result.exit_code, result.stdout) == (2, ""), result.output
            raise ConfigError(result.stderr)

    return run


def _schedules(*overrides: str) -> None:
    """The plan itself, without the command's checks before it."""
    config, _ = load(CONFIG, overrides)
    task = prepare(config, 2, (35, 35, 3), 9)
    group_schedules(task.job, task.candidate, LinkModel(1e-5, 1e-9))


@pytest.mark.slow
@pytest.mark.parametrize("use", [_command("config", "check"), _command("plan", "show"), _command("plan", "schedule"), _schedules])
def test_norms_that_no_rank_adds_up_are_refused_in_one_sentence_everywhere(
    plain: tuple[str, ...], use: Callable[..., None]
) -> None:
    for norms in NORMS.values():
        for layers in (SPLIT, WHOLE, (*SPLIT, "grid.rows=1", "grid.cols=2")):
            with pytest.raises(ConfigError) as caught:
                use(*plain, norms, *layers)
            assert str(caught.value).strip().endswith(SENTENCE)
            assert len(str(caught.value).strip().splitlines()) == 1
    for layers in (SPLIT, WHOLE):
        use(*plain, NO_NORMS, *layers)


@pytest.mark.parametrize(
    ("overrides", "split"),
    [
        (SPLIT, True),
        (WHOLE, False),
        (("plan.default=model",), True),
        (("plan.default=model", "grid.rows=1"), False),
        (("plan.features.*=model", "plan.features.*=batch"), False),
        (("plan.features.1=model",), False),  # a ReLU
        ((*SPLIT, "model.width=-1"), False),  # a fault of its own
        ((*SPLIT, "grid.tiles=[3, 2]"), False),
    ],
)
def test_it_is_known_before_a_run_whether_parameters_are_split(overrides: tuple[str, ...], split: bool) -> None:
    config, _ = load(CONFIG, [*TWO_ROWS, *overrides])
    assert Recipe.of(config, grid=(config.grid.rows, config.grid.cols or 1)).splits_parameters is split
