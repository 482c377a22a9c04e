"""Copies between arrays of the host and a device, through pinned memory that is used in turn."""

from __future__ import annotations

from collections import deque

import numpy as np

from hpctrain.backend.cuda.device import DeviceEvent
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.cuda.half import bfloat16_bits, bfloat16_values
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime


def host_dtype(array: DeviceArray) -> np.dtype:
    """The dtype of the bits of an array on the host: uint16 for bfloat16."""
    return np.dtype("uint16" if array.dtype == "bfloat16" else array.dtype)


def host_values(array: DeviceArray, bits: np.ndarray) -> np.ndarray:
    """The numbers behind such bits: bfloat16 becomes float32, all else stays."""
    return bfloat16_values(bits) if array.dtype == "bfloat16" else bits


class PinnedBuffer:
    """Pinned memory with the event behind the latest copy from or to it."""

    def __init__(self, runtime: CudaRuntime, size_bytes: int) -> None:
        self._runtime = runtime
        self._memory = runtime.device.pinned(size_bytes)
        self.event: DeviceEvent = runtime.device.event()

    def bits(self, array: DeviceArray) -> np.ndarray:
        """A flat view of the memory's beginning that holds the bits of `array`."""
        bits: np.ndarray = self._memory[: array.nbytes].view(host_dtype(array))
        return bits

    def upload(self, target: DeviceArray, source: np.ndarray) -> None:
        """Enqueue target := source, flat arrays, rounded to the target's dtype; waits only for this memory's own latest copy."""
        self.event.synchronize()
        bits = self.bits(target)
        np.copyto(bits, bfloat16_bits(source) if target.dtype == "bfloat16" else source, casting="same_kind")
        self._runtime.device.upload(self._runtime.stream, target, bits)
        self._runtime.stream.record(self.event)

    def download(self, source: DeviceArray) -> None:
        """Enqueue a copy of a flat array to `bits`, which is there after the event."""
        self._runtime.device.download(self._runtime.stream, self.bits(source), source)
        self._runtime.stream.record(self.event)


class Staging:
    """So many pinned buffers in turn. An array that is larger than one is copied piece by piece.

    Args:
        size_bytes: of one buffer, at least one element's. count: of buffers: so many copies may be on their way before the host
            waits. most: how many there may become, by what is reserved; `count` unless it is given.
    """

    def __init__(self, runtime: CudaRuntime, size_bytes: int, count: int, most: int = 0) -> None:
        self._runtime, self._size_bytes, self._most = runtime, size_bytes, most
        self._buffers = deque(PinnedBuffer(runtime, size_bytes) for _ in range(count))

    def reserve(self, size_bytes: int) -> None:
        """Make as many buffers as may be for so many bytes, so that all of them can be on their way while the host goes on."""
        while len(self._buffers) < min(self._most, -(-size_bytes // self._size_bytes)):
            self._buffers.append(PinnedBuffer(self._runtime, self._size_bytes))

    def upload(self, target: DeviceArray, source: np.ndarray) -> None:
        """Enqueue target := source, of one size, rounded to the target's dtype. The source may change afterwards."""
        values, places = np.ascontiguousarray(source).reshape(-1), target.reshape(-1)
        for low, high in self._pieces(target):
            self._next().upload(places[low:high], values[low:high])

    def download(self, source: DeviceArray) -> np.ndarray:
        """The elements in a new array of the host, bfloat16 as float32. Waits for the stream."""
        bits, places = np.empty(source.size, host_dtype(source)), source.reshape(-1)
        waiting: deque[tuple[PinnedBuffer, int, int]] = deque()
        for low, high in self._pieces(source):
            if len(waiting) == len(self._buffers):
                self._take(bits, places, *waiting.popleft())
            buffer = self._next()
            buffer.download(places[low:high])
            waiting.append((buffer, low, high))
        for piece in waiting:
            self._take(bits, places, *piece)
        return host_values(source, bits).reshape(source.shape)

    def _take(self, bits: np.ndarray, places: DeviceArray, buffer: PinnedBuffer, low: int, high: int) -> None:
        buffer.event.synchronize()
        bits[low:high] = buffer.bits(places[low:high])

    def _pieces(self, array: DeviceArray) -> list[tuple[int, int]]:
        step = self._size_bytes // array.itemsize
        return [(low, min(low + step, array.size)) for low in range(0, array.size, step)]

    def _next(self) -> PinnedBuffer:
        self._buffers.rotate(-1)
        return self._buffers[-1]
