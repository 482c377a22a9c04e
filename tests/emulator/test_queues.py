"""Streams, events, captures and links: work in every order that is allowed, and a forgotten wait that shows."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend.cuda.device import ConvolutionKey, DeviceArray
from hpctrain_testing.emulator.device import EmulatedDevice
from hpctrain_testing.emulator.memory import EmulatedDeviceError, borrowed, on_host
from hpctrain_testing.emulator.streams import Mark, Work, WorkScheduler
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual
from tests.support.emulated import EmulatedDeviceFactory

SEEDS = range(20)


def test_what_is_downloaded_is_of_no_use_before_it_is_there() -> None:
    early = 0
    for seed in SEEDS:
        device = EmulatedDevice(seed)
        stream, pinned, source = device.stream("copies"), device.pinned(4), device.allocate(4)
        pinned[:] = 0
        device.download(stream, pinned, source)
        early += (pinned == 0xFF).all()
        stream.synchronize()
        assert (pinned == 0).all()
    assert early >= len(SEEDS) // 2


def test_a_wait_is_for_the_record_at_the_time_of_the_call() -> None:
    """A later record of the same event does not count, and a wait before the first is none."""
    for seed in SEEDS:
        device = EmulatedDevice(seed)
        first, second, event = device.stream("first"), device.stream("second"), device.event()
        assert event.done
        second.wait(event)
        a, b = device.allocate(4), device.allocate(4)
        first.record(event)
        second.wait(event)
        device.copy(first, a, b)
        first.record(event)
        second.synchronize()  # for which the copy is not needed
        event.synchronize()
        assert event.done
        device.finish()


def test_an_event_is_done_some_time_for_who_asks_often_enough() -> None:
    """However much comes before it, and whatever other events are asked for in between."""
    for seed in SEEDS:
        device = EmulatedDevice(seed)
        stream, event, other = device.stream("copies"), device.event(), device.event()
        a, b = device.allocate(4), device.allocate(4)
        for _ in range(500):
            device.copy(stream, a, b)
            stream.record(other)
        device.copy(stream, a, b)
        stream.record(event)
        asked = 0
        while not event.done:
            asked += 1
            assert asked <= 50
            _ = other.done
        device.finish()


def test_work_without_a_wait_is_named() -> None:
    late = 0
    for seed in SEEDS:
        device = EmulatedDevice(seed)
        a, b = device.allocate(4), device.allocate(4)
        device.copy(device.stream("copies"), a, b)
        try:
            device.finish()
        except EmulatedDeviceError as error:
            late += str(error) == "The program has not waited for the work on copies: copy."
    assert late >= len(SEEDS) // 2


def _scheduler(queues: int, seed: int) -> WorkScheduler:
    scheduler = WorkScheduler(random.Random(seed))
    for i in range(queues):
        scheduler.queue(f"queue {i}")
    return scheduler


#: pieces of work: (queue, the piece issued so long before that it comes after)
PIECES = st.lists(st.tuples(st.integers(0, 2), st.none() | st.integers(1, 6)), max_size=20)


@given(pieces=PIECES, seed=st.integers(0, 100))
def test_marks_are_kept_in_every_order(pieces: list[tuple[int, int | None]], seed: int) -> None:
    scheduler = _scheduler(3, seed)
    done: list[int] = []
    marks: list[Mark] = []
    for i, (queue, before) in enumerate(pieces):
        after = marks[i - before] if before is not None and before <= i else None
        scheduler.append(scheduler.queues[queue], Work(str(i), partial(done.append, i), after=after))
        marks.append(scheduler.queues[queue].mark)
        scheduler.run_some()
    if marks:
        scheduler.run_until(marks[len(marks) // 2])
        assert len(marks) // 2 in done
    scheduler.run_all()
    assert sorted(done) == list(range(len(pieces)))
    for i, (queue, before) in enumerate(pieces):
        earlier = [j for j in range(i) if pieces[j][0] == queue] + ([i - before] if before is not None and before <= i else [])
        assert all(done.index(j) < done.index(i) for j in earlier)


def test_work_is_late_and_in_odd_orders() -> None:
    late, orders = 0, set()
    for seed in range(100):
        scheduler = _scheduler(2, seed)
        done: list[int] = []
        for i in range(4):
            scheduler.append(scheduler.queues[i % 2], Work(str(i), partial(done.append, i)))
            scheduler.run_some()
        late += len(done) < 4
        scheduler.run_until(scheduler.queues[0].mark)
        late += len(done) < 4
        scheduler.run_all()
        orders.add(tuple(done))
    assert late > 100
    assert len(orders) == 6  # all there are


CAPTURED_CONVOLUTION = ConvolutionKey(
    "forward", (1, 4, 4, 4), (4, 1, 1, 4), (1, 4, 4, 4), (1, 1), (0, 0, 0, 0), (1, 1), 1, "float32", "float32"
)


def test_a_graph_keeps_no_memory_in_use(emulated_device: EmulatedDeviceFactory) -> None:
    device = EmulatedDevice(1)
    emulated_device()
    stream, x, y = device.stream("compute"), device.allocate(32), device.allocate(32)
    with device.capture(stream) as graph:
        device.copy(stream, y, x)
    del x
    graph.launch(stream)
    with pytest.raises(EmulatedDeviceError, match="is not in memory in use"):
        stream.synchronize()


@pytest.mark.parametrize(
    "deed",
    [
        lambda device, _: device.allocate(8),
        lambda device, _: device.pinned(8),
        lambda device, _: device.stream("other").synchronize(),
        lambda device, stream: stream.synchronize(),
        lambda device, _: device.event().synchronize(),
        lambda device, _: device.event().done,
        lambda device, _: device.kernel("elementwise", "relu_forward_f32_w4"),
        lambda device, _: device.convolution(CAPTURED_CONVOLUTION),
        lambda device, _: device.capture(device.stream("other")).__enter__(),
        lambda device, stream: device.capture(stream).__enter__(),
    ],
)
def test_waiting_allocating_and_loading_are_refused(
    emulated_device: EmulatedDeviceFactory, deed: Callable[[EmulatedDevice, object], object]
) -> None:
    device = emulated_device(1)
    stream = device.stream("compute")
    with device.capture(stream), pytest.raises(EmulatedDeviceError, match="while it captures stream compute"):
        deed(device, stream)
    if "event" not in deed.__code__.co_names:
        return
    deed(device, stream)  # is no mistake outside


def test_events_do_not_cross_the_border_of_a_capture() -> None:
    device = EmulatedDevice()
    stream, other = device.stream("compute"), device.stream("copy")
    before, within, never = device.event(), device.event(), device.event()
    stream.record(before)
    with device.capture(stream):
        stream.record(within)
        stream.wait(within)
        stream.wait(never)
        for waiting, event in ((stream, before), (other, within)):
            with pytest.raises(EmulatedDeviceError, match="only one of them is being captured"):
                waiting.wait(event)
    for use in (lambda: other.wait(within), within.synchronize, lambda: within.done):
        with pytest.raises(EmulatedDeviceError, match="captur"):
            use()
    stream.record(within)  # outside it is an event as others are
    within.synchronize()


class _Rank:
    """A device with links, and arrays of it."""

    def __init__(self, comm: ThreadCommunicator, device: EmulatedDevice) -> None:
        peers = comm.split(0, comm.rank, "devices")
        assert peers is not None
        self.rank, self.size, self.device, self.stream = comm.rank, comm.size, device, device.stream("between")
        self.links = device.join(peers, self.stream)

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
def test_unlike_calls_are_reported(call: Any, sentence: str, emulated_device: EmulatedDeviceFactory) -> None:
    def program(rank: _Rank) -> None:
        array = rank.array([1.0, 2.0])
        call(rank, array)
        with pytest.raises(
            EmulatedDeviceError, match=rf"^The devices of ranks 0 and 1 have enqueued different calls: {sentence}\.$"
        ):
            rank.values(array)

    _on_ranks(2, program, emulated_device, seeds=1)


def test_messages_of_unlike_sizes_are_reported(emulated_device: EmulatedDeviceFactory) -> None:
    def program(rank: _Rank) -> None:
        array = rank.array([1.0, 2.0])
        if rank.rank:
            rank.links.receive(array[:1], 0)
        else:
            rank.links.send(array, 1)
        with pytest.raises(EmulatedDeviceError, match=r"^The device of rank 0 sends 16 bytes to rank 1, which expects 8\.$"):
            rank.values(array)

    _on_ranks(2, program, emulated_device, seeds=1)


def test_work_is_counted_by_its_kind() -> None:
    device = EmulatedDevice()
    stream, a, b, pinned = device.stream("compute"), device.allocate(8), device.allocate(8), device.pinned(8)
    device.copy(stream, b, a)
    device.copy(stream, a, b)
    device.download(stream, pinned, a)
    assert device.counters.enqueued == {"copy": 2, "download": 1}
    stream.synchronize()
    with device.capture(stream) as graph:
        device.copy(stream, b, a)
    graph.launch(stream)
    graph.launch(stream)
    stream.synchronize()
    assert device.counters.enqueued == {"copy": 3, "download": 1, "graph": 2}


def test_waits_of_the_host_are_counted_by_the_function_that_waits() -> None:
    device = EmulatedDevice()
    stream, event = device.stream("copies"), device.event()
    stream.record(event)
    event.synchronize()
    event.synchronize()
    stream.synchronize()
    assert event.done
    here = f"{__name__}.test_waits_of_the_host_are_counted_by_the_function_that_waits"
    assert device.counters.synchronisations == {("event", here): 2, ("stream copies", here): 1}


def test_allocations_after_the_seal_are_late() -> None:
    device = EmulatedDevice()
    memory = [device.allocate(100), device.pinned(50)]
    assert (device.counters.allocations, device.counters.late_allocations) == (2, [])
    device.seal()
    memory += [device.allocate(7), device.pinned(np.int64(9))]
    assert device.counters.allocations == 4
    where = f"{__name__}.test_allocations_after_the_seal_are_late"
    assert device.counters.late_allocations == [f"7 bytes at {where}", f"9 bytes at {where}"]
