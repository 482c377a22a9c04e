"""Simulated steps: closed forms, sums that must hold, averagers on virtual time; places, processes, tasks and events of ranks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging.base import PlannedGroup, Strategy
from hpctrain.averaging.collective_schedule import (
    CollectiveSchedule,
    EventKind,
    LocalEventKey,
    Operation,
    OperationKind,
    Stream,
    dependencies,
)
from hpctrain.averaging.reduce_scatter_strategy import ReduceScatterStrategy
from hpctrain.averaging.slicing import Slice
from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.priority import Priority
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.comm.link import LinkModel
from hpctrain.comm.progress import ProgressMode
from hpctrain.core.errors import ConfigError, DeadlockError
from hpctrain.nn.parameter import GroupLayout, ParameterSpec
from hpctrain.planner.costs import collective_costs
from hpctrain.planner.costs.collective_costs import CollectiveStage, GridPlacements, stages, unhindered_seconds
from hpctrain.planner.costs.machine import Machine, OperatorClass, OperatorRate
from hpctrain.planner.program.step_program import times_of
from hpctrain.planner.simulation.operations import Posted, group_tasks
from hpctrain.planner.simulation.processes import EventRecorder, SimulatedProcess, Stretch
from hpctrain.planner.simulation.simulate import simulate
from hpctrain.planner.simulation.tasks import (
    AveragedGroup,
    BeginExchange,
    Compute,
    EndBackward,
    EndExchange,
    Exchange,
    Happens,
    Merge,
    NeedsParameters,
    RankClass,
    SimulatedStep,
    SimulationOptions,
    StepMessage,
    StepProgram,
    Task,
)
from hpctrain.planner.simulation.world import MOST_PLACES, MOST_SINGLE_RANKS, SimulatedWorld, class_of_ranks, places
from hpctrain.trace.time_table import tabulate
from hpctrain.trace.tracer import Category
from tests.averaging.strategies.test_each_strategy import COMPUTE_SECONDS, FORWARD, _step_seconds
from tests.averaging.strategies.test_each_strategy import SIZES as LAYER_SIZES
from tests.support.simulated import GROUP, ITEM_BYTES, allreduces, link, machine, placement, program, sharded, tasks

SIZES, SECONDS = (1000, 2000, 4000), (0.1, 0.2, 0.3)
COMPUTE = 3 * sum(SECONDS)
MACHINE = machine(link(1e-3, 1e-5))
SCHEDULES = {"blocking": None, "allreduces": allreduces(SIZES, 2), "sharded": sharded(SIZES, 2), "window": sharded(SIZES, 2, 1)}
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
every_mode = pytest.mark.parametrize("mode", ProgressMode)


def _allreduce(elements: int, on: Machine = MACHINE) -> float:
    return unhindered_seconds(stages(on, OperationKind.ALLREDUCE, elements * ITEM_BYTES, placement(2)))


def _step(schedule: CollectiveSchedule | None, on: Machine = MACHINE, **options: object) -> SimulatedStep:
    step = program([(2, tasks(SECONDS))], SIZES, schedule, update_seconds=1e-6)
    return simulate(step, on, SimulationOptions(**options))  # type: ignore[arg-type]


# -- closed forms ----------------------------------------------------------------------------------------------------------------
@every_schedule
def test_one_rank_takes_the_sum_of_its_tasks(schedule: CollectiveSchedule | None) -> None:
    alone = None if schedule is None else replace(schedule, ranks=1)
    step = simulate(program([(1, tasks(SECONDS))], SIZES, alone, update_seconds=1e-6), MACHINE)
    assert step.seconds == pytest.approx(COMPUTE + sum(SIZES) * 1e-6)
    assert step.exposed_seconds == 0


@every_schedule
def test_on_a_free_network_the_slowest_class_counts(schedule: CollectiveSchedule | None) -> None:
    slower = tuple(2 * seconds for seconds in SECONDS)
    step = simulate(program([(1, tasks(SECONDS)), (1, tasks(slower))], SIZES, schedule), machine())
    assert step.seconds == pytest.approx(2 * COMPUTE)


def test_blocking_is_compute_then_the_allreduce_then_the_update() -> None:
    assert _step(None).seconds == pytest.approx(COMPUTE + _allreduce(sum(SIZES)) + sum(SIZES) * 1e-6)
    assert _step(None).exposed_seconds == pytest.approx(_allreduce(sum(SIZES)))


def test_operations_in_flight_together_share_the_wire_and_overlap_their_latencies() -> None:
    body = tasks((0.0, 0.0))
    latency_bound, wire_bound = machine(link(1.0, 0.0)), machine(link(0.0, 1e-5))
    sizes = (1000, 1000)
    both = program([(2, body)], sizes, allreduces(sizes, 2))
    assert simulate(both, latency_bound).seconds == pytest.approx(_allreduce(1000, latency_bound))
    assert simulate(both, wire_bound).seconds == pytest.approx(2 * _allreduce(1000, wire_bound))
    serial = program([(2, body)], sizes, allreduces(sizes, 2, window=1))
    assert simulate(serial, latency_bound).seconds == pytest.approx(2 * _allreduce(1000, latency_bound))


def test_ranks_of_a_node_share_its_card() -> None:
    def seconds(ranks_per_node: int) -> float:
        on = machine(link(0.0, 1e-5), ranks_per_node=ranks_per_node)
        exchanged = CollectiveSchedule("toy", 8, allreduces((8000,), 8).slices, sharded((8000,), 8).operations)
        step = program([(8, tasks((0.0,)))], (8000,), exchanged, ranks_per_node=ranks_per_node)
        return simulate(step, on).seconds

    assert seconds(2) > 1.3 * seconds(1)


# -- sums ------------------------------------------------------------------------------------------------------------------------
@every_schedule
@every_mode
def test_compute_messages_exposed_and_the_rest_are_the_step(schedule: CollectiveSchedule | None, mode: ProgressMode) -> None:
    step = _step(schedule, progress=mode)
    table = step.table
    own = table.total.compute_seconds + table.total.messages_seconds
    total = own + table.total.exposed_seconds + table.left_over_seconds
    assert total == pytest.approx(step.seconds, abs=1e-7)
    assert table.step_seconds == pytest.approx(step.seconds, abs=1e-7)
    assert table.total.hidden_seconds <= table.total.communication_seconds + 1e-9


def test_events_are_tabulated_as_those_of_runs() -> None:
    step = _step(SCHEDULES["sharded"])
    (events,) = step.events.values()
    table = tabulate(events, skip=0)
    assert table is not None
    assert table.rows == step.table.rows
    assert {row.name for row in table.rows} == {"l0", "l1", "l2", "optimizer update"}


def test_the_table_is_a_mean_over_ranks() -> None:
    slower = tuple(2 * seconds for seconds in SECONDS)
    step = simulate(program([(3, tasks(SECONDS)), (1, tasks(slower))], SIZES, sharded(SIZES, 4)), machine())
    assert step.table.total.compute_seconds == pytest.approx((3 * COMPUTE + 2 * COMPUTE) / 4, rel=1e-6)
    assert step.table.total.exposed_seconds == pytest.approx(3 * COMPUTE / 4, rel=1e-6)


# -- what never gets worse -------------------------------------------------------------------------------------------------------
@every_mode
@pytest.mark.parametrize("schedule", [None, allreduces(SIZES, 2, 1)], ids=["blocking", "one by one"])
def test_better_machines_never_make_a_chain_slower(schedule: CollectiveSchedule | None, mode: ProgressMode) -> None:
    """On a chain each task waits for the one before: no faster one lets another overtake."""
    usual = machine(link(1e-3, 1e-5, unattended_bytes=1500))
    seconds = _step(schedule, usual, progress=mode).seconds
    for factor in (1.1, 2.0, 10.0):
        assert _step(schedule, usual.scaled(bandwidth=factor), progress=mode).seconds <= seconds + 1e-9
        assert _step(schedule, usual.scaled(latency=1 / factor), progress=mode).seconds <= seconds + 1e-9


@every_schedule
def test_polls_between_operators_never_hurt(schedule: CollectiveSchedule | None) -> None:
    held_up = machine(link(1e-3, 1e-5, unattended_bytes=500))
    none, test, thread = (_step(schedule, held_up, progress=mode).seconds for mode in ProgressMode)
    assert test <= none + 1e-9
    assert thread <= test + 1e-9


@every_schedule
@every_mode
def test_a_step_is_no_shorter_than_compute_and_no_longer_than_everything_in_turn(
    schedule: CollectiveSchedule | None, mode: ProgressMode
) -> None:
    for unattended in (None, 0, 1000):
        on = machine(link(1e-3, 1e-5, unattended_bytes=unattended))
        seconds = _step(schedule, on, progress=mode).seconds
        update = sum(SIZES) * 1e-6
        assert seconds >= COMPUTE
        assert seconds <= COMPUTE + update + sum(_allreduce(size) for size in SIZES) + 1e-9


# -- folding, noise and errors ---------------------------------------------------------------------------------------------------
def _halves(split: int) -> StepProgram:
    # Odd numbers: where two things happen at one instant, roundings would decide which one a poll sees.
    def body(seconds: float) -> tuple[Task, ...]:
        exchange = (BeginExchange(0, Exchange("halo", 500, 500, 1)), Compute("early", Category.WORK, 0.0137), EndExchange(0))
        return *exchange, *tasks((seconds, 0.0219, 0.0313))

    return program(
        [(4, body(0.0117)), (4, body(0.0331))], SIZES, sharded(SIZES, 8), ranks_per_node=4, split=split, update_seconds=1e-6
    )


@every_mode
@pytest.mark.parametrize("cores_per_rank", [1.0, 0.5])
def test_folded_ranks_give_what_single_ones_give(cores_per_rank: float, mode: ProgressMode) -> None:
    on = machine(
        link(1e-4, 1e-6, unattended_bytes=3000, byte_seconds=1e-8, operation_seconds=1e-5),
        link(1e-5, 1e-7, unattended_bytes=2000, byte_seconds=1e-7, operation_seconds=1e-5),
        ranks_per_node=4,
        cores_per_rank=cores_per_rank,
    )
    folded = simulate(_halves(2), on, SimulationOptions(progress=mode))
    single = simulate(_halves(2), on, SimulationOptions(progress=mode, slow={0: 1.0}))
    assert len(single.events) == 8
    assert single.seconds == pytest.approx(folded.seconds, abs=1e-9)
    assert single.exposed_seconds == pytest.approx(folded.exposed_seconds, abs=1e-8)


def test_a_slow_rank_holds_all_up() -> None:
    step = program([(4, tasks(SECONDS))], SIZES, sharded(SIZES, 4))
    slow = simulate(step, machine(), SimulationOptions(slow={2: 1.5}))
    assert slow.seconds == pytest.approx(1.5 * COMPUTE)
    assert set(slow.events) == {f"rank {rank}" for rank in range(4)}


def test_random_schedules_end() -> None:
    draw = random.Random(11)
    for _ in range(20):
        sizes = [draw.randrange(1, 5000) for _ in range(6)]
        body = tasks([draw.uniform(0, 0.05) for _ in sizes])
        schedule = draw.choice([sharded, allreduces])(sizes, 4, draw.choice([None, 1, 3]))
        on = machine(link(1e-4, 1e-6, unattended_bytes=draw.choice([None, 0, 2000]), byte_seconds=1e-9))
        mode = draw.choice(list(ProgressMode))
        assert simulate(program([(4, body)], sizes, schedule), on, SimulationOptions(progress=mode)).seconds > 0


def test_ranks_that_wait_without_end_are_named() -> None:
    """One rank exchanges, the other does not."""
    alone: tuple[Task, ...] = (BeginExchange(0, Exchange("halo of conv1", 10, 10, 1)), EndExchange(0))
    with pytest.raises(DeadlockError, match=r"rank 0 \(class 0\) waits for halo of conv1"):
        simulate(program([(1, alone), (1, (Compute("c", Category.WORK, 1.0),))], split=2), MACHINE)


def test_a_slow_rank_that_the_job_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rank 7 .* 0 to 1"):
        simulate(program([(2, tasks(SECONDS))]), MACHINE, SimulationOptions(slow={7: 2.0}))


def _work(seconds: float, name: str = "work", *, polls: bool = True) -> Compute:
    return Compute(name, Category.WORK, seconds, polls)


def _posted(step: SimulatedStep, track: str) -> list[str]:
    """Names of a queue's operations in the order of their numbers."""
    (events,) = step.events.values()
    operations = events.of(Category.COMMUNICATION)
    mine = [k for k, index in enumerate(operations.track.tolist()) if operations.tracks[index] == track]
    mine.sort(key=lambda k: (operations.start_ns[k], operations.number[k]))
    assert (operations.number[mine][1:] > operations.number[mine][:-1]).all()
    return [operations.names[operations.name[k]] for k in mine]


def test_the_order_of_postings_is_the_schedules() -> None:
    schedule = sharded(SIZES, 2, window=1)
    step = simulate(program([(2, tasks(SECONDS))], SIZES, schedule), MACHINE)
    for stream in ("gradients", "parameters"):
        expected = [schedule.text(operation) for operation in schedule.operations if operation.stream == stream]
        posted = _posted(step, f"all {stream}")
        assert set(posted) == set(expected)
        begin = expected.index(posted[0])
        assert posted == [expected[(begin + k) % len(expected)] for k in range(len(posted))]


def test_exchanges_hide_under_what_lies_between() -> None:
    exchange = Exchange("halo", 1000, 1000, 1)
    seconds = unhindered_seconds(stages(MACHINE, "exchange", 1000, placement(2), None, 1))
    assert seconds > 0.01

    def step(between: float) -> float:
        body: tuple[Task, ...] = (BeginExchange(0, exchange), _work(between), EndExchange(0), _work(0.5))
        return simulate(program([(1, body), (1, body)], split=2), MACHINE).seconds

    assert step(0.0) == pytest.approx(seconds + 0.5)
    assert step(0.005) == pytest.approx(seconds + 0.5)
    assert step(1.0) == pytest.approx(1.5)


def test_merged_statistics_are_waited_for() -> None:
    seconds = unhindered_seconds(stages(MACHINE, "merge", 2 * 64, placement(2)))
    step = simulate(program([(2, (_work(1.0), Merge("moments of bn", "all", 64)))]), MACHINE)
    assert step.seconds == pytest.approx(1.0 + seconds)
    assert step.table.rows[0].name == "moments of bn"
    assert step.exposed_seconds == pytest.approx(seconds)


def test_the_steps_message_is_waited_for_one_step_later() -> None:
    seconds = unhindered_seconds(stages(MACHINE, "message", 1000, placement(2)))
    assert simulate(program([(2, (_work(1.0), StepMessage(1000)))]), MACHINE).seconds == pytest.approx(1.0)
    assert simulate(program([(2, (_work(0.0), StepMessage(1000)))]), MACHINE).seconds == pytest.approx(seconds)


def test_late_updates_are_of_whole_slices() -> None:
    step = simulate(program([(2, tasks(SECONDS))], SIZES, allreduces(SIZES, 2), update_seconds=1e-6), machine())
    assert step.seconds == pytest.approx(1.8 + sum(SIZES) * 1e-6)
    sharded_step = simulate(program([(2, tasks(SECONDS))], SIZES, sharded(SIZES, 2), update_seconds=1e-6), machine())
    assert sharded_step.seconds == pytest.approx(1.8 + sum(SIZES) / 2 * 1e-6)


def test_polls_between_operators_are_left_out_without_progress() -> None:
    """Of three messages, 1,000 bytes each move between two polls: 30 ms of the wire."""
    body = (BeginExchange(0, Exchange("halo", 10_000, 10_000, 3)), _work(0.2), _work(0.2), EndExchange(0))
    slow = machine(link(0.0, 1e-5, unattended_bytes=1_000))

    def seconds(mode: ProgressMode) -> float:
        return simulate(program([(1, body)] * 4, split=4), slow, SimulationOptions(progress=mode)).seconds

    assert seconds(ProgressMode.NONE) == pytest.approx(0.4 + 0.07)
    assert seconds(ProgressMode.TEST) == pytest.approx(0.4 + 0.04)
    assert seconds(ProgressMode.THREAD) == pytest.approx(0.4)


RANKS, ALPHA = 2, 1e-4
CASES: dict[str, tuple[type[Strategy], dict[str, Any]]] = {
    "blocking": (Blocking, {}),
    "bucketed": (Bucketed, {"bucket_bytes": 8000}),
    "sharded": (Sharded, {"fc_exchange": "never", "bucket_bytes": 2000}),
    "priority": (Priority, {"fc_exchange": "never", "slice_parameters": 1000, "window": 12}),
}


def _tasks() -> Iterator[Task]:
    def halves(layer: int, category: Category) -> Iterator[Task]:
        yield from (Compute(f"l{layer}", category, FORWARD[layer] / 2) for _ in range(2))

    for layer in range(len(LAYER_SIZES)):
        yield NeedsParameters(GROUP, (f"l{layer}.weight",))
        yield from halves(layer, Category.FORWARD)
    for layer in reversed(range(len(LAYER_SIZES))):
        yield from halves(layer, Category.PARAMETERS)
        yield Happens(GROUP, LocalEventKey(EventKind.GRADIENT, f"l{layer}.weight"))
        yield from halves(layer, Category.INPUT)
        yield Happens(GROUP, LocalEventKey(EventKind.LAST_READ, f"l{layer}.weight"))
    yield EndBackward()


def _simulated(kind: type[Strategy], wire_share: float, options: dict[str, Any]) -> float:
    """The same step as `_step_seconds` runs."""
    specs = {f"l{k}.weight": ParameterSpec((size,), lambda random, shape: np.zeros(shape)) for k, size in enumerate(LAYER_SIZES)}
    layout, steps = GroupLayout(specs, "float32"), tuple(_tasks())
    beta = wire_share * COMPUTE_SECONDS / (2 * (RANKS - 1) / RANKS * 4 * sum(LAYER_SIZES))
    strategy = kind(PlannedGroup(layout, RANKS, nominal_batch=4 * RANKS), kind.Options(**options))
    schedule = strategy.plan(LinkModel(ALPHA, beta))
    if schedule is not None and isinstance(strategy, ReduceScatterStrategy):
        schedule = strategy.replan(schedule, times_of(steps, GROUP, layout), LinkModel(ALPHA, beta))
    return simulate(program([(RANKS, steps)], LAYER_SIZES, schedule), machine(link(ALPHA, beta))).seconds


@pytest.mark.slow
@pytest.mark.parametrize("wire_share", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("case", CASES)
def test_averagers_on_virtual_time_take_as_long(case: str, wire_share: float) -> None:
    kind, options = CASES[case]
    assert _simulated(kind, wire_share, options) == pytest.approx(_step_seconds(kind, wire_share, RANKS, **options), rel=3e-3)


def _program(split: int, *classes: tuple[int, int]) -> StepProgram:
    """Classes of (ranks, first split rank)."""
    ranks = sum(count for count, _ in classes)
    return StepProgram(
        tuple(RankClass(f"class {k}", count, begin, 1, ()) for k, (count, begin) in enumerate(classes)),
        {},
        GridPlacements(placement(ranks), placement(split), placement(ranks // split)),
    )


@pytest.mark.parametrize(
    ("split", "classes", "expected"),
    [
        (1, [(4, 0)], [0, 0, 0, 0]),
        (2, [(2, 0), (2, 1)], [0, 1, 0, 1]),
        (1, [(1, 0), (3, 0)], [0, 1, 1, 1]),  # the first data rank has one sample more
        (4, [(2, 0), (4, 1), (2, 3)], [0, 1, 1, 2, 0, 1, 1, 2]),
        (4, [(4, 0), (4, 1)], [0, 1, 1, 0, 0, 1, 1, 0]),  # both ends of an image are alike
        (2, [(1, 0), (2, 0), (1, 1), (2, 1)], [0, 2, 1, 3, 1, 3]),
    ],
)
def test_ranks_have_the_classes_of_their_places(split: int, classes: list[tuple[int, int]], expected: list[int]) -> None:
    assert class_of_ranks(_program(split, *classes)) == expected


@pytest.mark.parametrize("ranks_per_node", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    "program", [_program(1, (8, 0)), _program(2, (1, 0), (3, 0), (4, 1)), _program(4, (2, 0), (4, 1), (2, 3))], ids="abc"
)
def test_every_rank_is_in_one_process(program: StepProgram, ranks_per_node: int) -> None:
    folded = places(program, ranks_per_node)
    counts: Counter[str] = Counter()
    for place in folded:
        counts[place.rank_class.name] += place.ranks
        assert 0 < place.node_ranks <= ranks_per_node
    assert counts == {one.name: one.ranks for one in program.classes}
    single = places(program, ranks_per_node, single=True)
    assert [place.first_rank for place in single] == list(range(8))
    assert {place.rank_class.name for place in single} == set(counts)


def test_too_many_single_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match=f"limited to {MOST_SINGLE_RANKS} ranks, but the job has 1,024"):
        places(_program(1, (1024, 0)), 32, single=True)


def test_nodes_that_differ_in_too_many_ways_count_as_alike() -> None:
    classes = [(50, row) for row in range(20)]
    program = _program(20, *classes[:7], *((count, row) for row in range(7, 20) for count in (20, 30)))
    folded = places(program, 32)
    assert len(folded) <= MOST_PLACES
    assert sum(place.ranks for place in folded) == 1000
    assert {place.node for place in folded} == {folded[0].node}
    assert sum(place.node_ranks for place in folded) == pytest.approx(1000 / 32, rel=0.03)  # of 32 nodes, the last is not full
    few = places(program, 1000)
    assert len({place.node for place in few}) == 1


def _run(
    body: Callable[[SimulatedProcess], Stretch],
    mode: ProgressMode = ProgressMode.TEST,
    unattended: int = 0,
    cores_per_rank: float = 1.0,
) -> SimulatedProcess:
    step = program([(1, ())])
    (place,) = places(step, 1)
    world = SimulatedWorld(step, machine(link(unattended_bytes=unattended), cores_per_rank=cores_per_rank), [place])
    process = SimulatedProcess(place, world, mode)
    process.recorder.begin()
    process.start(body(process))
    world.loop.run()
    return process


def _post(process: SimulatedProcess, *stages: CollectiveStage) -> Posted:
    posted = Posted("sum", "queue", 0)
    process.post(process.world.group(process.place, "all"), posted, stages)
    return posted


def _stage(seconds: float, cpu: float = 0.0, rounds: int = 1) -> CollectiveStage:
    return CollectiveStage(True, 0.0, seconds, 1.0, cpu, rounds)


def _now(process: SimulatedProcess) -> float:
    return process.world.loop.now


def _waiting(seconds: float, cpu: float = 0.0) -> Callable[[SimulatedProcess], Stretch]:
    """A process that posts one operation and waits for it."""

    def body(process: SimulatedProcess) -> Stretch:
        yield from process.wait(_post(process, _stage(seconds, cpu)))

    return body


def test_a_wait_ends_with_the_operation_and_is_recorded() -> None:
    process = _run(_waiting(2.0))
    assert _now(process) == 2.0
    events = process.recorder.events()
    assert sorted(events.category.tolist()) == [Category.COMMUNICATION, Category.WAIT]
    assert set(events.stop_ns.tolist()) == {2_000_000_000}


@pytest.mark.parametrize(("cpu", "end"), [(1.0, 2.0), (5.0, 5.0)])
def test_the_cores_time_of_messages_goes_with_a_wait(cpu: float, end: float) -> None:
    assert _now(_run(_waiting(2.0, cpu))) == pytest.approx(end)


def test_the_cores_time_of_messages_comes_on_top_of_work() -> None:
    def body(process: SimulatedProcess) -> Stretch:
        posted = _post(process, _stage(2.0, 0.5))
        yield from process.work(4.0)
        yield from process.poll()
        assert posted.done
        yield from process.work(1.0)

    assert _now(_run(body, unattended=10)) == pytest.approx(5.5)


@pytest.mark.parametrize(("mode", "end"), [(ProgressMode.TEST, 4.0 + 2.0), (ProgressMode.THREAD, 4.0)])
def test_stages_follow_at_polls_or_by_the_thread(mode: ProgressMode, end: float) -> None:
    def body(process: SimulatedProcess) -> Stretch:
        posted = _post(process, _stage(1.0), _stage(2.0))
        yield from process.work(4.0)
        yield from process.wait(posted)

    assert _now(_run(body, mode, unattended=10)) == pytest.approx(end)


def test_what_flies_at_the_end_is_recorded() -> None:
    def body(process: SimulatedProcess) -> Stretch:
        _post(process, _stage(2.0))
        yield from process.work(1.0)

    process = _run(body)
    assert len(process.recorder.events()) == 0
    process.finish()
    assert process.recorder.events().category.tolist() == [Category.COMMUNICATION]


@pytest.mark.parametrize(("seconds", "cores_per_rank", "end"), [(1e-4, 1.0, 1e-4), (1e-4, 0.5, 2e-3), (0.5, 0.5, 0.5)])
def test_a_rank_that_shares_its_core_gets_it_back_at_a_tick(seconds: float, cores_per_rank: float, end: float) -> None:
    process = _run(_waiting(seconds), cores_per_rank=cores_per_rank)
    assert _now(process) == pytest.approx(end)
    (wait,) = [k for k, category in enumerate(process.recorder.events().category) if category == Category.WAIT]
    assert process.recorder.events().stop_ns[wait] == pytest.approx(end * 1e9)


def test_an_operation_that_is_complete_costs_no_wait_on_a_shared_core() -> None:
    def body(process: SimulatedProcess) -> Stretch:
        posted = _post(process, _stage(0.5))
        yield from process.work(1.0)
        yield from process.poll()
        yield from process.wait(posted)

    assert Category.WAIT not in _run(body, cores_per_rank=0.5).recorder.events().category.tolist()


UNEVEN_SIZES = (10, 21, 32)
RANKS_MACHINE = machine(link(1e-3, 1e-6))


def _group(schedule: CollectiveSchedule | None, ranks: int = 2) -> AveragedGroup:
    return AveragedGroup("all", sum(UNEVEN_SIZES), ITEM_BYTES, schedule, placement(ranks), ("class 0",), (3,) * ranks)


def test_operations_come_after_what_the_schedule_says() -> None:
    schedule = sharded(UNEVEN_SIZES, 2)
    for task, needs in zip(group_tasks(_group(schedule), RANKS_MACHINE, 0.0).operations, dependencies(schedule), strict=True):
        assert (task.events, task.operations, task.gathers_before) == (needs.events, needs.operations, needs.gathers_before)


def test_stages_are_those_of_the_slices_bytes() -> None:
    schedule = sharded(UNEVEN_SIZES, 2)
    for task, operation in zip(group_tasks(_group(schedule), RANKS_MACHINE, 0.0).operations, schedule.operations, strict=True):
        n_bytes = UNEVEN_SIZES[operation.slice] * ITEM_BYTES
        assert task.stages == collective_costs.stages(RANKS_MACHINE, operation.kind, n_bytes, placement(2))
        assert task.text == schedule.text(operation)


def test_owners_update_their_part_before_its_gather() -> None:
    tasks = group_tasks(_group(sharded(UNEVEN_SIZES, 2)), RANKS_MACHINE, 1e-3)
    updates = {task.gathers: task.update_seconds for task in tasks.operations if task.gathers is not None}
    assert updates == {0: 5e-3, 1: pytest.approx(11e-3), 2: 16e-3}
    assert not any(task.update_seconds for task in tasks.operations if task.gathers is None)
    assert tasks.touching["l1.weight"] == (1,)


def test_allreduced_slices_are_updated_whole_and_late() -> None:
    tasks = group_tasks(_group(allreduces(UNEVEN_SIZES, 2)), RANKS_MACHINE, 1e-3)
    assert tasks.allreduce
    assert tasks.late_updates == pytest.approx([size * 1e-3 for size in UNEVEN_SIZES])
    assert not any(task.update_seconds for task in tasks.operations)


def test_without_a_schedule_one_allreduce_has_all() -> None:
    whole = group_tasks(_group(None), RANKS_MACHINE, 1e-3).whole
    assert whole is not None
    n_bytes = sum(UNEVEN_SIZES) * ITEM_BYTES
    assert whole.stages == collective_costs.stages(RANKS_MACHINE, OperationKind.ALLREDUCE, n_bytes, placement(2))
    assert whole.update_seconds == pytest.approx(sum(UNEVEN_SIZES) * 1e-3)


def _factors() -> CollectiveSchedule:
    """A linear layer of 8 inputs and 5 outputs that exchanges inputs and errors."""
    piece = Slice("fc.weight", 0, 40, 0, ("fc.weight",), 5, True, ("fc.bias",))
    kinds = (OperationKind.INPUTS, OperationKind.ERRORS, OperationKind.NORMS, OperationKind.ALLGATHER)
    operations = tuple(Operation(kind, -1 if kind is OperationKind.NORMS else 0, Stream.GRADIENTS) for kind in kinds)
    return CollectiveSchedule("toy exchange", 2, (piece,), operations)


def test_exchanged_factors_move_samples_and_need_a_product() -> None:
    tasks = group_tasks(_group(_factors()), RANKS_MACHINE, 1e-3, {"fc.weight": 0.25})
    inputs, errors, norms, gather = tasks.operations
    assert inputs.stages == collective_costs.stages(RANKS_MACHINE, OperationKind.INPUTS, 3 * 8 * ITEM_BYTES, placement(2))
    assert errors.stages == collective_costs.stages(RANKS_MACHINE, OperationKind.ERRORS, 6 * 5 * ITEM_BYTES, placement(2))
    assert norms.prepare_seconds == pytest.approx(20 * 0.25)  # before the squares, which are free here
    assert gather.prepare_seconds == 0.0
    assert gather.update_seconds == pytest.approx((20 + 5) * 1e-3)  # half of the weight, and the whole bias


def test_norms_of_some_slices_are_prepared_and_sent_by_themselves() -> None:
    """Squares of their own elements only; gathers come after those of their parameters."""
    schedule = sharded(UNEVEN_SIZES, 2)
    reductions = [one for one in schedule.operations if one.kind is OperationKind.REDUCE_SCATTER]
    gathers = [one for one in schedule.operations if one.kind is OperationKind.ALLGATHER]
    norms = [Operation(OperationKind.NORMS, start, Stream.NORMS) for start in (1, 0)]
    schedule = replace(schedule, operations=(*reductions, *norms, *gathers))
    rate = {OperatorClass.MEMORY: OperatorRate(1.0, 100.0, 0.0)}
    late, front, *later = group_tasks(_group(schedule), replace(RANKS_MACHINE, rates=rate), 0.0).operations[len(reductions) :]
    # The first rank owns 5, 11 and 16 elements: sums are copied (read and written), and squares take eight accesses.
    assert late.prepare_seconds == pytest.approx((2 + 8) * (11 + 16) * ITEM_BYTES / 100)
    assert front.prepare_seconds == pytest.approx((2 + 8) * 5 * ITEM_BYTES / 100)
    for task, parameters in ((late, 2), (front, 1)):
        assert task.stages == collective_costs.stages(RANKS_MACHINE, OperationKind.NORMS, 16 * parameters, placement(2))
        assert task.stream is Stream.NORMS
    at = {1: len(reductions), 2: len(reductions), 0: len(reductions) + 1}
    for task in later:
        assert task.prepare_seconds == 0.0
        assert at[task.slice] in task.operations
        assert not set(at.values()) - {at[task.slice]} & set(task.operations)


def test_only_what_ends_after_the_begin_and_begins_before_the_end_is_recorded() -> None:
    recorder = EventRecorder()
    recorder.add(Category.WORK, "early", 0.0, 1.0)
    recorder.begin()
    recorder.add(Category.COMMUNICATION, "sum", 0.5, 1.5, "queue", 7)
    recorder.end(3.0)
    recorder.add(Category.WORK, "late", 3.0, 4.0)
    events = recorder.events()
    assert [events.names[name] for name in events.name] == ["sum"]
    assert (events.start_ns[0], events.stop_ns[0], events.number[0]) == (500_000_000, 1_500_000_000, 7)
    assert events.tracks[events.track[0]] == "queue"
    assert events.start_ns.dtype == np.int64


def test_of_events_of_the_same_instants_the_outer_one_comes_first() -> None:
    recorder = EventRecorder()
    recorder.begin()
    recorder.add(Category.UPDATE, "w", 0.0, 1.0)
    recorder.add(Category.WAIT, "sum", 0.0, 1.0, "queue")
    recorder.add(Category.STEP, "step", 0.0, 1.0)
    table = tabulate(recorder.events(), skip=0)
    assert table is not None
    assert (table.total.compute_seconds, table.total.exposed_seconds, table.left_over_seconds) == (1.0, 0.0, 0.0)
