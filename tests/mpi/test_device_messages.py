"""Arrays of emulated devices between real ranks: their memory is the host's, so MPI reads and writes it by its addresses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend.cuda.emulator.device import EmulatedDevice
from hpctrain.backend.kernels.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import SingleCommunicator
from hpctrain.comm.transports import Transport, reaching
from hpctrain.optim.optimizers.sgd import Sgd
from tests.support import nets
from tests.support.device_operations import OPERATIONS, DeviceRank
from tests.support.emulated import EmulatedDeviceFactory
from tests.support.training import Task, distance, train

WAYS: tuple[Transport, ...] = ("staged", "mpi", "nccl")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parallel([2, 3, 4])
def test_operations_bring_what_they_bring_on_the_host(
    world: Communicator, way: Transport, emulated_device: EmulatedDeviceFactory
) -> None:
    rank = DeviceRank(world, emulated_device(world.rank), lambda comm, arithmetic: reaching(way, comm, arithmetic))
    for operation in OPERATIONS:
        for _ in range(3):
            array, expected = operation(rank)
            found = array if isinstance(array, np.ndarray) else rank.on_host(array)
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("strategy", [Sharded, Bucketed])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parallel([2, 3])
def test_a_training_is_that_of_one_rank_of_numpy(
    world: Communicator,
    progress: ProgressEngine,
    way: Transport,
    strategy: Callable[..., Any],
    emulated_device: EmulatedDeviceFactory,
) -> None:
    task = Task(nets.residual, NumpyKernelSet(), lambda: Sgd(momentum=0.9, weight_decay=1e-3), steps=5, transport=way)
    device: EmulatedDevice = emulated_device(world.rank)
    kernels = CudaKernelSet(CudaRuntime(device, device.stream("compute"), "float64"))
    result = train(replace(task, kernels=kernels), world, progress, strategy, nominal_batch=task.batch, bucket_bytes=2000)
    alone = SingleCommunicator()
    engine = ProgressEngine(rank=0, deadline_seconds=60.0, abort=alone.abort)
    expected = train(task, alone, engine, strategy, nominal_batch=task.batch, bucket_bytes=2000)
    assert distance(result.parameters, expected.parameters) <= 1e-10
    device.finish()
