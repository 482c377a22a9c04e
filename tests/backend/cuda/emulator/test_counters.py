"""Counts of what a device was asked for."""

from __future__ import annotations

import numpy as np

from hpctrain.backend.cuda.emulator.device import EmulatedDevice


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
