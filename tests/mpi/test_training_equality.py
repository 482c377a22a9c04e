"""Any number of ranks trains as one process does: uneven batches, empty ranks, micro-batches, dropout, synchronised norm."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import SingleCommunicator
from hpctrain.nn.layer import Layer
from hpctrain.optim.base import Optimizer
from hpctrain.optim.optimizers.lars import Lars
from hpctrain.optim.optimizers.sgd import Sgd
from tests.support import nets
from tests.support.training import Result, Task, distance, train

RANKS = [1, 2, 3, 4]
NETS: dict[str, Callable[[], Layer]] = {"plain": partial(nets.plain, dropout=0.3), "residual": nets.residual}
OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "sgd": Sgd,
    "nesterov": partial(Sgd, momentum=0.9, nesterov=True, weight_decay=1e-2, clip_norm=0.5),
    "lars": partial(Lars, momentum=0.9, weight_decay=1e-2, trust_coefficient=0.1),
}


def _alone(task: Task) -> Result:
    comm = SingleCommunicator()
    return train(task, comm, ProgressEngine(rank=0, deadline_seconds=30, abort=comm.abort), Blocking)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parallel(RANKS)
def test_float64_equals_one_process(world: Communicator, progress: ProgressEngine, net: str, optimizer: str) -> None:
    # 37 samples in batches of 8: the last batch has 5, which leaves 4 ranks with 2, 1, 1, 1
    task = Task(NETS[net], NumpyKernelSet(), OPTIMIZERS[optimizer])
    many, one = train(task, world, progress, Blocking), _alone(task)
    assert distance(many.parameters, one.parameters) < 1e-10
    if one.statistics:
        assert distance(many.statistics, one.statistics) < 1e-10
    for mine, alone in zip(many.totals, one.totals, strict=True):
        assert (mine.count, mine.top1, mine.top5) == (alone.count, alone.top1, alone.top5)
        assert mine.loss == pytest.approx(alone.loss, rel=1e-10)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parallel(RANKS)
def test_ranks_without_samples_change_nothing(world: Communicator, progress: ProgressEngine, net: str) -> None:
    task = Task(NETS[net], NumpyKernelSet(), OPTIMIZERS["nesterov"], samples=9, batch=4)  # last batch: one sample
    assert distance(train(task, world, progress, Blocking).parameters, _alone(task).parameters) < 1e-10


@pytest.mark.parallel(RANKS)
def test_micro_batches_equal_one_large_batch(world: Communicator, progress: ProgressEngine) -> None:
    task = Task(NETS["plain"], NumpyKernelSet(), OPTIMIZERS["nesterov"])
    split = train(replace(task, micro_batches=3), world, progress, Blocking)
    assert distance(split.parameters, _alone(task).parameters) < 1e-10


@pytest.mark.parallel(RANKS)
def test_float32_follows_one_process_on_a_shallow_network(world: Communicator, progress: ProgressEngine) -> None:
    task = Task(NETS["plain"], NumpyKernelSet(), OPTIMIZERS["sgd"], dtype="float32")
    assert distance(train(task, world, progress, Blocking).parameters, _alone(task).parameters) < 1e-4


@pytest.mark.parallel(RANKS)
def test_replicas_agree_bit_by_bit(world: Communicator, progress: ProgressEngine) -> None:
    model = partial(nets.residual, synchronised=False)
    task = Task(model, NumpyKernelSet(), OPTIMIZERS["lars"], synchronised=False, dtype="float32")
    mine = train(task, world, progress, Blocking)
    first = world.broadcast_object((mine.parameters, mine.statistics))
    for ours, theirs in zip((mine.parameters, mine.statistics), first, strict=True):
        for name, values in ours.items():
            assert np.array_equal(values, theirs[name]), name
