"""Operations on arrays of a device: what they bring, the order in which they are posted, and what messages say of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend.kernels.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime
from hpctrain.backend.mirrors import StagedBytes, Transit
from hpctrain.comm.base import Communicator, Handle
from hpctrain.comm.single import Complete
from hpctrain.comm.staged import StagedCommunicator, StagedOperation
from hpctrain.testing.transfers import empty, put, take
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, wait
from tests.support.emulated import EmulatedDeviceFactory

#: elements of each rank's piece; some ranks have none
COUNTS = {1: (3,), 2: (5, 2), 3: (0, 4, 3), 4: (2, 0, 1, 6)}


class _Rank:
    """One rank with a device of its own, and a communicator that reaches it."""

    def __init__(self, comm: ThreadCommunicator, device: Any) -> None:
        self.kernels = CudaKernelSet(CudaRuntime(device, device.stream("compute"), "float64"))
        self.mirrors = self.kernels.arithmetic.mirrors()
        self.comm = StagedCommunicator(comm, self.mirrors)
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


def _allreduce(rank: _Rank) -> tuple[Any, np.ndarray]:
    buffer = rank.on_device(rank.values(rank.comm.rank))
    wait(rank.comm.iallreduce(buffer))
    return buffer, sum(rank.values(other) for other in range(rank.comm.size))


def _reduce_scatter(rank: _Rank) -> tuple[Any, np.ndarray]:
    send, recv = rank.on_device(rank.values(rank.comm.rank)), rank.on_device(np.zeros(rank.counts[rank.comm.rank]))
    wait(rank.comm.ireduce_scatter(send, recv, rank.counts))
    return recv, sum(rank.values(other) for other in range(rank.comm.size))[rank.own]


def _gathered(rank: _Rank) -> np.ndarray:
    return np.concatenate([rank.values(other, count) for other, count in enumerate(rank.counts)])


def _allgather(rank: _Rank) -> tuple[Any, np.ndarray]:
    send = rank.on_device(rank.values(rank.comm.rank, rank.counts[rank.comm.rank]))
    recv = rank.on_device(np.full(sum(rank.counts), -1.0))
    wait(rank.comm.iallgather(send, recv, rank.counts))
    return recv, _gathered(rank)


def _allgather_in_place(rank: _Rank) -> tuple[Any, np.ndarray]:
    values = np.full(sum(rank.counts), -1.0)
    values[rank.own] = rank.values(rank.comm.rank, rank.counts[rank.comm.rank])
    recv = rank.on_device(values)
    wait(rank.comm.iallgather(None, recv, rank.counts))
    return recv, _gathered(rank)


def _alltoall(rank: _Rank) -> tuple[Any, np.ndarray]:
    size, me = rank.comm.size, rank.comm.rank
    send = rank.on_device([me * 100 + other for other in range(size)])
    recv = rank.on_device(np.zeros(size))
    wait(rank.comm.ialltoall(send, recv, [1] * size, [1] * size))
    return recv, np.array([other * 100.0 + me for other in range(size)])


def _broadcast(rank: _Rank) -> tuple[Any, np.ndarray]:
    root = rank.comm.size - 1
    buffer = rank.on_device(rank.values(rank.comm.rank))
    wait(rank.comm.ibroadcast(buffer, root))
    return buffer, rank.values(root)


def _messages(rank: _Rank) -> tuple[Any, np.ndarray]:
    size, me = rank.comm.size, rank.comm.rank
    sent, received = rank.on_device(rank.values(me)), rank.on_device(rank.values(me))
    wait(rank.comm.isend(sent, (me + 1) % size, 7), rank.comm.irecv(received, (me - 1) % size, 7))
    return received, rank.values((me - 1) % size)


def _of_the_host(rank: _Rank) -> tuple[Any, np.ndarray]:
    buffer = rank.values(rank.comm.rank)
    wait(rank.comm.iallreduce(buffer), rank.comm.ibarrier())
    return buffer, sum(rank.values(other) for other in range(rank.comm.size))


OPERATIONS = [_allreduce, _reduce_scatter, _allgather, _allgather_in_place, _alltoall, _broadcast, _messages, _of_the_host]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_operations_bring_what_they_bring_on_the_host(
    ranks: int, operation: Callable[[_Rank], tuple[Any, np.ndarray]], emulated_device: EmulatedDeviceFactory
) -> None:
    def program(comm: ThreadCommunicator) -> None:
        rank = _Rank(comm, emulated_device(comm.rank))
        for _ in range(3):  # mirrors are used again
            array, expected = operation(rank)
            found = array if isinstance(array, np.ndarray) else rank.on_host(array)
            np.testing.assert_array_equal(found, expected)

    for seed in range(3):
        run_virtual(ranks, program, seed=seed)


@pytest.mark.parametrize("seed", range(20))
def test_many_on_their_way_at_once(seed: int, emulated_device: EmulatedDeviceFactory) -> None:
    """Twenty orders of the devices' work, each with twenty of the messages'."""

    def program(comm: ThreadCommunicator) -> None:
        rank = _Rank(comm, emulated_device(seed * 10 + comm.rank))
        total, arithmetic = rank.on_device(np.zeros(7)), rank.kernels.arithmetic
        buffers = [rank.on_device(rank.values(comm.rank, 7) + number) for number in range(4)]
        for _ in range(2):
            handles = [rank.comm.iallreduce(buffer) for buffer in buffers]
            for handle, buffer in zip(handles, buffers, strict=True):
                wait(handle)
                arithmetic.add(total, buffer)  # enqueued at once: it comes behind the copy back
        sums = [sum(rank.values(other, 7) + number for other in range(3)) for number in range(4)]
        np.testing.assert_array_equal(rank.on_host(total), sum(sums) * 4)

    for scheduling in range(20):
        run_virtual(3, program, seed=scheduling)


def test_bytes_are_those_of_the_operations(emulated_device: EmulatedDeviceFactory) -> None:
    def program(comm: ThreadCommunicator) -> None:
        rank = _Rank(comm, emulated_device(comm.rank))
        for operation in (_reduce_scatter, _allgather_in_place, _of_the_host):
            operation(rank)
        whole, own = 8 * sum(rank.counts), 8 * rank.counts[comm.rank]
        # A whole slice leaves and the own part of its sum arrives; the own part leaves, and those of others arrive.
        assert rank.mirrors.copied == StagedBytes(to_host=whole + own, from_host=own + whole - own)
        assert rank.mirrors.pinned_bytes <= 2 * whole + own

    run_virtual(3, program)


def test_groups_of_a_communicator_reach_the_device_too(emulated_device: EmulatedDeviceFactory) -> None:
    def program(comm: ThreadCommunicator) -> None:
        rank = _Rank(comm, emulated_device(comm.rank))
        pair, here = rank.comm.split(comm.rank // 2, comm.rank, "pairs"), rank.comm.split_shared_memory("node")
        assert rank.comm.split(None, 0, "nobody") is None
        for group in (pair, here):
            assert group is not None
            buffer = rank.on_device([1.0])
            wait(group.iallreduce(buffer))
            assert rank.on_host(buffer) == 2.0

    run_virtual(4, program, ranks_per_node=2)


class _Transit:
    """A way to the host that ends when the test says so."""

    def __init__(self) -> None:
        self.done = False

    def on_host(self) -> bool:
        return self.done


class _Mirrors:
    """Mirrors of arrays that are not there: only the order matters."""

    copied, pinned_bytes = StagedBytes(), 0

    def __init__(self) -> None:
        self.transits: list[_Transit] = []

    def mirror(self, array: Any) -> np.ndarray:
        return np.zeros(array.size)

    def leave(self, copies: Sequence[Any]) -> Transit:
        transit = _Transit()
        transit.done = not copies
        self.transits.append(transit)
        return transit

    def arrive(self, transit: Transit, array: Any, intervals: Sequence[tuple[int, int]]) -> None: ...


class _Elsewhere:
    """An array that is not on the host."""

    dtype, nbytes = "float64", 8

    def __init__(self, size: int) -> None:
        self.size = size

    def reshape(self, *_: int) -> _Elsewhere:
        return self

    def __getitem__(self, part: slice) -> _Elsewhere:
        return self


class _Inner:
    """A communicator that remembers what is posted on it."""

    rank, size, name, world_ranks = 0, 1, "world", (0,)

    def __init__(self) -> None:
        self.posted: list[int] = []

    def iallreduce(self, buffer: np.ndarray) -> Handle:
        self.posted.append(buffer.size)
        return Complete()


def _scene() -> tuple[_Inner, _Mirrors, StagedCommunicator]:
    inner: Any = _Inner()
    mirrors = _Mirrors()
    return inner, mirrors, StagedCommunicator(inner, mirrors)


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_operations_are_posted_in_the_order_in_which_they_were_started(on_host: list[bool], source: random.Random) -> None:
    """Whichever is ready first, whichever is tested first, and whether an array lies on the host or elsewhere."""
    inner, mirrors, comm = _scene()
    handles = [comm.iallreduce(np.zeros(n + 1) if here else _Elsewhere(n + 1)) for n, here in enumerate(on_host)]
    while not all(list(map(StagedOperation.test, source.sample(handles, len(handles))))):
        assert inner.posted == list(range(1, len(inner.posted) + 1))
        source.choice([transit for transit in mirrors.transits if not transit.done]).done = True
    assert inner.posted == list(range(1, len(on_host) + 1))


def test_texts_name_the_phase() -> None:
    _, mirrors, comm = _scene()
    first, second = comm.iallreduce(_Elsewhere(3)), comm.iallreduce(np.zeros(4))
    assert str(first) == "allreduce of 3 elements, waiting for the device"
    assert str(second) == "allreduce of 4 elements, waiting for its turn behind operations that wait for the device"
    mirrors.transits[0].done = True
    assert isinstance(comm, Communicator)
    assert first.test()
    assert str(first) == "allreduce of 3 elements, on its way to the device"
    assert str(second) == "of one process"
