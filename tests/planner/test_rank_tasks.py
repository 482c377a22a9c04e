"""Tasks against what ranks do: the same events in the same order, with the same bytes."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from hpctrain.averaging.dependencies import EventKind
from hpctrain.planner.rate_costs import RateCosts
from hpctrain.planner.step_bytes import exchanged_bytes
from hpctrain.planner.step_program import step_program
from hpctrain.planner.tasks import BeginExchange, Compute, EndExchange, Happens, RankClass, StepProgram
from hpctrain.trace.tracer import HOOKS
from tests.parallel.test_plan_reporter_random import draw_task
from tests.support.sampling import amount
from tests.support.planned import candidate_of, events_of, job_of, machine, observe
from tests.support.training import Task

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
    ("sharded", {"wire": "float16", "wire_parameters": "float16"}),
    ("priority", {"wire": "float16", "slice_parameters": 50}),
    ("bucketed", {"wire": "float16", "bucket_bytes": 256}),
    ("blocking", {"wire": "bfloat16"}),
    ("overlap", {"wire": "float16"}),
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


@pytest.mark.slow
@pytest.mark.sample(6)
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
    assert len(sums) == 2 + parameters  # behind each of the first passes all gradients, in the last one by one
    first = next(k for k, task in enumerate(parts.tasks) if isinstance(task, Happens))
    copies = [k for k, task in enumerate(parts.tasks) if isinstance(task, Compute) and task.row == "input copy"]
    assert len(copies) == 3
    assert copies[-1] < first
