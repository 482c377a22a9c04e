"""Progress modes over MPI: measured alike on all ranks, and training under each gives the same bits."""

from functools import partial

import numpy as np
import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.comm import mpi, progress_mode
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.progress_mode import ProgressMode
from hpctrain.optim.optimizers.sgd import Sgd
from tests.support import nets
from tests.support.training import Task, train


@pytest.mark.parallel([1, 2, 3])
def test_all_ways_are_measured_and_all_ranks_agree(world: Communicator, progress: ProgressEngine) -> None:
    assert mpi.threads_may_call()
    measured = progress_mode.measure(world, progress, tuple(ProgressMode), operator_seconds=1e-3, most_bytes=100_000)
    assert measured is not None
    everyone = world.allgather_object(measured)
    assert all(each == measured for each in everyone)
    assert measured.by_round.keys() == set(ProgressMode)
    assert progress_mode.choose(measured) in ProgressMode
    progress.stop_thread()


@pytest.mark.parametrize("mode", [ProgressMode.NONE, ProgressMode.THREAD, ProgressMode.POSTING])
@pytest.mark.parallel([1, 2, 3])
def test_training_does_not_depend_on_the_mode(world: Communicator, progress: ProgressEngine, mode: ProgressMode) -> None:
    task = Task(partial(nets.residual), NumpyKernelSet(), Sgd, steps=8)
    usual = train(task, world, progress, Blocking)
    progress_mode.apply(progress, mode)
    other = train(task, world, progress, Blocking)
    progress_mode.apply(progress, ProgressMode.TEST)
    for name, values in usual.parameters.items():
        assert np.array_equal(values, other.parameters[name]), name


@pytest.mark.parallel([2, 3])
def test_many_messages_under_the_thread_arrive_whole(world: Communicator, progress: ProgressEngine) -> None:
    progress_mode.apply(progress, ProgressMode.THREAD)
    queue = progress.queue(world)
    left = np.ones((200, 200))
    for repeat in range(30):
        buffers = [np.full(1000 + 37 * k, world.rank + k + repeat, np.float32) for k in range(10)]
        with progress.computing():
            tickets = [queue.post(partial(world.iallreduce, buffer), f"buffer {k}") for k, buffer in enumerate(buffers)]
            for _ in range(5):
                left @ left
                progress.operator_done()
        progress.wait(tickets)
        for k, buffer in enumerate(buffers):
            assert np.all(buffer == sum(range(world.size)) + world.size * (k + repeat))
    progress.stop_thread()
