"""Operations on arrays of an emulated device, each with what it has to bring: the same for every way between ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.comm.base import Communicator
from hpctrain.testing.operators import empty, put, take
from hpctrain_testing.virtual.run import wait
from tests.support.emulated import kernels_on

#: elements of each rank's piece; some ranks have none
COUNTS = {1: (3,), 2: (5, 2), 3: (0, 4, 3), 4: (2, 0, 1, 6)}


class DeviceRank:
    """One rank with a device of its own, and a communicator that reaches it. Making it is collective.

    Args:
        reach: (ranks, the device's arithmetic) -> the same ranks, for arrays of the device too.
    """

    def __init__(self, comm: Communicator, device: Any, reach: Callable[[Communicator, Arithmetic], Communicator]) -> None:
        self.kernels = kernels_on(device)
        self.comm = reach(comm, self.kernels.arithmetic)
        self.counts = COUNTS[comm.size]
        self.begin = sum(self.counts[: comm.rank])
        self.own = slice(self.begin, self.begin + self.counts[comm.rank])

    def on_device(self, values: Any) -> Any:
        numbers = np.asarray(values, np.float64)
        array = empty(self.kernels, numbers.shape, "float64")
        put(self.kernels, array, numbers)
        return array

    def on_host(self, array: Any) -> np.ndarray:
        return take(self.kernels, array)

    def values(self, rank: int, size: int | None = None) -> np.ndarray:
        """Other numbers on each rank."""
        return np.arange(sum(self.counts) if size is None else size) * 10.0 + rank + 1


def work_between_kernels(rank: DeviceRank) -> np.ndarray:
    """Operations as averaging has them: kernels before them write what is sent, those after them read what arrives."""
    arithmetic = rank.kernels.arithmetic
    gradient, total = rank.on_device(rank.values(rank.comm.rank, 12)), rank.on_device(np.zeros(12))
    one = rank.on_device(np.ones(12))
    for _ in range(3):
        arithmetic.add(gradient, one)
        wait(rank.comm.iallreduce(gradient))
        arithmetic.add(total, gradient)
        arithmetic.add(gradient, one)
        wait(rank.comm.ibroadcast(gradient, 0))
        arithmetic.add(total, gradient)
    return rank.on_host(total)


def allreduce(rank: DeviceRank) -> tuple[Any, np.ndarray]:
    buffer = rank.on_device(rank.values(rank.comm.rank))
    wait(rank.comm.iallreduce(buffer))
    return buffer, sum(rank.values(other) for other in range(rank.comm.size))


def reduce_scatter(rank: DeviceRank) -> tuple[Any, np.ndarray]:
    send, recv = rank.on_device(rank.values(rank.comm.rank)), rank.on_device(np.zeros(rank.counts[rank.comm.rank]))
    wait(rank.comm.ireduce_scatter(send, recv, rank.counts))
    return recv, sum(rank.values(other) for other in range(rank.comm.size))[rank.own]


def _gathered(rank: DeviceRank) -> np.ndarray:
    return np.concatenate([rank.values(other, count) for other, count in enumerate(rank.counts)])


def allgather(rank: DeviceRank) -> tuple[Any, np.ndarray]:
    send = rank.on_device(rank.values(rank.comm.rank, rank.counts[rank.comm.rank]))
    recv = rank.on_device(np.full(sum(rank.counts), -1.0))
    wait(rank.comm.iallgather(send, recv, rank.counts))
    return recv, _gathered(rank)


def allgather_in_place(rank: DeviceRank) -> tuple[Any, np.ndarray]:
    values = np.full(sum(rank.counts), -1.0)
    values[rank.own] = rank.values(rank.comm.rank, rank.counts[rank.comm.rank])
    recv = rank.on_device(values)
    wait(rank.comm.iallgather(None, recv, rank.counts))
    return recv, _gathered(rank)


def alltoall(rank: DeviceRank) -> tuple[Any, np.ndarray]:
    size, me = rank.comm.size, rank.comm.rank
    send = rank.on_device([me * 100 + other for other in range(size)])
    recv = rank.on_device(np.zeros(size))
    wait(rank.comm.ialltoall(send, recv, [1] * size, [1] * size))
    return recv, np.array([other * 100.0 + me for other in range(size)])


def broadcast(rank: DeviceRank) -> tuple[Any, np.ndarray]:
    root = rank.comm.size - 1
    buffer = rank.on_device(rank.values(rank.comm.rank))
    wait(rank.comm.ibroadcast(buffer, root))
    return buffer, rank.values(root)


def messages(rank: DeviceRank) -> tuple[Any, np.ndarray]:
    size, me = rank.comm.size, rank.comm.rank
    sent, received = rank.on_device(rank.values(me)), rank.on_device(rank.values(me))
    wait(rank.comm.isend(sent, (me + 1) % size, 7), rank.comm.irecv(received, (me - 1) % size, 7))
    return received, rank.values((me - 1) % size)


def of_the_host(rank: DeviceRank) -> tuple[Any, np.ndarray]:
    buffer = rank.values(rank.comm.rank)
    wait(rank.comm.iallreduce(buffer), rank.comm.ibarrier())
    return buffer, sum(rank.values(other) for other in range(rank.comm.size))


OPERATIONS = [allreduce, reduce_scatter, allgather, allgather_in_place, alltoall, broadcast, messages, of_the_host]
