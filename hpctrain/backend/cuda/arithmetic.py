"""The arithmetic service of the cuda set: what `Arithmetic` says, enqueued on the stream of all computation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpctrain.backend.arithmetic import (
    Arithmetic,
    Array,
    Descent,
    Fetch,
    MomentDescent,
    MomentRule,
    WatchedArrays,
)
from hpctrain.backend.cuda.device import Argument, grid_for, pack_width
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.dtypes import item_bytes, parameter_dtype
from hpctrain.backend.kernels.cuda.box_copy import copy_box
from hpctrain.backend.kernels.cuda.checksums import CudaWatchedArrays
from hpctrain.backend.kernels.cuda.descent import CudaDescent, CudaMomentDescent
from hpctrain.backend.kernels.cuda.fetch import FetchBuffers
from hpctrain.backend.kernels.cuda.messages import CudaMessages
from hpctrain.backend.cuda.transports import CudaMirrors
from hpctrain.backend.kernels.cuda.pixel_sums import spread_pixels, sum_pixels
from hpctrain.backend.kernels.cuda.runtime import TAGS, CudaRuntime
from hpctrain.backend.cuda.runtime import Staging
from hpctrain.backend.kernels.cuda.sums import ArrayTable
from hpctrain.core.intervals import Box

#: pinned memory that copies of whole arrays go through: so many buffers of so many bytes. More are made for large arrays, so that
#: the host fills them with a batch while the device computes.
STAGING_COUNT, STAGING_MOST, STAGING_BYTES = 4, 64, 4 << 20

#: elements that a thread casts at once: 16 bytes of float32
_CAST_WIDTH = 4


class _Nothing:
    """Implements `Fetch`: answers about no arrays."""

    def result(self) -> np.ndarray:
        """Nothing, bool."""
        return np.zeros(0, np.bool_)


class _Tables:
    """Tables of arrays on the device, made at the first question about the same arrays and kept."""

    def __init__(self, runtime: CudaRuntime, staging: Staging) -> None:
        self._runtime, self._staging = runtime, staging
        self._tables: dict[tuple[object, ...], ArrayTable] = {}

    def of(self, arrays: Sequence[DeviceArray]) -> ArrayTable:
        """The table of some arrays."""
        key = tuple((array.pointer, array.size, array.dtype) for array in arrays)
        if key not in self._tables:
            self._tables[key] = ArrayTable(self._runtime, arrays, self._staging)
        return self._tables[key]


class _RoundedUploads:
    """By way of float32 on the device: a kernel rounds, which takes the host much longer than the copy."""

    def __init__(self, arithmetic: CudaArithmetic, staging: Staging) -> None:
        self._arithmetic, self._staging = arithmetic, staging
        self._unrounded: DeviceArray | None = None

    def upload(self, target: DeviceArray, source: np.ndarray) -> None:
        """target := source, both flat; the target is bfloat16."""
        if self._unrounded is None:
            self._unrounded = self._arithmetic.zeros(STAGING_BYTES // 4, "float32")
        step = self._unrounded.size
        for low in range(0, target.size, step):
            high = min(low + step, target.size)
            piece = self._unrounded[: high - low]
            self._staging.upload(piece, source[low:high])
            self._arithmetic.copy(target[low:high], piece)


class CudaArithmetic(Arithmetic):
    """Implements `Arithmetic` on one device. Waits in `to_host`, `square_sums` and `Fetch.result` alone.

    Tables of arrays, and pinned memory for what is fetched, are made at the first call for the same arrays and kept: later steps
    allocate nothing.

    Attributes:
        made_mirrors: those that `mirrors` gives, once they are made.
    """

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._staging = Staging(runtime, STAGING_BYTES, STAGING_COUNT, STAGING_MOST)
        self._rounded = _RoundedUploads(self, self._staging)
        self._fetches: dict[tuple[int, int], FetchBuffers] = {}
        self._tables = _Tables(runtime, self._staging)
        self.made_mirrors: CudaMirrors | None = None
        self._messages: CudaMessages | None = None

    def mirrors(self) -> CudaMirrors:
        """Made at the first call: a rank that is alone has none, and no streams for them."""
        if self.made_mirrors is None:
            self.made_mirrors = CudaMirrors(self._runtime)
        return self.made_mirrors

    def messages(self) -> CudaMessages:
        """Made at the first call."""
        if self._messages is None:
            self._messages = CudaMessages(self._runtime)
        return self._messages

    def zeros(self, size: int, dtype: str) -> DeviceArray:
        return self._runtime.device.allocate(size * item_bytes(dtype)).view(dtype)

    def copy(self, target: Array, source: Array) -> None:
        _check_sizes(target, source)
        if target.dtype == source.dtype:
            if target.size:
                self._runtime.device.copy(self._runtime.stream, target, source)
            return
        aligned = all(array.pointer % (_CAST_WIDTH * array.itemsize) == 0 for array in (target, source))
        width = _CAST_WIDTH if aligned else 1
        _launch_flat(self._runtime, f"cast_{TAGS[source.dtype]}_{TAGS[target.dtype]}", width, target, source)

    def fill(self, target: Array, value: float) -> None:
        _launch_flat(
            self._runtime,
            f"fill_{TAGS[target.dtype]}",
            pack_width(target.itemsize, 0, (target,)),
            target,
            _scalar(target, value),
        )

    def add(self, target: Array, source: Array) -> None:
        _add(self._runtime, target, source, 1.0)

    def subtract(self, target: Array, source: Array) -> None:
        _add(self._runtime, target, source, -1.0)

    def average_into(self, target: Array, source: Array, kept: float) -> None:
        _check_sizes(target, source)
        width = pack_width(target.itemsize, 0, (target, source))
        _launch_flat(self._runtime, f"average_{TAGS[target.dtype]}", width, target, source, _scalar(target, kept))

    def copy_box(
        self, target: DeviceArray, target_box: Box, source: DeviceArray, source_box: Box, *, accumulate: bool = False
    ) -> None:
        """target[target_box] := source[source_box], or += with `accumulate`; see `box_copy`."""
        copy_box(self._runtime, target, target_box, source, source_box, accumulate=accumulate)

    def sum_pixels(self, target: Array, source: Array, scale: float) -> None:
        sum_pixels(self._runtime, target, source, scale)

    def spread_pixels(self, target: Array, source: Array, scale: float) -> None:
        spread_pixels(self._runtime, target, source, scale)

    def square_sums(self, arrays: Sequence[Array]) -> np.ndarray:
        return self._tables.of(arrays).square_sums().result().copy() if arrays else np.zeros(0)

    def fetch_finite(self, arrays: Sequence[Array]) -> Fetch:
        return self._tables.of(arrays).finite(arrays) if arrays else _Nothing()

    def watched(self, arrays: Sequence[Array]) -> WatchedArrays:
        return CudaWatchedArrays(self._runtime, tuple(arrays), self._staging)

    def fetch(self, array: Array) -> Fetch:
        place = array.pointer, array.nbytes
        if place not in self._fetches:
            self._fetches[place] = FetchBuffers(self._runtime, array.nbytes)
        return self._fetches[place].fetch(array)

    def to_host(self, array: Array) -> np.ndarray:
        values = self._staging.download(array)
        values.flags.writeable = False
        return values

    def from_host(self, target: Array, source: np.ndarray) -> None:
        _check_sizes(target, source)
        rounded = target.dtype == "bfloat16"
        self._staging.reserve(4 * target.size if rounded else target.nbytes)
        if rounded:
            self._rounded.upload(target.reshape(-1), np.ascontiguousarray(source).reshape(-1))
        else:
            self._staging.upload(target, source)

    def descent(
        self, data: Array, gradient: Array, momentum: Array, *, factor: float, nesterov: bool, shadow: Array | None = None
    ) -> Descent:
        state = momentum if factor else None
        return CudaDescent(self._runtime, data, gradient, state, shadow, factor=factor, nesterov=nesterov)

    def moment_descent(
        self, data: Array, gradient: Array, first: Array, second: Array, rule: MomentRule, *, shadow: Array | None = None
    ) -> MomentDescent:
        return CudaMomentDescent(self._runtime, data, gradient, first, second, shadow, rule)


def _add(runtime: CudaRuntime, target: DeviceArray, source: DeviceArray, sign: float) -> None:
    _check_sizes(target, source)
    assert target.dtype == source.dtype, f"{source!r} is not added to {target!r}"
    width = pack_width(target.itemsize, 0, (target, source))
    _launch_flat(runtime, f"add_{TAGS[target.dtype]}", width, target, source, _scalar(target, sign))


def _launch_flat(runtime: CudaRuntime, kernel: str, width: int, target: DeviceArray, *arguments: Argument) -> None:
    """Enqueue a kernel of copies.cu over the elements of flat arrays, `width` of them at once where there are so many."""
    grid = grid_for(-(-target.size // width), runtime.threads, runtime.device.multiprocessors)
    runtime.launch("copies", f"{kernel}_w{width}", grid, (runtime.threads,), target, *arguments, np.int64(target.size))


def _check_sizes(target: DeviceArray, source: Array) -> None:
    assert target.size == source.size, f"{source.size} elements do not fit {target!r}"


def _scalar(array: DeviceArray, value: float) -> np.generic:
    """A kernel's argument that elements of `array` are computed with."""
    scalar: np.generic = np.dtype(parameter_dtype(array.dtype)).type(value)
    return scalar
