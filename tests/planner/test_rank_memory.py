"""The memory of a rank: the parts that a plan's report has are the same to the byte."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.comm.link import LinkModel
from hpctrain.data.sampler import counts
from hpctrain.optim.base import Optimizer
from hpctrain.optim.ema import EmaRule
from hpctrain.optim.optimizers.adamw import Adamw
from hpctrain.optim.optimizers.lamb import Lamb
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.plan_reporter import report_plan
from hpctrain.planner.group_schedules import group_strategies
from hpctrain.planner.rank_classes import AlikeRanks, alike_ranks
from hpctrain.planner.rank_memory import RankMemory, rank_memory
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.planned import candidate_of, job_of
from tests.support.training import Task, replica_of


def task_of(rows: int, cols: int, use: Parallelism = Parallelism.BATCH, micro_batches: int = 1) -> Task:
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
        found.append((alike, rank_memory(job, alike.micro_batches, alike.samples, sizes, schedules)))
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
        assert (memory.activations, memory.messages, memory.parameters) == (
            expected.activations,
            expected.messages,
            expected.parameters,
        )
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
