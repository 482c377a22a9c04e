"""Streams and events: a program that forgets a wait computes something else, and every wait of a small one is needed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.cuda.emulator.device import EmulatedDevice
from hpctrain.backend.cuda.emulator.errors import EmulatedDeviceError
from hpctrain.backend.cuda.emulator.memory import on_host
from hpctrain.backend.cuda.emulator.work import Work

SEEDS = range(20)
SLICES, STEPS, ITEMS = 3, 2, 4


class StagedAveraging:
    """Gradients of slices by way of pinned memory to a network and back, on a stream for computation and one for copies."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.device = device
        self.compute, self.copies = device.stream("compute"), device.stream("copies")
        self.gradients, self.weights, self.pinned = (
            [self._floats(allocate(ITEMS * 4)) for _ in range(SLICES)]
            for allocate in (device.allocate, device.allocate, device.pinned)
        )
        self.ready, self.staged, self.back = ([device.event() for _ in range(SLICES)] for _ in range(3))

    def _floats(self, memory: DeviceArray | np.ndarray) -> DeviceArray | np.ndarray:
        return memory.view("float32")

    def run(self) -> np.ndarray:
        for step in range(STEPS):
            for k in range(SLICES):
                self._backward(step, k)
            for k in range(SLICES):
                self._exchange(k)
        self.compute.synchronize()
        return np.array([_unsettled(weight) for weight in self.weights])

    def _backward(self, step: int, k: int) -> None:
        self._do(lambda gradient: gradient.fill(10 * k + step + 1), self.gradients[k])
        self.compute.record(self.ready[k])
        self.copies.wait(self.ready[k])
        self.device.download(self.copies, self.pinned[k], self.gradients[k])
        self.copies.record(self.staged[k])

    def _exchange(self, k: int) -> None:
        self.staged[k].synchronize()
        self.pinned[k] += 100
        self.device.upload(self.copies, self.gradients[k], self.pinned[k])
        self.copies.record(self.back[k])
        self.compute.wait(self.back[k])
        self._do(np.add, self.weights[k], self.gradients[k])

    def _do(self, compute: Callable[..., object], *arrays: DeviceArray) -> None:
        """As a kernel, on the stream of computation."""
        values = [_unsettled(array) for array in arrays]
        self.device._streams.enqueue(
            self.compute, Work("kernel", lambda: compute(*values) if len(values) == 1 else compute(*values, out=values[0]))
        )


def _unsettled(array: DeviceArray) -> np.ndarray:
    """The array's memory without waiting for work."""
    return on_host(DeviceArray(array.pointer, array.shape, array.dtype, None))


WANTED = np.array([[float(sum(10 * k + step + 101 for step in range(STEPS)))] * ITEMS for k in range(SLICES)])


def test_staged_averaging_is_right_in_every_order() -> None:
    for seed in range(60):
        device = EmulatedDevice(seed)
        np.testing.assert_array_equal(StagedAveraging(device).run(), WANTED)
        device.finish()


@pytest.mark.slow
def test_every_wait_of_staged_averaging_is_needed() -> None:
    """Leaving one out makes a wrong result, or work that nobody waits for, with some seeds."""
    device = EmulatedDevice()
    StagedAveraging(device).run()
    assert len(device.waits) == STEPS * SLICES * 3 + 1
    for k, text in enumerate(device.waits):
        wrong = sum(not _right(seed, k) for seed in SEEDS)
        assert wrong >= len(SEEDS) // 10, f"without wait {k} ({text}) {wrong} of {len(SEEDS)} runs are wrong"


def _right(seed: int, ignored_wait: int) -> bool:
    device = EmulatedDevice(seed, ignored_wait=ignored_wait)
    result = StagedAveraging(device).run()
    try:
        device.finish()
    except EmulatedDeviceError:
        return False
    return np.array_equal(result, WANTED)


def test_a_reuse_of_pinned_memory_that_is_too_early_is_found() -> None:
    """The host writes the next values before the copy of these has run."""

    def copied(seed: int, *, waits: bool) -> np.ndarray:
        device = EmulatedDevice(seed)
        stream, event, pinned = device.stream("copies"), device.event(), device.pinned(4)
        places = [device.allocate(4) for _ in range(3)]
        for value, place in enumerate(places):
            if waits:
                event.synchronize()
            pinned[:] = value
            device.upload(stream, place, pinned)
            stream.record(event)
        stream.synchronize()
        return np.array([on_host(place) for place in places])

    wanted = np.repeat(np.arange(3), 4).reshape(3, 4)
    for seed in SEEDS:
        np.testing.assert_array_equal(copied(seed, waits=True), wanted)
    assert sum(not np.array_equal(copied(seed, waits=False), wanted) for seed in SEEDS) >= len(SEEDS) * 3 // 4


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


def test_a_download_does_not_spoil_what_is_still_read() -> None:
    for seed in SEEDS:
        device = EmulatedDevice(seed)
        stream, pinned, source, target = device.stream("copies"), device.pinned(4), device.allocate(4), device.allocate(4)
        pinned[:] = 5
        device.upload(stream, target, pinned)
        device.download(stream, pinned, source)
        stream.synchronize()
        assert (on_host(target) == 5).all()
        assert (pinned == 0).all()


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


def test_whoever_enqueues_more_lets_no_time_pass() -> None:
    """An event between much work is late for long, where the host goes on with other work each time that it has asked."""
    latest = 0
    for seed in SEEDS:
        device = EmulatedDevice(seed)
        stream, event, a, b = device.stream("copies"), device.event(), device.allocate(4), device.allocate(4)
        for _ in range(10):
            device.copy(stream, a, b)
        stream.record(event)
        asked = 0
        while not event.done:
            asked += 1
            device.copy(stream, a, b)
        latest = max(latest, asked)
        stream.synchronize()
        device.finish()
    assert latest > 50


def test_work_that_nobody_waits_for_is_named() -> None:
    late = 0
    for seed in SEEDS:
        device = EmulatedDevice(seed)
        a, b = device.allocate(4), device.allocate(4)
        device.copy(device.stream("copies"), a, b)
        try:
            device.finish()
        except EmulatedDeviceError as error:
            late += str(error) == "Nobody has waited for work on copies: copy."
    assert late >= len(SEEDS) // 2


def test_streams_and_events_are_of_one_device() -> None:
    device, other = EmulatedDevice(), EmulatedDevice()
    stream, event = device.stream("compute"), other.event()
    for use in (stream.record, stream.wait):
        with pytest.raises(EmulatedDeviceError, match="different devices"):
            use(event)
    with pytest.raises(EmulatedDeviceError, match="different devices"):
        device.copy(other.stream("compute"), device.allocate(4), device.allocate(4))


def test_memory_lives_until_the_work_on_it_is_done() -> None:
    for seed in SEEDS:
        device = EmulatedDevice(seed)
        stream, target = device.stream("compute"), device.allocate(4)
        device.copy(stream, target, device.allocate(4))
        stream.synchronize()
