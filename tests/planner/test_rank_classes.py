"""Classes of ranks: few, complete, and none where ranks differ."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.nn.layer import Layer
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.planner.group_schedules import group_strategies
from hpctrain.planner.rank_classes import AlikeRanks, alike_ranks, group_keys
from tests.support import nets
from tests.support.planned import candidate_of, job_of
from tests.support.training import Task

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


def test_keys_name_a_row_only_where_there_are_several() -> None:
    task = Task(nets.narrow, NumpyKernelSet(), Sgd, batch=8, plan=ParallelPlan(2, 2, M))
    strategies = group_strategies(job_of(task), candidate_of(task, "sharded", {}))
    even = [of_group for of_group in strategies if of_group.group == "model"]
    assert group_keys(even[:1]) == ["model"]
    assert group_keys([even[0], replace(even[0], split_ranks=(1,))]) == ["model-row0", "model-row1"]
