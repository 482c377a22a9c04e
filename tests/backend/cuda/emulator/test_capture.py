"""Captures record work instead of doing it, and refuse what CUDA refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from hpctrain.backend.cuda.device import ConvolutionKey
from hpctrain.backend.cuda.emulator.device import EmulatedDevice
from hpctrain.backend.cuda.emulator.errors import EmulatedDeviceError
from hpctrain.backend.cuda.emulator.memory import on_host
from tests.support.emulated import EmulatedDeviceFactory

KEY = ConvolutionKey("forward", (1, 4, 4, 4), (4, 1, 1, 4), (1, 4, 4, 4), (1, 1), (0, 0, 0, 0), (1, 1), 1, "float32", "float32")


def test_captured_work_is_done_by_each_launch_with_its_arguments(emulated_device: EmulatedDeviceFactory) -> None:
    device = emulated_device(1)
    stream, x, y = device.stream("compute"), device.allocate(32), device.allocate(32)
    pinned, result = device.pinned(32), device.pinned(32)
    kernel = device.kernel("elementwise", "relu_forward_f32_w1")
    count = np.array([8], np.int64)
    with device.capture(stream) as graph:
        device.upload(stream, x, pinned)
        kernel(stream, (1,), (32,), x.view("float32"), y.view("float32"), count[0])
        device.download(stream, result, y)
    count[0] = 0
    stream.synchronize()
    assert (on_host(y) == 0).all()
    for values in (np.arange(8) - 4, np.arange(8) - 2):
        pinned.view(np.float32)[:] = values  # read by each launch
        graph.launch(stream)
        stream.synchronize()
        np.testing.assert_array_equal(result.view(np.float32), np.maximum(values, 0))


def test_a_graph_keeps_no_memory_in_use(emulated_device: EmulatedDeviceFactory) -> None:
    device = EmulatedDevice(1)
    emulated_device()
    stream, x, y = device.stream("compute"), device.allocate(32), device.allocate(32)
    with device.capture(stream) as graph:
        device.copy(stream, y, x)
    del x
    graph.launch(stream)
    with pytest.raises(EmulatedDeviceError, match="does not lie in memory that is in use"):
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
        lambda device, _: device.convolution(KEY),
        lambda device, _: device.capture(device.stream("other")).__enter__(),
        lambda device, stream: device.capture(stream).__enter__(),
    ],
)
def test_waiting_allocating_and_loading_are_refused(
    emulated_device: EmulatedDeviceFactory, deed: Callable[[EmulatedDevice, object], object]
) -> None:
    device = emulated_device(1)
    stream = device.stream("compute")
    with device.capture(stream), pytest.raises(EmulatedDeviceError, match="while stream compute is captured"):
        deed(device, stream)
    if "event" not in deed.__code__.co_names:
        return
    deed(device, stream)  # is no mistake outside


def test_copies_to_memory_that_is_not_pinned_are_refused() -> None:
    device = EmulatedDevice()
    stream, x = device.stream("compute"), device.allocate(8)
    with device.capture(stream), pytest.raises(ValueError, match="takes pinned memory"):
        device.download(stream, np.zeros(8, np.uint8), x)


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
            with pytest.raises(EmulatedDeviceError, match="one of them is captured, not both"):
                waiting.wait(event)
    for use in (lambda: other.wait(within), within.synchronize, lambda: within.done):
        with pytest.raises(EmulatedDeviceError, match="captur"):
            use()
    stream.record(within)  # outside it is an event as others are
    within.synchronize()


def test_other_threads_and_streams_go_on() -> None:
    device = EmulatedDevice()
    stream, other, x, y = device.stream("compute"), device.stream("copy"), device.allocate(8), device.allocate(8)
    on_host(x)[:] = 7
    errors = []

    def load() -> None:
        try:
            device.copy(other, y, x)
            other.synchronize()
            device.allocate(8)
        except BaseException as error:
            errors.append(error)

    with device.capture(stream):
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    assert not errors
    assert (on_host(y) == 7).all()


def test_a_graph_is_there_when_its_capture_has_ended() -> None:
    device = EmulatedDevice()
    stream, other = device.stream("compute"), device.stream("other")
    with device.capture(stream) as graph, pytest.raises(EmulatedDeviceError, match="before its capture has ended"):
        graph.launch(other)
    with device.capture(stream), pytest.raises(EmulatedDeviceError, match="launch a graph"):
        graph.launch(stream)
    with pytest.raises(ZeroDivisionError), device.capture(stream) as broken:
        1 // 0
    with pytest.raises(EmulatedDeviceError, match="before its capture has ended"):
        broken.launch(stream)
    stream.synchronize()
