"""Operations by an MPI that reads a device's memory: order, waits, texts. What they bring is in test_transports."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.backend.cuda.emulator.device import EmulatedDevice
from hpctrain.comm.base import Communicator, Handle
from hpctrain.comm.device_mpi import DeviceMpiCommunicator, over_mpi
from hpctrain.comm.single import Complete
from hpctrain.comm.staged import StagedOperation
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, wait
from tests.support.device_operations import DeviceRank, work_between_kernels
from tests.support.device_views import ViewingCommunicator
from tests.support.emulated import EmulatedDeviceFactory


def _reach(comm: Communicator, arithmetic: Arithmetic) -> Communicator:
    return over_mpi(ViewingCommunicator(comm), arithmetic)


class _Mark:
    """Work that is done when the test says so."""

    def __init__(self) -> None:
        self.done = False


class _Arithmetic(Arithmetic):
    """A device of which only marks matter."""

    def __init__(self) -> None:
        self.marks: list[_Mark] = []

    def messages(self) -> Any:
        return self

    def mark(self) -> _Mark:
        self.marks.append(_Mark())
        return self.marks[-1]


_Arithmetic.__abstractmethods__ = frozenset()


class _Elsewhere:
    """An array that is not on the host."""

    dtype = "float64"

    def __init__(self, size: int) -> None:
        self.size = size


class _Inner:
    """A communicator that remembers what is posted on it."""

    rank, size, name, world_ranks = 0, 1, "world", (0,)

    def __init__(self) -> None:
        self.posted: list[int] = []

    def ibroadcast(self, buffer: Any, root: int) -> Handle:
        self.posted.append(buffer.size)
        return Complete()


def _scene() -> tuple[_Inner, _Arithmetic, DeviceMpiCommunicator]:
    inner: Any = _Inner()
    arithmetic = _Arithmetic()
    return inner, arithmetic, DeviceMpiCommunicator(inner, arithmetic)


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_operations_are_posted_in_the_order_in_which_they_were_started(on_host: list[bool], source: random.Random) -> None:
    """Whichever device's work is done first, whichever is tested first, and wherever an array lies."""
    inner, arithmetic, comm = _scene()
    handles = [comm.ibroadcast(np.zeros(n + 1) if here else _Elsewhere(n + 1), 0) for n, here in enumerate(on_host)]
    while not all(list(map(StagedOperation.test, source.sample(handles, len(handles))))):
        assert inner.posted == list(range(1, len(inner.posted) + 1))
        source.choice([mark for mark in arithmetic.marks if not mark.done]).done = True
    assert inner.posted == list(range(1, len(on_host) + 1))


def test_texts_name_the_phase() -> None:
    _, arithmetic, comm = _scene()
    first, second = comm.ibroadcast(_Elsewhere(3), 0), comm.ibroadcast(np.zeros(4), 0)
    assert str(first) == "broadcast of 3 elements, waiting for the device"
    assert str(second) == "broadcast of 4 elements, waiting for its turn behind operations that wait for the device"
    arithmetic.marks[0].done = True
    assert isinstance(comm, Communicator)
    assert first.test()
    assert str(first) == "broadcast of 3 elements, complete"
    assert str(second) == "of one process"


def test_every_place_that_waits_matters(emulated_device: EmulatedDeviceFactory) -> None:
    """One of two ranks goes on before its kernels are done."""
    made: list[EmulatedDevice] = []

    def run(seed: int = 0, ignored_wait: int | None = None) -> list[np.ndarray]:
        def program(comm: ThreadCommunicator) -> np.ndarray:
            device = emulated_device(seed + comm.rank, ignored_wait=ignored_wait if comm.rank == 0 else None)
            made.extend([device] if comm.rank == 0 else [])
            return work_between_kernels(DeviceRank(comm, device, _reach))

        return run_virtual(2, program)

    expected = run()
    places: dict[str, list[int]] = {}
    for number, text in enumerate(made[0].waits):
        if "messages" in text:
            places.setdefault(text.rpartition(" at ")[2], []).append(number)
    assert list(places) == ["hpctrain.backend.kernels.cuda.messages.CudaMark.done"]
    for numbers in places.values():
        wrong = [_differs(run, seed, number, expected) for number in numbers for seed in range(4)]
        assert any(wrong)
        assert sum(any(wrong[4 * k : 4 * k + 4]) for k in range(len(numbers))) > len(numbers) // 2, "most of them matter"


def _differs(run: Callable[..., list[np.ndarray]], seed: int, number: int, expected: list[np.ndarray]) -> bool:
    return any(not np.array_equal(*pair) for pair in zip(run(seed, number), expected, strict=True))


def test_steps_allocate_nothing(emulated_device: EmulatedDeviceFactory) -> None:
    """Buffers of parts and events are made by the first operations, and used by later ones."""

    def program(comm: ThreadCommunicator) -> list[str]:
        device = emulated_device(comm.rank)
        rank = DeviceRank(comm, device, _reach)
        buffer = rank.on_device(rank.values(comm.rank, 9))
        for step in range(6):
            wait(rank.comm.iallreduce(buffer))
            if step == 1:
                device.seal()
        return device.counters.late_allocations

    assert run_virtual(3, program) == [[], [], []]


def test_only_those_with_a_second_stage_sum(emulated_device: EmulatedDeviceFactory) -> None:
    def program(comm: ThreadCommunicator) -> None:
        rank = DeviceRank(comm, emulated_device(0), lambda inner, arithmetic: DeviceMpiCommunicator(inner, arithmetic))
        with pytest.raises(AssertionError, match="moves arrays of the device, and sums none"):
            rank.comm.iallreduce(rank.on_device([1.0]))

    run_virtual(1, program)
