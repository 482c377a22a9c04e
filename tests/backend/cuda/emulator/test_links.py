"""Links between emulated devices: what calls bring, what they must have alike, and that each is a piece of its stream's work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.cuda.emulator.device import EmulatedDevice
from hpctrain.backend.cuda.emulator.errors import EmulatedDeviceError
from hpctrain.backend.cuda.emulator.memory import borrowed, on_host
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual
from tests.support.emulated import EmulatedDeviceFactory


class _Rank:
    """A device with links, and arrays of it."""

    def __init__(self, comm: ThreadCommunicator, device: EmulatedDevice) -> None:
        peers = comm.split(0, comm.rank, "devices")
        assert peers is not None
        self.rank, self.size, self.device, self.stream = comm.rank, comm.size, device, device.stream("between")
        self.links = device.groups.join(peers, self.stream)

    def array(self, values: Any, dtype: str = "float64") -> DeviceArray:
        numbers = np.asarray(values, "uint16" if dtype == "bfloat16" else dtype)
        array = self.device.allocate(numbers.nbytes).view(dtype)
        on_host(borrowed(array))[...] = numbers
        return array

    def values(self, array: DeviceArray) -> list[float]:
        event = self.device.event()
        self.stream.record(event)
        while not event.done:
            pass
        return list(on_host(borrowed(array)))


def _on_ranks(ranks: int, program: Callable[[_Rank], None], make: EmulatedDeviceFactory, seeds: int = 4) -> None:
    for seed in range(seeds):
        run_virtual(ranks, lambda comm: program(_Rank(comm, make(10 * seed + comm.rank))), seed=seed)  # noqa: B023


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_collectives(ranks: int, emulated_device: EmulatedDeviceFactory) -> None:
    def program(rank: _Rank) -> None:
        total, one = rank.array([rank.rank, 10.0]), rank.array([1.0, rank.rank])
        found, bits = rank.array([-1.0, -1.0]), rank.array([rank.rank, 7], "bfloat16")
        rank.links.sum_to_all(total)
        rank.links.sum_to_one(one, found, ranks - 1)
        rank.links.broadcast(bits, ranks - 1)
        assert rank.values(bits) == [ranks - 1, 7]
        assert rank.values(total) == [sum(range(ranks)), 10.0 * ranks]
        assert rank.values(found) == ([ranks, sum(range(ranks))] if rank.rank == ranks - 1 else [-1.0, -1.0])

    _on_ranks(ranks, program, emulated_device)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_messages_together(ranks: int, emulated_device: EmulatedDeviceFactory) -> None:
    """Each to the next and two from the one before, which need each other."""

    def program(rank: _Rank) -> None:
        after, before = (rank.rank + 1) % ranks, (rank.rank - 1) % ranks
        sent = [rank.array([rank.rank + 0.5 * n]) for n in range(2)]
        received = [rank.array([-1.0]) for _ in range(2)]
        with rank.links.together():
            for array in received:
                rank.links.receive(array, before)
            for array in sent:
                rank.links.send(array, after)
        assert [rank.values(array) for array in received] == [[before], [before + 0.5]]

    _on_ranks(ranks, program, emulated_device)


def test_nothing_together_is_nothing(emulated_device: EmulatedDeviceFactory) -> None:
    def program(rank: _Rank) -> None:
        with rank.links.together():
            pass
        assert rank.device.counters.enqueued["links"] == 0

    _on_ranks(2, program, emulated_device, seeds=1)


def test_work_behind_it_waits(emulated_device: EmulatedDeviceFactory) -> None:
    """Of its own stream: a copy of what was summed."""

    def program(rank: _Rank) -> None:
        array, copy = rank.array([1.0]), rank.array([0.0])
        rank.links.sum_to_all(array)
        rank.device.copy(rank.stream, copy, array)
        rank.stream.synchronize()
        assert rank.values(copy) == [3.0]

    _on_ranks(3, program, emulated_device)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda rank, array: rank.links.broadcast(array, rank.rank),
            "broadcast at 0 of 2 float64; and broadcast at 1 of 2 float64",
        ),
        (
            lambda rank, array: rank.links.sum_to_all(array) if rank.rank else rank.links.broadcast(array, 0),
            "broadcast at 0 of 2 float64; and sum to all of 2 float64",
        ),
        (
            lambda rank, array: rank.links.sum_to_all(array[: 1 + rank.rank]),
            "sum to all of 1 float64; and sum to all of 2 float64",
        ),
        (
            lambda rank, array: rank.links.sum_to_all(array) if rank.rank else rank.links.send(array, 1),
            "messages alone; and sum to all of 2 float64",
        ),
    ],
)
def test_unlike_calls_are_told(call: Any, sentence: str, emulated_device: EmulatedDeviceFactory) -> None:
    def program(rank: _Rank) -> None:
        array = rank.array([1.0, 2.0])
        call(rank, array)
        with pytest.raises(EmulatedDeviceError, match=rf"^The devices of ranks 0 and 1 do unlike things: {sentence}\.$"):
            rank.values(array)

    _on_ranks(2, program, emulated_device, seeds=1)


def test_messages_of_unlike_sizes_are_told(emulated_device: EmulatedDeviceFactory) -> None:
    def program(rank: _Rank) -> None:
        array = rank.array([1.0, 2.0])
        if rank.rank:
            rank.links.receive(array[:1], 0)
        else:
            rank.links.send(array, 1)
        with pytest.raises(EmulatedDeviceError, match=r"^The device of rank 0 sends 16 bytes to rank 1, which expects 8\.$"):
            rank.values(array)

    _on_ranks(2, program, emulated_device, seeds=1)
