"""Simulated ranks: places and worlds, processes, operations that meet, queues and tasks of groups, recorded events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from hpctrain.averaging.collective_schedule import CollectiveSchedule, Operation, OperationKind, Stream, dependencies
from hpctrain.averaging.slicing import Slice
from hpctrain.comm.progress import ProgressMode
from hpctrain.core.errors import ConfigError
from hpctrain.planner.costs import collective_costs
from hpctrain.planner.costs.collective_costs import CollectiveStage, GridPlacements
from hpctrain.planner.costs.machine import OperatorClass, OperatorRate
from hpctrain.planner.simulation.operations import Posted, group_tasks
from hpctrain.planner.simulation.processes import EventRecorder, SimulatedProcess, Stretch
from hpctrain.planner.simulation.tasks import AveragedGroup, RankClass, StepProgram
from hpctrain.planner.simulation.world import MOST_PLACES, MOST_SINGLE_RANKS, SimulatedWorld, class_of_ranks, places
from hpctrain.trace.time_table import tabulate
from hpctrain.trace.tracer import Category
from tests.support.simulated import ITEM_BYTES, allreduces, link, machine, placement, program, sharded


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


def test_a_wait_ends_with_the_operation_and_is_recorded() -> None:
    def body(process: SimulatedProcess) -> Stretch:
        yield from process.wait(_post(process, _stage(2.0)))

    process = _run(body)
    assert _now(process) == 2.0
    events = process.recorder.events()
    assert sorted(events.category.tolist()) == [Category.COMMUNICATION, Category.WAIT]
    assert set(events.stop_ns.tolist()) == {2_000_000_000}


@pytest.mark.parametrize(("cpu", "end"), [(1.0, 2.0), (5.0, 5.0)])
def test_the_cores_time_of_messages_goes_with_a_wait(cpu: float, end: float) -> None:
    def body(process: SimulatedProcess) -> Stretch:
        yield from process.wait(_post(process, _stage(2.0, cpu)))

    assert _now(_run(body)) == pytest.approx(end)


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
    def body(process: SimulatedProcess) -> Stretch:
        yield from process.wait(_post(process, _stage(seconds)))

    process = _run(body, cores_per_rank=cores_per_rank)
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
MACHINE = machine(link(1e-3, 1e-6))


def _group(schedule: CollectiveSchedule | None, ranks: int = 2) -> AveragedGroup:
    return AveragedGroup("all", sum(UNEVEN_SIZES), ITEM_BYTES, schedule, placement(ranks), ("class 0",), (3,) * ranks)


def test_operations_come_after_what_the_schedule_says() -> None:
    schedule = sharded(UNEVEN_SIZES, 2)
    for task, needs in zip(group_tasks(_group(schedule), MACHINE, 0.0).operations, dependencies(schedule), strict=True):
        assert (task.events, task.operations, task.gathers_before) == (needs.events, needs.operations, needs.gathers_before)


def test_stages_are_those_of_the_slices_bytes() -> None:
    schedule = sharded(UNEVEN_SIZES, 2)
    for task, operation in zip(group_tasks(_group(schedule), MACHINE, 0.0).operations, schedule.operations, strict=True):
        n_bytes = UNEVEN_SIZES[operation.slice] * ITEM_BYTES
        assert task.stages == collective_costs.stages(MACHINE, operation.kind, n_bytes, placement(2))
        assert task.text == schedule.text(operation)


def test_owners_update_their_part_before_its_gather() -> None:
    tasks = group_tasks(_group(sharded(UNEVEN_SIZES, 2)), MACHINE, 1e-3)
    updates = {task.gathers: task.update_seconds for task in tasks.operations if task.gathers is not None}
    assert updates == {0: 5e-3, 1: pytest.approx(11e-3), 2: 16e-3}
    assert not any(task.update_seconds for task in tasks.operations if task.gathers is None)
    assert tasks.touching["l1.weight"] == (1,)


def test_allreduced_slices_are_updated_whole_and_late() -> None:
    tasks = group_tasks(_group(allreduces(UNEVEN_SIZES, 2)), MACHINE, 1e-3)
    assert tasks.allreduce
    assert tasks.late_updates == pytest.approx([size * 1e-3 for size in UNEVEN_SIZES])
    assert not any(task.update_seconds for task in tasks.operations)


def test_without_a_schedule_one_allreduce_has_all() -> None:
    whole = group_tasks(_group(None), MACHINE, 1e-3).whole
    assert whole is not None
    n_bytes = sum(UNEVEN_SIZES) * ITEM_BYTES
    assert whole.stages == collective_costs.stages(MACHINE, OperationKind.ALLREDUCE, n_bytes, placement(2))
    assert whole.update_seconds == pytest.approx(sum(UNEVEN_SIZES) * 1e-3)


def _factors() -> CollectiveSchedule:
    """A linear layer of 8 inputs and 5 outputs that exchanges inputs and errors."""
    piece = Slice("fc.weight", 0, 40, 0, ("fc.weight",), 5, True, ("fc.bias",))
    kinds = (OperationKind.INPUTS, OperationKind.ERRORS, OperationKind.NORMS, OperationKind.ALLGATHER)
    operations = tuple(Operation(kind, -1 if kind is OperationKind.NORMS else 0, Stream.GRADIENTS) for kind in kinds)
    return CollectiveSchedule("toy exchange", 2, (piece,), operations)


def test_exchanged_factors_move_samples_and_need_a_product() -> None:
    tasks = group_tasks(_group(_factors()), MACHINE, 1e-3, {"fc.weight": 0.25})
    inputs, errors, norms, gather = tasks.operations
    assert inputs.stages == collective_costs.stages(MACHINE, OperationKind.INPUTS, 3 * 8 * ITEM_BYTES, placement(2))
    assert errors.stages == collective_costs.stages(MACHINE, OperationKind.ERRORS, 6 * 5 * ITEM_BYTES, placement(2))
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
    late, front, *later = group_tasks(_group(schedule), replace(MACHINE, rates=rate), 0.0).operations[len(reductions) :]
    # The first rank owns 5, 11 and 16 elements: sums are copied (read and written), and squares take eight accesses.
    assert late.prepare_seconds == pytest.approx((2 + 8) * (11 + 16) * ITEM_BYTES / 100)
    assert front.prepare_seconds == pytest.approx((2 + 8) * 5 * ITEM_BYTES / 100)
    for task, parameters in ((late, 2), (front, 1)):
        assert task.stages == collective_costs.stages(MACHINE, OperationKind.NORMS, 16 * parameters, placement(2))
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
