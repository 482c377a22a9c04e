"""Shared services of the operators of one set: the device, launches, copies to and from the host, and the step's numbers.

Copies between the host and the device go through pinned buffers, used in turn (`Staging`). Values for the host are fetched while
the device computes (`FetchBuffers`). A captured graph repeats the arguments of its launches, so numbers that change from step to
step are read from fixed addresses: those of the step block, in the device's memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hpctrain.backend.counter_random import key
from hpctrain.backend.cuda.device import (
    Argument,
    Device,
    DeviceArray,
    DeviceEvent,
    DeviceStream,
    Extent,
    Precision,
    bfloat16_bits,
    bfloat16_values,
    grid_for,
)
from hpctrain.backend.operators import StepContext
from hpctrain.backend.specs import parameter_dtype

#: tags of dtypes in the names of kernels
TAGS = {"float64": "f64", "float32": "f32", "bfloat16": "bf16"}
#: number of threads of a block that strides over items
THREADS = 256


@dataclass(frozen=True)
class CudaRuntime:
    """Settings that all operators of a device share.

    Attributes:
        precision: precision of products in convolutions and linear layers.
        threads: number of threads of a block that strides over items.
        graphs: whether programs are captured as CUDA graphs.
    """

    device: Device
    stream: DeviceStream  # stream of all computation
    precision: Precision = "float32"
    threads: int = field(default=THREADS)
    graphs: bool = True

    @property
    def dtype(self) -> str:
        """Dtype of activations."""
        return "float32" if self.precision == "tf32" else self.precision

    @property
    def parameter_dtype(self) -> str:
        """Dtype of parameters, gradients and statistics."""
        return parameter_dtype(self.dtype)

    def launch(self, source: str, kernel: str, grid: Extent, block: Extent, *arguments: Argument) -> None:
        """Enqueue a kernel of <source>.cu; do nothing if the grid is empty."""
        if 0 not in grid:
            self.device.kernel(source, kernel)(self.stream, grid, block, *arguments)

    def launch_items(self, source: str, kernel: str, items: int, *arguments: Argument) -> None:
        """Enqueue a kernel that strides over a number of items. The number (int64) is the kernel's last argument."""
        grid = grid_for(items, self.threads, self.device.multiprocessors)
        self.launch(source, kernel, grid, (self.threads,), *arguments, np.int64(items))

    def multiply(
        self,
        a: DeviceArray,
        b: DeviceArray,
        c: DeviceArray,
        *,
        transpose_a: bool = False,
        transpose_b: bool = False,
        accumulate: bool = False,
    ) -> None:
        """Enqueue `Device.gemm` in the runtime's precision: c := op(a) op(b), plus c if `accumulate`."""
        options = {"transpose_a": transpose_a, "transpose_b": transpose_b, "accumulate": accumulate}
        self.device.gemm(self.stream, a, b, c, **options, precision=self.precision)


def host_dtype(array: DeviceArray) -> np.dtype:
    """Return the dtype of an array's bits on the host: uint16 for bfloat16."""
    return np.dtype("uint16" if array.dtype == "bfloat16" else array.dtype)


def host_values(array: DeviceArray, bits: np.ndarray) -> np.ndarray:
    """Return the values of an array's bits: bfloat16 is converted to float32, other dtypes are unchanged."""
    return bfloat16_values(bits) if array.dtype == "bfloat16" else bits


class PinnedBuffer:
    """Pinned memory, with an event after the latest copy from or to it."""

    def __init__(self, runtime: CudaRuntime, size_bytes: int) -> None:
        self._runtime = runtime
        self._memory = runtime.device.pinned(size_bytes)
        self.event: DeviceEvent = runtime.device.event()

    def bits(self, array: DeviceArray) -> np.ndarray:
        """Return a flat view of the start of the memory for the bits of `array`."""
        bits: np.ndarray = self._memory[: array.nbytes].view(host_dtype(array))
        return bits

    def upload(self, target: DeviceArray, source: np.ndarray) -> None:
        """Wait for this memory's latest copy, and enqueue target := source, flat arrays, rounded to the target's dtype."""
        self.event.synchronize()
        bits = self.bits(target)
        np.copyto(bits, bfloat16_bits(source) if target.dtype == "bfloat16" else source, casting="same_kind")
        self._runtime.device.upload(self._runtime.stream, target, bits)
        self._runtime.stream.record(self.event)

    def download(self, source: DeviceArray) -> None:
        """Enqueue a copy of a flat array to `bits`, which is complete when the event is done."""
        self._runtime.device.download(self._runtime.stream, self.bits(source), source)
        self._runtime.stream.record(self.event)


class Staging:
    """Pinned buffers that are used in turn. An array larger than a buffer is copied in pieces.

    Args:
        count: number of buffers. The host waits only if more copies are pending.
        most: maximum number of buffers after `reserve`; default: `count`.
    """

    def __init__(self, runtime: CudaRuntime, size_bytes: int, count: int, most: int = 0) -> None:
        self._runtime, self._size_bytes, self._most = runtime, size_bytes, most
        self._buffers = deque(PinnedBuffer(runtime, size_bytes) for _ in range(count))

    def reserve(self, size_bytes: int) -> None:
        """Add buffers, up to the maximum, so that a copy of `size_bytes` does not wait."""
        while len(self._buffers) < min(self._most, -(-size_bytes // self._size_bytes)):
            self._buffers.append(PinnedBuffer(self._runtime, self._size_bytes))

    def upload(self, target: DeviceArray, source: np.ndarray) -> None:
        """Enqueue target := source, arrays of one size, rounded to the target's dtype. The source may change afterwards."""
        values, places = np.ascontiguousarray(source).reshape(-1), target.reshape(-1)
        for low, high in self._pieces(target):
            self._next().upload(places[low:high], values[low:high])

    def download(self, source: DeviceArray) -> np.ndarray:
        """Wait for the stream, and return the elements in a new NumPy array, bfloat16 as float32."""
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


#: function that computes the result of a fetch from the copied elements
Reading = Callable[[np.ndarray], np.ndarray]


class CudaFetch:
    """Implementation of `Fetch` for an enqueued copy to pinned memory.

    Args:
        buffer: buffer to which the elements of `source` are copied.
        reading: function that computes the result from the elements.
        keep_alive: arrays that the work before the copy reads by address. The fetch keeps their memory alive.
    """

    def __init__(
        self, buffer: PinnedBuffer, source: DeviceArray, reading: Reading, keep_alive: Sequence[DeviceArray] = ()
    ) -> None:
        self._buffer, self._source, self._reading, self._keep_alive = buffer, source, reading, tuple(keep_alive)

    def result(self) -> np.ndarray:
        """Wait for the copy, and return `reading` of the elements in the source's shape (bfloat16 as float32), read only."""
        self._buffer.event.synchronize()
        values = host_values(self._source, self._buffer.bits(self._source))
        values = self._reading(values.reshape(self._source.shape))
        values.flags.writeable = False
        return values


class FetchBuffers:
    """Two pinned buffers, used in turn for fetches of one array. A result is valid until the second subsequent fetch begins."""

    def __init__(self, runtime: CudaRuntime, size_bytes: int) -> None:
        self._first, self._second = (PinnedBuffer(runtime, size_bytes) for _ in range(2))

    def fetch(self, source: DeviceArray, reading: Reading = np.asarray, keep_alive: Sequence[DeviceArray] = ()) -> CudaFetch:
        """Enqueue the copy of an array, at most as large as a buffer. `reading` and `keep_alive`: see `CudaFetch`."""
        self._first, self._second = self._second, self._first
        self._first.download(source.reshape(-1))
        return CudaFetch(self._first, source, reading, keep_alive)


#: number of keys, and minimum number of sample ids, for which an area has memory
KEYS, LEAST_IDS = 64, 1024

_HEADER = 1  # number of words before the keys: whether the step is training
_UPLOADS = 4  # number of pending uploads of an area for which the host does not wait


@dataclass(frozen=True)
class StepPlaces:
    """Addresses of the numbers that one operator reads in each step, fixed for the life of the kernel set.

    Attributes:
        training: int64 (1,), nonzero in training.
        key: two 32-bit words in an int64 (1,).
        ids: int64, sample ids of the step.
    """

    training: DeviceArray
    key: DeviceArray
    ids: DeviceArray


class _Area:
    """Memory for `KEYS` keys and a number of sample ids, with a fixed address and size."""

    def __init__(self, runtime: CudaRuntime, ids: int) -> None:
        words = _HEADER + KEYS + ids
        self._memory = runtime.device.allocate(8 * words).view("int64")
        self._words = np.zeros(words, np.int64)
        self._staging = Staging(runtime, self._words.nbytes, _UPLOADS)
        self.streams: dict[tuple[int, str], int] = {}
        self.ids = ids

    def places(self, stream: tuple[int, str]) -> StepPlaces:
        number = _HEADER + self.streams.setdefault(stream, len(self.streams))
        return StepPlaces(self._memory[:_HEADER], self._memory[number : number + 1], self._memory[_HEADER + KEYS :])

    def begin(self, context: StepContext) -> None:
        words, count = self._words, min(self.ids, context.sample_ids.size)
        words[0] = context.training
        for (seed, layer), number in self.streams.items():
            words[_HEADER + number : _HEADER + number + 1].view(np.uint32)[:] = key("dropout", seed, context.step, layer)
        stop = _HEADER + KEYS + count
        words[_HEADER + KEYS : stop] = context.sample_ids[:count]
        self._staging.upload(self._memory[:stop], words[:stop])


class StepBlock:
    """The step's numbers for all operators of a set: whether it is training, the keys of random streams, and sample ids.

    Operators register when they are made. `begin` uploads once for each area of memory. Another area is added only if the
    existing ones are full when an operator registers.
    """

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._areas: list[_Area] = []

    def register(self, seed: int, layer: str, ids: int) -> StepPlaces:
        """Return the addresses for the dropout stream of (seed, layer) and for the first `ids` sample ids of each step."""
        stream = seed, layer
        for area in self._areas:
            if ids <= area.ids and (stream in area.streams or len(area.streams) < KEYS):
                return area.places(stream)
        self._areas.append(_Area(self._runtime, max(ids, LEAST_IDS)))
        return self._areas[-1].places(stream)

    def begin(self, context: StepContext) -> None:
        """Enqueue the upload of a step's numbers. Work enqueued earlier reads the previous step's numbers."""
        for area in self._areas:
            area.begin(context)
