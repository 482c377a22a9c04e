"""Every way of a device's arrays between ranks brings the same, whatever the orders of devices and messages."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.backend.cuda.emulator.device import EmulatedDevice
from hpctrain.backend.cuda.emulator.errors import EmulatedDeviceError
from hpctrain.comm import two_level
from hpctrain.comm.base import Communicator, Handle
from hpctrain.comm.transports import Transport, reaching
from hpctrain.comm.two_level import TwoLevel, in_levels, levels
from hpctrain.errors import DeadlockError
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, wait
from tests.support.device_operations import OPERATIONS, DeviceRank
from tests.support.device_views import ViewingCommunicator
from tests.support.emulated import EmulatedDeviceFactory

WAYS: tuple[Transport, ...] = ("staged", "mpi", "nccl")


def reach(way: Transport) -> Callable[[Communicator, Arithmetic], Communicator]:
    """The way over virtual ranks, which read memory of devices for "mpi" alone."""
    return lambda comm, arithmetic: reaching(way, ViewingCommunicator(comm) if way == "mpi" else comm, arithmetic)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_operations_bring_what_they_bring_on_the_host(
    way: Transport, ranks: int, operation: Callable[[DeviceRank], tuple[Any, np.ndarray]], emulated_device: EmulatedDeviceFactory
) -> None:
    def program(comm: ThreadCommunicator) -> None:
        rank = DeviceRank(comm, emulated_device(comm.rank), reach(way))
        for _ in range(3):  # mirrors are used again
            array, expected = operation(rank)
            found = array if isinstance(array, np.ndarray) else rank.on_host(array)
            np.testing.assert_array_equal(found, expected)

    for seed in range(3):
        run_virtual(ranks, program, seed=seed)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(20))
def test_many_on_their_way_at_once(way: Transport, seed: int, emulated_device: EmulatedDeviceFactory) -> None:
    """Twenty orders of the devices' work, each with several of the messages'."""

    def program(comm: ThreadCommunicator) -> None:
        rank = DeviceRank(comm, emulated_device(seed * 10 + comm.rank), reach(way))
        total, arithmetic = rank.on_device(np.zeros(7)), rank.kernels.arithmetic
        buffers = [rank.on_device(rank.values(comm.rank, 7) + number) for number in range(4)]
        for _ in range(2):
            handles = [rank.comm.iallreduce(buffer) for buffer in buffers]
            for handle, buffer in zip(handles, buffers, strict=True):
                wait(handle)
                arithmetic.add(total, buffer)  # enqueued at once: it comes behind the copy back
        sums = [sum(rank.values(other, 7) + number for other in range(3)) for number in range(4)]
        np.testing.assert_array_equal(rank.on_host(total), sum(sums) * 4)

    for scheduling in range(20 if way == "staged" else 5):
        run_virtual(3, program, seed=scheduling)


@pytest.mark.parametrize("way", WAYS)
def test_groups_of_a_communicator_reach_the_device_too(way: Transport, emulated_device: EmulatedDeviceFactory) -> None:
    def program(comm: ThreadCommunicator) -> None:
        rank = DeviceRank(comm, emulated_device(comm.rank), reach(way))
        pair, here = rank.comm.split(comm.rank // 2, comm.rank, "pairs"), rank.comm.split_shared_memory("node")
        assert rank.comm.split(None, 0, "nobody") is None
        for group in (pair, here):
            assert group is not None
            buffer = rank.on_device([1.0])
            wait(group.iallreduce(buffer))
            assert rank.on_host(buffer) == 2.0

    run_virtual(4, program, ranks_per_node=2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(4))
def test_two_levels_reach_the_device(way: Transport, seed: int, emulated_device: EmulatedDeviceFactory) -> None:
    """By MPI each level reaches the device itself, by NCCL the one within nodes does."""

    def program(comm: ThreadCommunicator) -> None:
        two = levels([0, 0, 1, 1])
        assert two is not None

        def reach_levels(flat: Communicator, arithmetic: Arithmetic) -> Communicator:
            read = ViewingCommunicator(flat) if way == "mpi" else flat
            return reaching(way, in_levels(read, two, "gradients"), arithmetic)

        rank = DeviceRank(comm, emulated_device(10 * seed + comm.rank), reach_levels)
        place = two.order.index(comm.rank)
        counts = (3, 0, 1, 2)
        begin = sum(counts[:place])
        send, recv, gathered = rank.on_device(rank.values(comm.rank, 6)), rank.on_device(np.zeros(counts[place])), None
        for _ in range(3):
            handle = rank.comm.ireduce_scatter(send, recv, counts)
            wait(handle)
            total = sum(rank.values(other, 6) for other in range(4))
            np.testing.assert_array_equal(rank.on_host(recv), total[begin : begin + counts[place]])
            gathered = rank.on_device(np.zeros(6))
            wait(rank.comm.iallgather(recv, gathered, counts))
            np.testing.assert_array_equal(rank.on_host(gathered), total)
        assert (rank.comm.rank, isinstance(rank.comm, TwoLevel)) == (place, way != "staged")

    run_virtual(4, program, seed=seed, ranks_per_node=2)


def _mixed(comm: ThreadCommunicator, device: Any, seed: int) -> None:
    """Reductions and gathers of four ranks on two nodes, each of which drives its messages when it likes."""
    two = levels([0, 0, 1, 1])
    assert two is not None
    rank = DeviceRank(comm, device, lambda ranks, arithmetic: reaching("nccl", in_levels(ranks, two, "gradients"), arithmetic))
    place, counts, source = two.order.index(comm.rank), (3, 1, 2, 2), random.Random(100 * seed + comm.rank)
    begin = sum(counts[:place])
    own = slice(begin, begin + counts[place])
    flying, checks = [], []
    total = sum(rank.values(other, 8) for other in range(4))
    for _ in range(4):
        send, recv = rank.on_device(rank.values(comm.rank, 8)), rank.on_device(np.zeros(counts[place]))
        mine = np.zeros(8)
        mine[own] = total[own]
        gathered = rank.on_device(mine)
        flying.append(rank.comm.ireduce_scatter(send, recv, counts))
        _drive(flying, source.randrange(30))
        flying.append(rank.comm.iallgather(None, gathered, counts))
        _drive(flying, source.randrange(30))
        checks += [(recv, total[own]), (gathered, total)]
    while _drive(flying, 1):
        pass
    for array, expected in checks:
        np.testing.assert_array_equal(rank.on_host(array), expected)


def _drive(flying: list[Handle], times: int) -> list[Handle]:
    left = flying
    for _ in range(times):
        left = [handle for handle in flying if not handle.test()]
    return left


@pytest.mark.parametrize("seed", range(10))
def test_stages_within_nodes_have_one_order(seed: int, emulated_device: EmulatedDeviceFactory) -> None:
    run_virtual(4, lambda comm: _mixed(comm, emulated_device(seed + comm.rank), seed), seed=seed, ranks_per_node=2)


@pytest.mark.usefixtures("emulated_device")  # has its kernels built; what hangs is not done at the end
def test_without_turns_ranks_wait_for_each_other(monkeypatch: pytest.MonkeyPatch, emulated_device: EmulatedDeviceFactory) -> None:
    """Gathers within a node begin when those between nodes are complete, which is another moment on each rank."""
    monkeypatch.setattr(TwoLevel, "_turn", lambda self: two_level._at_once)
    wrong = 0
    for seed in range(10):
        try:
            run_virtual(4, lambda comm: _mixed(comm, EmulatedDevice(seed + comm.rank), seed), seed=seed, ranks_per_node=2)  # noqa: B023
        except (EmulatedDeviceError, DeadlockError, AssertionError):
            wrong += 1
    assert wrong > 2
