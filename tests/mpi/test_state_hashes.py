"""Hashes of a replica's state over MPI: those of its checkpoint, the same on every rank, and of one state on any grid."""

from functools import partial

import pytest

from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.sharded import Sharded, ShardedOptions
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.train.element_hash import hash_of
from hpctrain.train.replica import Replica, StrategyFactory
from hpctrain.train.snapshot import Position
from hpctrain.train.state_hashes import state_hashes
from tests.support import nets
from tests.support.training import Task, batches, replica_of

STRATEGIES: dict[str, StrategyFactory] = {
    "bucketed": Bucketed,
    "sharded": partial(Sharded, options=ShardedOptions(bucket_bytes=512, fc_exchange="always")),
}


def _replica(world: Communicator, progress: ProgressEngine, rows: int, strategy: StrategyFactory) -> tuple[Task, Replica]:
    plan = ParallelPlan(rows, world.size // rows, Parallelism.MODEL if rows > 1 else Parallelism.BATCH)
    task = Task(nets.residual, NumpyKernelSet(), partial(Sgd, momentum=0.9), samples=19, steps=3, plan=plan)
    return task, replica_of(task, world, progress, strategy, nominal_batch=task.batch)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parallel([1, 2, 3, 4])
def test_they_are_those_of_the_checkpoint_on_any_grid(world: Communicator, progress: ProgressEngine, strategy: str) -> None:
    task, replica = _replica(world, progress, 1, STRATEGIES[strategy])
    for batch in batches(task, replica.groups.position, world.size, replica.tiles):
        replica.step(batch, task.lr)
    replica.settle()
    replica.drain()
    found = state_hashes(replica)
    content: CheckpointContent = world.broadcast_object(replica.state(Position(), {}, copied=True))
    assert found == {key: hash_of(values) for key, values in content.tensors.items()}
    assert world.allgather_object(found) == [found] * world.size
    for rows in (rows for rows in range(2, world.size + 1) if world.size % rows == 0):
        for other in STRATEGIES.values():
            _, split = _replica(world, progress, rows, other)
            split.load(content)
            assert state_hashes(split) == found, rows
