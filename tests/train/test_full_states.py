"""Gradients that some parts of a split parameter keep back, and others do not: checkpoints have all of them, in either layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hpctrain.averaging.base import for_holders
from hpctrain.averaging.strategies.sparse import Sparse, SparseOptions
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.storage.checkpoint import CheckpointContent, checkpoint_path, optimizer_key, read
from hpctrain.storage.shard_file import write_shard
from hpctrain.storage.sharded_checkpoint import publish, unfinished
from hpctrain.train.replica import Replica, StrategyFactory
from hpctrain.train.snapshot import Position
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.training import Task, batches, replica_of

RESIDUAL, WEIGHT = "sparse_gradient", "fc1.weight"
KEY = optimizer_key(RESIDUAL, WEIGHT)  # (72, 11): over 3 ranks 288, 288 and 216 elements
TASK = Task(nets.plain, NumpyKernelSet(), partial(Sgd, momentum=0.5), batch=9, steps=3)
#: a grid whose data groups keep back unlike much, with ranks of a node and a least size of what is not sent whole
GRIDS = {
    "the last part is sent whole": ((3, 2), 1, 250),
    "the last group has fewer nodes": ((2, 4), 5, 250),  # 3 + 1 ranks, of which each is a holder, beside 2 + 2
}


def _strategy(least_elements: int, *, two_level: bool = True) -> StrategyFactory:
    options = SparseOptions(density=0.1, compress="always", least_elements=least_elements, two_level=two_level)
    return partial(Sparse, options=options)


def _replica(comm: ThreadCommunicator, grid: tuple[int, int], strategy: StrategyFactory) -> tuple[Task, Replica]:
    task = replace(TASK, plan=ParallelPlan(*grid, Parallelism.MODEL))
    return task, replica_of(task, comm, virtual_engine(comm), strategy)


def _steps(replica: Replica, task: Task, first: int, stop: int) -> None:
    groups = replica.groups
    for batch in list(batches(task, groups.position, groups.all_ranks.size, replica.tiles))[first:stop]:
        replica.step(batch, task.lr)
    replica.settle()
    replica.drain()


def _state(replica: Replica) -> CheckpointContent:
    return replica.state(Position(global_step=replica.global_step), {}, copied=True)


@dataclass(frozen=True)
class _Course:
    """A training's state before its last step, that of another one that has loaded it, and both at their ends.

    holders: those of this rank's part of the weight before the last step.
    """

    taken: CheckpointContent
    loaded: CheckpointContent
    end: CheckpointContent
    end_of_loaded: CheckpointContent
    holders: int


def _course(comm: ThreadCommunicator, grid: tuple[int, int], least_elements: int, path: Path) -> _Course:
    """The course of a training; its state before the last step is written to shards, too."""
    task, trained = _replica(comm, grid, _strategy(least_elements))
    _steps(trained, task, 0, 2)
    content = _state(trained)
    (averager,) = (one for one in trained.averagers.values() if WEIGHT in one.group.parameters)
    holders = len(averager.full_state(averager.group.parameters[WEIGHT]).get(RESIDUAL, ()))
    parts, meta = trained.own_parts(Position(global_step=2), {})
    shards = comm.allgather_object(write_shard(unfinished(path, "t"), comm.rank, parts))
    if comm.rank == 0:
        publish(unfinished(path, "t"), path, shards, meta)
    comm.allgather_object(None)
    _steps(trained, task, 2, 3)
    _, again = _replica(comm, grid, _strategy(least_elements))
    again.load(content)
    loaded = _state(again)
    _steps(again, task, 2, 3)
    return _Course(content, loaded, _state(trained), _state(again), holders)


@pytest.mark.parametrize(("grid", "per_node", "least_elements"), GRIDS.values(), ids=GRIDS)
def test_groups_that_keep_back_unlike_much_write_whole_tensors_and_go_on_with_the_same_bits(
    grid: tuple[int, int], per_node: int, least_elements: int, tmp_path: Path
) -> None:
    path = checkpoint_path(tmp_path, 2, sharded=True)
    course = partial(_course, grid=grid, least_elements=least_elements, path=path)
    courses = run_virtual(grid[0] * grid[1], course, seed=1, ranks_per_node=per_node)
    holders = {course.holders for course in courses}
    assert len(holders) == 2, "all groups keep back alike"
    content = courses[0].taken
    assert content.tensors[KEY].shape == (max(holders), 72, 11)
    assert content.tensors[KEY].any()
    _assert_same(read(path), content)
    for of_rank in courses:
        _assert_same(of_rank.taken, content)
        _assert_same(of_rank.loaded, content)
        _assert_same(of_rank.end_of_loaded, of_rank.end)


def _assert_same(left: CheckpointContent, right: CheckpointContent) -> None:
    assert left.tensors.keys() == right.tensors.keys()
    for key in right.tensors:
        assert np.array_equal(left.tensors[key], right.tensors[key]), key


def test_what_one_part_alone_has_left_of_an_earlier_run_is_written_again() -> None:
    """Here all is sent whole, and only the parts of which something was kept back remember it, until the first step."""
    before = run_virtual(1, lambda comm: _state(_replica(comm, (1, 1), _strategy(10**9))[1]))[0]
    kept_back = np.zeros((2, 72, 11))
    kept_back[:, :, 1] = np.random.default_rng(0).standard_normal((2, 72))
    content = CheckpointContent({**before.tensors, KEY: kept_back}, before.meta)

    def again(comm: ThreadCommunicator) -> CheckpointContent:
        _, replica = _replica(comm, (3, 2), _strategy(10**9, two_level=False))
        replica.load(content)
        return _state(replica)

    for found in run_virtual(6, again):
        np.testing.assert_array_equal(found.tensors[KEY].sum(axis=0), kept_back.sum(axis=0))


def test_zeros_behind_the_last_holder_are_of_nobody() -> None:
    kept_back = np.random.default_rng(0).standard_normal((4, 3))
    assert np.array_equal(for_holders(kept_back, 4), kept_back)
    assert np.array_equal(for_holders(kept_back, 2), [kept_back.sum(axis=0), np.zeros(3)])
    kept_back[2:] = 0.0
    assert np.array_equal(for_holders(kept_back, 2), kept_back[:2])
