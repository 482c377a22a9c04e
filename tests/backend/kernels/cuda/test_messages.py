"""Marks of a device's work, their events, and groups of one stream."""

from __future__ import annotations

import numpy as np

from hpctrain.backend.kernels.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime
from hpctrain.comm.single import SingleCommunicator
from hpctrain.testing.transfers import empty, put, take
from tests.support.emulated import EmulatedDeviceFactory


def test_events_are_used_again_once_they_are_done(emulated_device: EmulatedDeviceFactory) -> None:
    device = emulated_device(0)
    kernels = CudaKernelSet(CudaRuntime(device, device.stream("compute"), "float64"))
    messages = kernels.arithmetic.messages()
    first = messages.mark()
    event = first._event
    others = [messages.mark() for _ in range(3)]
    assert len({id(mark._event) for mark in (first, *others)}) == 4, "an event of work that may not be done"
    while not first.done:
        pass
    assert messages.mark()._event is event
    assert kernels.arithmetic.messages() is messages


def test_groups_of_a_process_share_one_stream(emulated_device: EmulatedDeviceFactory) -> None:
    """Of one rank: sums and broadcasts leave what they have."""
    device = emulated_device(1)
    kernels = CudaKernelSet(CudaRuntime(device, device.stream("compute"), "float64"))
    messages, array = kernels.arithmetic.messages(), empty(kernels, (5,), "float64")
    put(kernels, array, np.arange(5.0))
    first, second = (messages.join(SingleCommunicator()) for _ in range(2))
    assert first._stream is second._stream
    for group in (first, second):
        group.wait_for_kernels()
        group.links.sum_to_all(array)
        group.links.broadcast(array, 0)
        assert group.links.fault() is None
        mark = group.mark()
        while not mark.done:
            pass
    np.testing.assert_array_equal(take(kernels, array), np.arange(5.0))
    assert messages.group_fault() is None
    assert messages.identity == device.identity
