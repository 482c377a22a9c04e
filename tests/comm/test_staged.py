"""Operations on arrays of a device: what they bring, the order in which they are posted, and what messages say of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend.mirrors import StagedBytes, Transit
from hpctrain.comm import transports
from hpctrain.comm.base import Communicator, Handle
from hpctrain.comm.single import Complete
from hpctrain.comm.staged import StagedCommunicator, StagedOperation
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual
from tests.support.device_operations import DeviceRank, allgather_in_place, of_the_host, reduce_scatter
from tests.support.emulated import EmulatedDeviceFactory


def test_bytes_are_those_of_the_operations(emulated_device: EmulatedDeviceFactory) -> None:
    def program(comm: ThreadCommunicator) -> None:
        rank = DeviceRank(comm, emulated_device(comm.rank), transports.staged)
        for operation in (reduce_scatter, allgather_in_place, of_the_host):
            operation(rank)
        mirrors = rank.kernels.arithmetic.mirrors()
        assert mirrors is not None
        whole, own = 8 * sum(rank.counts), 8 * rank.counts[comm.rank]
        # A whole slice leaves and the own part of its sum arrives; the own part leaves, and those of others arrive.
        assert mirrors.copied == StagedBytes(to_host=whole + own, from_host=own + whole - own)
        assert mirrors.pinned_bytes <= 2 * whole + own

    run_virtual(3, program)


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
