"""Sums by parts, which kernels add: the bits do not depend on messages, nor the buffers on the number of operations."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.boxes import even
from hpctrain.comm.base import Communicator
from hpctrain.comm.device_mpi import over_mpi
from hpctrain.testing.transfers import put
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, wait
from tests.support.device_operations import DeviceRank
from tests.support.device_views import ViewingCommunicator
from tests.support.emulated import EmulatedDeviceFactory


def _reach(comm: Communicator, arithmetic: Arithmetic) -> Communicator:
    return over_mpi(ViewingCommunicator(comm), arithmetic)


def _numbers(rank: int, size: int) -> np.ndarray:
    """Numbers whose sum depends on its order."""
    return np.random.default_rng(rank).standard_normal(size) * 10.0 ** np.random.default_rng(100 + rank).integers(-8, 8, size)


@pytest.mark.parametrize(("ranks", "size"), [(2, 7), (3, 8), (4, 2), (3, 0)])
def test_parts_are_added_in_the_order_of_ranks(ranks: int, size: int, emulated_device: EmulatedDeviceFactory) -> None:
    """To the last bit, whatever arrives first; some ranks own nothing."""
    total = np.zeros(size)
    for other in range(ranks):
        total = total + _numbers(other, size) if other else _numbers(0, size)

    def program(comm: ThreadCommunicator) -> None:
        rank = DeviceRank(comm, emulated_device(comm.rank), _reach)
        counts = even(size, ranks)
        begin = sum(counts[: comm.rank])
        received = rank.on_device(np.zeros(counts[comm.rank]))
        whole, halves = (rank.on_device(_numbers(comm.rank, size)) for _ in range(2))
        for _ in range(2):
            put(rank.kernels, whole, _numbers(comm.rank, size))
            wait(rank.comm.iallreduce(whole), rank.comm.ireduce_scatter(halves, received, counts))
            np.testing.assert_array_equal(rank.on_host(whole), total)
            np.testing.assert_array_equal(rank.on_host(received), total[begin : begin + counts[comm.rank]])

    for seed in range(5):
        run_virtual(ranks, program, seed=seed)


def test_second_stages_keep_the_order_of_the_first(emulated_device: EmulatedDeviceFactory) -> None:
    """Allreduces that are tested in another order on each rank."""

    def program(comm: ThreadCommunicator) -> None:
        rank = DeviceRank(comm, emulated_device(comm.rank), _reach)
        buffers = [rank.on_device(np.full(4 + n, comm.rank + 1.0)) for n in range(4)]
        handles = [rank.comm.iallreduce(buffer) for buffer in buffers]
        order = list(reversed(handles)) if comm.rank else handles
        while [handle for handle in order if not handle.test()]:  # as an engine's wait drives all
            pass
        for buffer in buffers:
            np.testing.assert_array_equal(rank.on_host(buffer), np.full(buffer.size, 6.0))

    for seed in range(10):
        run_virtual(3, program, seed=seed)
