"""Batch norm on a device with statistics of several ranks: the NumPy set's numbers, by one round trip in each direction."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend.kernels.base import KernelSet
from hpctrain.backend.kernels.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.emulated import CudaKernelsFactory
from tests.support.training import Task, batches, replica_of

TASK = Task(nets.residual, NumpyKernelSet(), Sgd, steps=4)


def _losses(comm: ThreadCommunicator, kernels: KernelSet) -> tuple[list[float], dict[str, np.ndarray]]:
    replica, losses = replica_of(replace(TASK, kernels=kernels), comm, virtual_engine(comm), Sharded), []
    for batch in batches(TASK, comm.rank, comm.size):
        replica.step(batch, TASK.lr)
        totals = replica.settle()
        assert totals is not None
        losses.append(totals.loss)
    return losses, {name: view.copy() for name, view in replica.network.statistics.views.items()}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])  # the last batch has 5 samples: shares are uneven, with one on the last rank
def test_the_numbers_are_those_of_numpy(ranks: int, cuda_kernels: CudaKernelsFactory) -> None:
    found = run_virtual(ranks, lambda comm: _losses(comm, cuda_kernels(seed=comm.rank)), seed=ranks)
    expected = run_virtual(1, lambda comm: _losses(comm, NumpyKernelSet()))[0]
    for losses, statistics in found:
        np.testing.assert_allclose(losses, expected[0], rtol=1e-11)
        for name, values in expected[1].items():
            np.testing.assert_allclose(statistics[name], values, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_a_batch_norm_has_one_round_trip_in_each_direction(cuda_kernels: CudaKernelsFactory) -> None:
    def program(comm: ThreadCommunicator) -> int:
        kernels = cuda_kernels(seed=comm.rank)
        assert isinstance(kernels, CudaKernelSet)
        replica = replica_of(replace(TASK, kernels=kernels), comm, virtual_engine(comm), Sharded)
        counts = []
        for batch in batches(TASK, comm.rank, comm.size):
            counter = kernels.runtime.device.counters.synchronisations
            counter.clear()
            replica.step(batch, TASK.lr)
            counts.append(sum(times for (_, function), times in counter.items() if function.endswith("Staging._take")))
        assert len(set(counts)) == 1
        return counts[0]

    norms = sum(name.endswith("running_mean") for name in _losses_names())
    assert run_virtual(2, program) == [2 * norms] * 2


def _losses_names() -> list[str]:
    return list(run_virtual(1, lambda comm: _losses(comm, NumpyKernelSet()))[0][1])
