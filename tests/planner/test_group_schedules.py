"""Groups of parameters, who averages them, and what each rank exchanges. Schedules of ranks: tests/experiment/test_plans.py."""

from dataclasses import replace

import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.comm.link import LinkModel
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.planner.group_schedules import averaging_bytes, group_schedules, group_strategies
from tests.support import nets
from tests.support.planned import candidate_of, job_of
from tests.support.training import Task

LINK = LinkModel(1e-5, 1e-9)


def task_of(rows: int, cols: int, use: Parallelism = Parallelism.MODEL) -> Task:
    return Task(nets.plain, NumpyKernelSet(), Sgd, batch=11, plan=ParallelPlan(rows, cols, use))


def test_ranks_that_hold_as_much_have_one_strategy() -> None:
    task = task_of(8, 2)
    strategies = group_strategies(job_of(task), candidate_of(task, "sharded", {}))
    held = [of_group.planned.layout.size for of_group in strategies]
    assert sorted(rank for of_group in strategies for rank in of_group.split_ranks) == list(range(8))
    assert len(set(held)) == len(held) < 8
    whole = sum(size * len(of_group.split_ranks) for size, of_group in zip(held, strategies, strict=True))
    assert whole == group_strategies(job_of(task_of(1, 2)), candidate_of(task_of(1, 2), "sharded", {}))[0].planned.layout.size


@pytest.mark.parametrize("per_node", [2, 3])
def test_ranks_on_other_nodes_have_their_own_schedule(per_node: int) -> None:
    task = replace(task_of(2, 4), model=nets.narrow)  # one channel each
    schedules = group_schedules(job_of(task), candidate_of(task, "sharded", {}), LINK, per_node)
    model = [schedule for schedule in schedules if schedule.group == "model"]
    assert [rank for schedule in model for rank in schedule.split_ranks] == [0, 1]


@pytest.mark.parametrize("averager", ["sharded", "bucketed", "overlap", "priority", "blocking"])
@pytest.mark.parametrize(("rows", "cols"), [(1, 5), (2, 3), (3, 2)])
def test_averaging_bytes_are_each_positions_sum_over_its_groups(averager: str, rows: int, cols: int) -> None:
    task = task_of(rows, cols)
    schedules = group_schedules(job_of(task), candidate_of(task, averager, {}), LINK)
    total = averaging_bytes(schedules, rows, rows * cols, 8)
    for position, n_bytes in enumerate(total):
        expected = 0
        for schedule in schedules:
            if position % rows in schedule.split_ranks:
                expected += schedule.exchanged[position if schedule.group == "all" else position // rows]
        assert n_bytes == 8 * expected


def test_an_averager_that_runs_refuse_is_refused() -> None:
    task = replace(task_of(1, 2), micro_batches=2)
    with pytest.raises(Exception, match="fc_exchange is always, but micro_batches is 2"):
        group_strategies(job_of(task), candidate_of(task, "sharded", {"fc_exchange": "always"}))
