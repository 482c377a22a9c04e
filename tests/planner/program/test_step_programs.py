"""Programs of whole steps: classes of ranks and their tasks, memory, groups, schedules and bytes."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest

from hpctrain.averaging.collective_schedule import EventKind
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.specs import BatchNormSpec
from hpctrain.comm.link import LinkModel
from hpctrain.core.intervals import ShardsOfRank
from hpctrain.data.sampler import counts
from hpctrain.nn.layers import Layer
from hpctrain.nn.network import declared
from hpctrain.optim.base import Optimizer
from hpctrain.optim.ema import EmaRule
from hpctrain.optim.optimizers import Adamw, Lamb, Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.plan_report import report_plan
from hpctrain.planner.costs.compute_costs import RateCosts
from hpctrain.planner.program.group_schedules import averaging_bytes, group_schedules, group_strategies
from hpctrain.planner.program.step_program import (
    AlikeRanks,
    RankMemory,
    alike_ranks,
    exchanged_bytes,
    rank_memory,
    statistics_size,
    step_program,
)
from hpctrain.planner.simulation.tasks import (
    BeginExchange,
    Compute,
    EndExchange,
    Happens,
    Merge,
    RankClass,
    StepMessage,
    StepProgram,
)
from hpctrain.trace.tracer import HOOKS
from hpctrain_testing.virtual.run import run_virtual, virtual_engine
from tests.parallel.test_plan_reporter import draw_task
from tests.support import nets
from tests.support.planned import Event, candidate_of, events_of, job_of, machine, observe
from tests.support.sampling import amount
from tests.support.training import Task, replica_of

B, M, D = Parallelism


def classes_of(
    rows: int, cols: int, use: Parallelism, batch: int, micro_batches: int = 1, net: Callable[[], Layer] = nets.plain
) -> list[AlikeRanks]:
    plan, shape = ParallelPlan(rows, cols, use), (9, 7, 3) if net is nets.plain else (64, 4, 3)
    task = Task(net, NumpyKernelSet(), Sgd, shape, batch=batch, plan=plan, micro_batches=micro_batches)
    job, candidate = job_of(task), candidate_of(task, "sharded", {})
    return alike_ranks(job, candidate, group_strategies(job, candidate))


@pytest.mark.parametrize("use", [B, M, D])
@pytest.mark.parametrize(("rows", "cols", "batch"), [(1, 7, 15), (2, 3, 11), (4, 2, 16), (8, 1, 8)])
def test_classes_hold_all_ranks_and_all_samples(rows: int, cols: int, batch: int, use: Parallelism) -> None:
    classes = classes_of(rows, cols, use, batch)
    assert sum(alike.ranks for alike in classes) == rows * cols
    assert sum(alike.ranks * alike.samples for alike in classes) == batch
    assert [alike.first for alike in classes] == sorted({alike.first for alike in classes})
    assert classes[0].first == 0
    assert all(alike.first % rows == alike.split_rank for alike in classes)
    assert len({alike.name for alike in classes}) == len(classes)


@pytest.mark.parametrize(("cols", "batch", "sizes"), [(8192, 8192, [8192]), (8192, 8195, [3, 8189]), (64, 640, [64])])
def test_thousands_of_ranks_are_two_classes_at_most(cols: int, batch: int, sizes: list[int]) -> None:
    assert [alike.ranks for alike in classes_of(1, cols, B, batch)] == sizes


def test_ranks_inside_of_an_image_are_alike() -> None:
    classes = classes_of(8, 2, D, 16, net=nets.residual)
    ends = [alike for alike in classes if alike.split_rank in (0, 7)]
    assert sum(alike.ranks for alike in ends) == 4
    assert len(classes) < 8


def task_of(rows: int, cols: int, use: Parallelism = B, micro_batches: int = 1) -> Task:
    plan = ParallelPlan(rows, cols, use)
    return Task(nets.plain, NumpyKernelSet(), Sgd, (9, 7, 3), batch=11, plan=plan, micro_batches=micro_batches)


def memories(
    task: Task, averager: str = "sharded", options: dict[str, object] | None = None
) -> list[tuple[AlikeRanks, RankMemory]]:
    job, candidate = job_of(task), candidate_of(task, averager, options or {})
    strategies = group_strategies(job, candidate)
    found = []
    for alike in alike_ranks(job, candidate, strategies):
        groups = [of_group for of_group in strategies if alike.split_rank in of_group.split_ranks]
        sizes = {one.parameter: one.size for of_group in groups for one in of_group.planned.layout.segments}
        schedules = [of_group.strategy.plan(LinkModel(0.0, 0.0)) for of_group in groups]
        passes = job.passes(candidate)
        memory = rank_memory(job, alike.micro_batches, alike.samples, sizes, schedules, passes, alike.first)
        found.append((alike, memory))
    return found


@pytest.mark.parametrize("use", Parallelism)
@pytest.mark.parametrize(("rows", "cols"), [(1, 3), (2, 2), (3, 1)])
def test_arena_messages_and_parameters_are_the_reports(rows: int, cols: int, use: Parallelism) -> None:
    task = task_of(rows, cols, use)
    job = job_of(task)
    shapes = {name: spec.shape for name, spec in job.specs.items()}
    report = report_plan(job.graph_of, task.plan, counts(11, rows * cols, rows), shapes, task.kernels)
    assert report.memory is not None
    for alike, memory in memories(task):
        expected = report.memory[alike.first]
        for part in ("activations", "messages", "parameters"):
            assert getattr(memory, part) == getattr(expected, part)
        assert memory.gradients == memory.parameters


def test_owners_hold_their_part_of_the_state_and_others_all() -> None:
    ((_, sharded), *_), ((_, bucketed), *_) = memories(task_of(1, 4)), memories(task_of(1, 4), "bucketed")
    assert bucketed.state == bucketed.parameters == sharded.parameters
    assert bucketed.averaging == 0
    assert sharded.parameters / 4 <= sharded.state <= sharded.parameters / 4 + 8 * 20
    assert sharded.total < bucketed.total


@pytest.mark.parametrize(
    ("optimizer", "ema", "arrays"),
    [(Sgd, None, 1), (partial(Sgd, momentum=0.0), None, 0), (Adamw, None, 2), (Sgd, EmaRule(0.9), 2), (Lamb, EmaRule(0.9), 3)],
)
def test_the_state_is_that_of_the_first_rank(optimizer: Callable[[], Optimizer], ema: EmaRule | None, arrays: int) -> None:
    task = replace(task_of(1, 3), optimizer=optimizer, ema=ema)

    def sizes(comm):  # type: ignore[no-untyped-def]
        replica = replica_of(task, comm, virtual_engine(comm), Sharded, nominal_batch=11)
        owned = [(one.optimizer, segment) for one in replica.averagers.values() for segment in one.owned()]
        state = sum(array.size for bound, segment in owned for array in bound.state(segment).values())
        return sum(segment.size for _, segment in owned), state

    owned, state = run_virtual(3, sizes)[0]
    ((_, memory), *_) = memories(task)
    assert memory.state == 8 * state == 8 * arrays * owned


def test_owners_keep_what_rounding_takes_from_parameters() -> None:
    task = task_of(1, 4)
    never = {"fc_exchange": "never"}
    ((_, whole), *_), ((_, rounded), *_) = (
        memories(task, options=options) for options in (never, {**never, "wire_parameters": "bfloat16"})
    )
    assert rounded.averaging == 2 * whole.averaging == 2 * whole.state
    assert rounded.state == whole.state


def test_micro_batches_trade_the_arena_for_a_sum() -> None:
    ((_, whole), *_), ((_, parts), *_) = memories(task_of(1, 1)), memories(task_of(1, 1, micro_batches=4))
    assert parts.activations < whole.activations
    assert parts.gradients == 2 * whole.gradients
    assert parts.images == whole.images == 2 * 11 * 9 * 7 * 3 * 8


AVERAGERS = (
    ("sharded", {}),
    ("sharded", {"fc_exchange": "never", "window": 2}),
    ("bucketed", {"bucket_bytes": 256}),
    ("blocking", {}),
    ("priority", {"slice_parameters": 50}),
    ("overlap", {}),
)
#: averagers whose messages are not the elements that are summed
ROUNDED: tuple[tuple[str, dict[str, object]], ...] = (
    ("sharded", {"wire": "bfloat16"}),
    ("sharded", {"wire": "bfloat16", "wire_parameters": "bfloat16"}),
    ("priority", {"wire": "bfloat16", "slice_parameters": 50}),
    ("bucketed", {"wire": "bfloat16", "bucket_bytes": 256}),
    ("blocking", {"wire": "bfloat16"}),
    ("overlap", {"wire": "bfloat16"}),
    ("sparse", {"density": 0.1, "compress": "always", "least_elements": 1, "two_level": False}),
)
GRIDS = [(1, 2), (1, 3), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (4, 2), (6, 1)]


def draw(rows: int, cols: int, seed: int) -> tuple[Task, str, dict[str, object], int | None]:
    """A random network, plan and batch, with an averager, micro-batches and nodes."""
    chance = random.Random(seed)
    task = replace(draw_task(seed, rows, cols), micro_batches=chance.choice([1, 1, 2, 3]))
    averager, options = chance.choice(AVERAGERS)
    return task, averager, dict(options), chance.choice([None, 2, 3])


def program_of(task: Task, averager: str, options: dict[str, object], ranks_per_node: int | None) -> StepProgram:
    nodes = machine(ranks_per_node or task.plan.rows * task.plan.cols)
    return step_program(job_of(task), candidate_of(task, averager, options), nodes, RateCosts(nodes))


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "cols"), GRIDS)
def test_ranks_do_what_the_tasks_say_in_their_order(rows: int, cols: int) -> None:
    for number in range(amount(1, 4)):
        task, averager, options, ranks_per_node = draw(rows, cols, 100 * rows + 10 * cols + 1000 * number)
        where = f"network {number}, {task.plan}, batch {task.batch} in {task.micro_batches}, {averager}"
        program = program_of(task, averager, options, ranks_per_node)
        observed = observe(task, averager, options, ranks_per_node)
        expected = Counter[tuple[object, ...]]()
        for ranks in program.classes:
            expected[tuple(events_of(ranks.tasks))] += ranks.ranks
        assert Counter(tuple(of_rank.events) for of_rank in observed) == expected, where
        assert exchanged_bytes(program) == sum(of_rank.exchanged_bytes for of_rank in observed), where


@pytest.mark.parametrize(
    ("ranks", "shards", "micro_batches"),
    [(2, 2, 1), (2, 8, 1), (2, 12, 1), (3, 12, 1), (3, 9, 1), (4, 24, 3), (2, 6, 2), (1, 4, 1)],
)
@pytest.mark.parametrize(("averager", "options"), [*AVERAGERS[:1], *AVERAGERS[2:5]], ids=lambda value: str(value))
def test_shards_run_side_by_side_and_send_all_their_sums(
    averager: str, options: dict[str, object], ranks: int, shards: int, micro_batches: int
) -> None:
    """The program follows `exact`: messages, additions, passes and samples of a rank, and its memory."""
    task = replace(task_of(1, ranks, micro_batches=micro_batches), batch=25, samples=25, exact_shards=shards)
    program = program_of(task, averager, options, None)
    observed = observe(task, averager, options)

    def distinct(events: Sequence[Event]) -> tuple[Event, ...]:
        """The shards of a pass ask for the same parameters; the step's message has a tree of its own, simulated as a sum."""
        return tuple(event for event in dict.fromkeys(events) if event[0] != "message")

    expected = Counter[tuple[Event, ...]]()
    for of_class in program.classes:
        expected[distinct(events_of(of_class.tasks))] += of_class.ranks
    assert Counter(distinct(of_rank.events) for of_rank in observed) == expected
    assert exchanged_bytes(program) == sum(of_rank.exchanged_bytes for of_rank in observed)

    def buffers_and_passes(comm):  # type: ignore[no-untyped-def]
        replica = replica_of(task, comm, virtual_engine(comm), Sharded, nominal_batch=task.batch)
        (averager,) = replica.averagers.values()
        return len(averager.gradients._buffers), replica.passes  # type: ignore[union-attr]

    of_ranks = run_virtual(ranks, buffers_and_passes)
    for alike, memory in memories(task):
        buffers, passes = of_ranks[alike.first]
        assert memory.gradients == (1 + buffers) * memory.parameters
        assert job_of(task).passes(candidate_of(task, averager, options)) == passes
        assert sum(alike.additions) == shards // ranks - len(ShardsOfRank(alike.first, ranks, shards).sums)


def test_additions_and_smaller_parts_make_an_exact_step_longer() -> None:
    """Shards cost time: in a step of one rank, additions are the only averaging before the update."""
    seconds = []
    for shards in (None, 2, 8):
        task = replace(task_of(1, 1), batch=24, samples=24, exact_shards=shards)
        (of_class,) = program_of(task, "sharded", {}, None).classes
        computing = [one for one in of_class.tasks if isinstance(one, Compute)]
        sums = sum(one.seconds for one in computing if one.row == HOOKS)
        seconds.append((sums, sum(one.seconds for one in computing) - sums))
    (no_sums, whole), (one, halves), (seven, eighths) = seconds
    assert no_sums == 0.0
    assert one > 0.0
    assert seven == pytest.approx(7 * one)
    assert whole < halves < eighths


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize(("averager", "options"), ROUNDED, ids=lambda value: str(value))
@pytest.mark.parametrize(("rows", "cols", "ranks_per_node"), [(1, 4, 2), (1, 3, None), (2, 2, 2), (2, 3, 2)])
def test_bytes_of_short_messages_are_those_that_are_counted(
    rows: int, cols: int, ranks_per_node: int | None, averager: str, options: dict[str, object]
) -> None:
    task = draw_task(5, rows, cols)
    program = program_of(task, averager, options, ranks_per_node)
    observed = observe(task, averager, options, ranks_per_node)
    assert exchanged_bytes(program) == sum(of_rank.exchanged_bytes for of_rank in observed)
    whole = "sharded" if averager == "sparse" else averager
    same = {key: value for key, value in options.items() if key in ("slice_parameters", "bucket_bytes")}
    assert exchanged_bytes(program) < exchanged_bytes(program_of(task, whole, same, ranks_per_node))


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "cols"), GRIDS)
def test_everything_is_announced_once_and_what_begins_ends(rows: int, cols: int) -> None:
    for number in range(amount(1, 4)):
        program = program_of(*draw(rows, cols, 7000 + 100 * rows + 10 * cols + 1000 * number))
        for ranks in program.classes:
            assert_complete(ranks)
            held = Counter(
                (key, segment)
                for key, group in program.groups.items()
                if ranks.name in group.members
                for segment in announced(ranks, EventKind.GRADIENT, key)
            )
            assert set(held.values()) <= {1}


def assert_complete(ranks: RankClass) -> None:
    """Exchanges end once, after they began; gradients and last reads come once each, of the same parameters."""
    begun = [task.number for task in ranks.tasks if isinstance(task, BeginExchange)]
    assert begun == list(range(len(begun)))
    under_way: set[int] = set()
    for task in ranks.tasks:
        if isinstance(task, BeginExchange):
            under_way.add(task.number)
        elif isinstance(task, EndExchange):
            under_way.remove(task.number)
    assert not under_way
    kinds = Counter((task.event.kind, task.group) for task in ranks.tasks if isinstance(task, Happens))
    for group in {group for _, group in kinds}:
        reads = announced(ranks, EventKind.LAST_READ, group)
        gradients = announced(ranks, EventKind.GRADIENT, group)
        assert len(set(reads)) == len(reads)
        assert len(set(gradients)) == len(gradients)
        assert set(gradients) <= set(reads)
        # Biases of layers that exchange inputs and errors are announced with their weights.
        exchanged = set(announced(ranks, EventKind.INPUTS, group))
        missing = set(reads) - set(gradients)
        assert {name.rpartition(".")[0] for name in missing} <= {name.rpartition(".")[0] for name in exchanged}


def announced(ranks: RankClass, kind: EventKind, group: str) -> list[str]:
    events = (task for task in ranks.tasks if isinstance(task, Happens) and task.group == group)
    return [task.event.parameter for task in events if task.event.kind is kind]


def test_micro_batches_announce_in_the_last_and_add_up_before() -> None:
    whole, parts = (
        program_of(replace(draw_task(3012, 1, 2), batch=8, samples=8, micro_batches=count), "bucketed", {}, None).classes[0]
        for count in (1, 3)
    )
    names = [task.event for task in whole.tasks if isinstance(task, Happens)]
    assert [task.event for task in parts.tasks if isinstance(task, Happens)] == names
    sums = [task for task in parts.tasks if isinstance(task, Compute) and task.row == HOOKS]
    parameters = len(announced(whole, EventKind.GRADIENT, "all"))
    assert len(sums) == 2 + parameters  # after each of the first passes all gradients, in the last one by one
    first = next(k for k, task in enumerate(parts.tasks) if isinstance(task, Happens))
    copies = [k for k, task in enumerate(parts.tasks) if isinstance(task, Compute) and task.row == "input copy"]
    assert len(copies) == 3
    assert copies[-1] < first


LINK = LinkModel(1e-5, 1e-9)


def test_ranks_that_hold_as_much_have_one_strategy() -> None:
    task = task_of(8, 2, M)
    strategies = group_strategies(job_of(task), candidate_of(task, "sharded", {}))
    held = [of_group.planned.layout.size for of_group in strategies]
    assert sorted(rank for of_group in strategies for rank in of_group.split_ranks) == list(range(8))
    assert len(set(held)) == len(held) < 8
    whole = sum(size * len(of_group.split_ranks) for size, of_group in zip(held, strategies, strict=True))
    assert (
        whole == group_strategies(job_of(task_of(1, 2, M)), candidate_of(task_of(1, 2, M), "sharded", {}))[0].planned.layout.size
    )


@pytest.mark.parametrize("per_node", [2, 3])
def test_ranks_on_other_nodes_have_their_own_schedule(per_node: int) -> None:
    task = replace(task_of(2, 4, M), model=nets.narrow)  # one channel each
    schedules = group_schedules(job_of(task), candidate_of(task, "sharded", {}), LINK, per_node)
    model = [schedule for schedule in schedules if schedule.group == "model"]
    assert [rank for schedule in model for rank in schedule.split_ranks] == [0, 1]


@pytest.mark.parametrize("averager", ["sharded", "bucketed", "overlap", "priority", "blocking"])
@pytest.mark.parametrize(("rows", "cols"), [(1, 5), (2, 3), (3, 2)])
def test_averaging_bytes_are_each_positions_sum_over_its_groups(averager: str, rows: int, cols: int) -> None:
    task = task_of(rows, cols, M)
    schedules = group_schedules(job_of(task), candidate_of(task, averager, {}), LINK)
    total = averaging_bytes(schedules, rows, rows * cols, 8)
    for position, n_bytes in enumerate(total):
        expected = 0
        for schedule in schedules:
            if position % rows in schedule.split_ranks:
                expected += schedule.exchanged[position if schedule.group == "all" else position // rows]
        assert n_bytes == 8 * expected


def test_an_averager_that_runs_refuse_is_refused() -> None:
    task = replace(task_of(1, 2, M), micro_batches=2)
    with pytest.raises(Exception, match="fc_exchange is always, but micro_batches is 2"):
        group_strategies(job_of(task), candidate_of(task, "sharded", {"fc_exchange": "always"}))


def residual_program(
    rows: int,
    cols: int,
    use: Parallelism = Parallelism.BATCH,
    averager: str = "sharded",
    batch: int = 0,
    per_node: int = 4,
    **options: object,
) -> StepProgram:
    task = Task(
        nets.residual, NumpyKernelSet(), Sgd, (8, 8, 3), batch=batch or 2 * rows * cols, plan=ParallelPlan(rows, cols, use)
    )
    nodes = machine(per_node)
    return step_program(job_of(task), candidate_of(task, averager, options), nodes, RateCosts(nodes))


@pytest.mark.parametrize("use", Parallelism)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (1, 6), (2, 4), (4, 2), (3, 1)])
def test_groups_have_all_ranks_that_hold_their_parameters(rows: int, cols: int, use: Parallelism) -> None:
    program = residual_program(rows, cols, use)
    by_name = {ranks.name: ranks for ranks in program.classes}
    assert sum(ranks.ranks for ranks in program.classes) == rows * cols
    held = dict.fromkeys(by_name, 0)
    for key, group in program.groups.items():
        members = sum(by_name[name].ranks for name in group.members)
        assert members % group.placement.ranks == 0
        assert len(group.samples) == group.placement.ranks
        assert sum(group.samples) == 2 * rows * cols
        for name in group.members:
            held[name] += group.elements
            assert by_name[name].update_seconds[key] > 0
    assert min(held.values()) > 0
    if use is not Parallelism.MODEL:
        assert set(program.groups) == {"all"}


def test_orders_follow_from_the_programs_own_times_where_a_run_replans() -> None:
    planned, settled = (residual_program(1, 4, replan=replan).groups["all"].schedule for replan in (False, True))
    assert planned is not None
    assert settled is not None
    assert (planned.timed, settled.timed) == (False, True)
    assert settled.slices == planned.slices
    assert sorted(map(str, settled.operations)) == sorted(map(str, planned.operations))


def test_blocking_has_no_schedule_and_nodes_of_several_ranks_have_levels() -> None:
    assert residual_program(1, 4, averager="blocking").groups["all"].schedule is None
    levels = residual_program(1, 8, per_node=4).groups["all"].levels
    assert levels is not None
    assert (levels.nodes, levels.per_node) == (2, 4)
    assert residual_program(1, 8, per_node=8).groups["all"].levels is None


def test_the_message_and_merges_have_the_bytes_of_the_statistics() -> None:
    program = residual_program(1, 2)
    task = Task(nets.residual, NumpyKernelSet(), Sgd, (8, 8, 3))
    job = job_of(task)
    _, statistics = declared(task.model(), job.graph_of(1))
    size = sum(math.prod(spec.shape) for spec in statistics.values())
    assert statistics_size(job.graph_of(1)) == size
    tasks = program.classes[0].tasks
    assert [message.bytes for message in tasks if isinstance(message, StepMessage)] == [8 * (6 + 9 + size)]  # 9: checksums
    channels = [node.spec.channels for node in job.graph_of(1).nodes if isinstance(node.spec, BatchNormSpec)]
    merges = [task.bytes for task in tasks if isinstance(task, Merge)]
    assert merges == [8 * (2 * count + 1) for count in channels] + [8 * 2 * count for count in reversed(channels)]


def test_the_time_of_a_pass_does_not_depend_on_the_ranks() -> None:
    def seconds(program: StepProgram) -> float:
        return sum(task.seconds for task in program.classes[0].tasks if isinstance(task, Compute))

    few, many = (residual_program(1, cols, fc_exchange="never") for cols in (2, 4096))
    assert len(many.classes) == 1
    assert seconds(few) == pytest.approx(seconds(many))
    assert replace(few.classes[0], ranks=4096, name="").tasks == many.classes[0].tasks
