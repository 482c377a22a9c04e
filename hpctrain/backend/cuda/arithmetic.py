"""The arithmetic service of the cuda set: implements `Arithmetic` on the stream of all computation.

The module has three parts, in this order:

- tables of arrays: sums of squares, tests for finite elements, and sums of words of all arrays of a table in one or two launches;
- descents on flat memory: one launch for all runs of an update;
- the service: copies between boxes (to pack and unpack halos), sums over the pixels of images, and all other operations.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from hpctrain.backend.arithmetic import (
    Arithmetic,
    Array,
    Corrections,
    Descent,
    Fetch,
    MomentDescent,
    MomentRule,
    UpdateRun,
)
from hpctrain.backend.cuda.device import Argument, DeviceArray, grid_for, pack_width
from hpctrain.backend.cuda.runtime import TAGS, CudaFetch, CudaRuntime, FetchBuffers, Staging
from hpctrain.backend.cuda.transports import CudaMessages, CudaMirrors
from hpctrain.backend.host_arithmetic import HostFetch
from hpctrain.backend.specs import item_bytes, parameter_dtype
from hpctrain.core.intervals import Box, shape_of, size_of

#: number of items in a tile, which a block processes at a time: `TILE` of tables.cuh
TILE = 8192

_THREADS = 256
_DIMS = 4  # maximum number of dims of a copied box


class _TiledArrays:
    """Flat arrays, at least one, that one launch processes tile by tile.

    The kernel reads a table of the arrays in the device's memory. The arrays' values may change between launches. The caller
    keeps the arrays alive.

    Args:
        sizes: number of items of each array, which are elements or 32-bit words.
        staging: pinned buffers for the single upload of the table.
    """

    def __init__(self, runtime: CudaRuntime, arrays: Sequence[DeviceArray], sizes: Sequence[int], staging: Staging) -> None:
        self._runtime, self.count = runtime, len(arrays)
        firsts = list(accumulate((-(-size // TILE) for size in sizes), initial=0))
        self._tiles = firsts[-1]
        rows = [(array.pointer, size, first) for array, size, first in zip(arrays, sizes, firsts, strict=False)]
        self._table = self.memory(3 * (self.count + 1), "int64")
        staging.upload(self._table, np.array([*rows, (0, 0, self._tiles)], np.int64))

    def memory(self, size: int, dtype: str) -> DeviceArray:
        """Return a flat array of `size` zeros of `dtype` in the device's memory."""
        return self._runtime.device.allocate(size * item_bytes(dtype)).view(dtype)

    def _launch_tiles(self, source: str, kernel: str, out: DeviceArray) -> None:
        """Enqueue a kernel of <source>.cu over all tiles, which writes to `out`."""
        grid = grid_for(self._tiles, 1, self._runtime.device.multiprocessors)
        arguments = (self._table, np.int32(self.count), out, np.int64(self._tiles))
        self._runtime.launch(source, kernel, grid, (_THREADS,), *arguments)

    def _launch_arrays(self, source: str, kernel: str, partial: DeviceArray, out: DeviceArray) -> None:
        """Enqueue a kernel with one block per array, which combines the results of the array's tiles."""
        self._runtime.launch(source, kernel, (self.count,), (_THREADS,), self._table, partial, out)


class ArrayTable(_TiledArrays):
    """Sums of squares of arrays of one dtype, and tests for finite elements."""

    def __init__(self, runtime: CudaRuntime, arrays: Sequence[DeviceArray], staging: Staging) -> None:
        assert len({array.dtype for array in arrays}) == 1, "arrays that are summed together have one dtype"
        super().__init__(runtime, arrays, [array.size for array in arrays], staging)
        self._tag = TAGS[arrays[0].dtype]
        self._partial, self._sums = self.memory(self._tiles, "float64"), self.memory(self.count, "float64")
        self._flags, self._no_flags = (self.memory(self.count, "uint8") for _ in range(2))
        self._fetch_sums, self._fetch_flags = (FetchBuffers(runtime, array.nbytes) for array in (self._sums, self._flags))

    def square_sums(self) -> CudaFetch:
        """Enqueue and fetch the sum of squares of each array, float64. Its bits do not depend on the table's other arrays."""
        self._launch_tiles("sums", f"square_sums_{self._tag}", self._partial)
        self._launch_arrays("sums", "finish_sums", self._partial, self._sums)
        return self._fetch_sums.fetch(self._sums)

    def finite(self, arrays: Sequence[DeviceArray] = ()) -> CudaFetch:
        """Enqueue and fetch whether all elements of each array are finite, bool.

        Args:
            arrays: arrays of the table, which the fetch keeps alive; needed if the caller may drop them before it reads the
                result.
        """
        self._runtime.device.copy(self._runtime.stream, self._flags, self._no_flags)
        self._launch_tiles("sums", f"find_not_finite_{self._tag}", self._flags)
        return self._fetch_flags.fetch(self._flags, np.logical_not, arrays)


def _table(
    made: dict[tuple[object, ...], ArrayTable], runtime: CudaRuntime, staging: Staging, arrays: Sequence[DeviceArray]
) -> ArrayTable:
    """Return the table of these arrays from `made`. The first call for them creates it."""
    key = tuple((array.pointer, array.size, array.dtype) for array in arrays)
    if key not in made:
        made[key] = ArrayTable(runtime, arrays, staging)
    return made[key]


class CudaWordSums(_TiledArrays):
    """Implementation of `WordSums`, which keeps the arrays alive."""

    def __init__(self, runtime: CudaRuntime, arrays: Sequence[DeviceArray], staging: Staging) -> None:
        assert all(array.nbytes % 4 == array.pointer % 4 == 0 for array in arrays), "arrays are summed by words of 4 bytes"
        super().__init__(runtime, arrays, [array.nbytes // 4 for array in arrays], staging)
        self._arrays, self._partial = tuple(arrays), self.memory(self._tiles, "uint32")
        self._sums, self._remembered = (self.memory(self.count, "uint32") for _ in range(2))
        self._changed = runtime.device.allocate(self.count)
        self._fetches, self._fetches_changed = FetchBuffers(runtime, self._sums.nbytes), FetchBuffers(runtime, self.count)

    def fetch(self) -> CudaFetch:
        self._sum_into(self._sums)
        return self._fetches.fetch(self._sums)

    def remember(self) -> None:
        self._sum_into(self._remembered)

    def compare(self) -> None:
        self._sum_into(self._sums)
        self._runtime.launch_items("word_sums", "mark_changed", self.count, self._changed, self._sums, self._remembered)

    def fetch_changed(self) -> CudaFetch:
        return self._fetches_changed.fetch(self._changed, lambda marks: marks != 0)

    def _sum_into(self, sums: DeviceArray) -> None:
        self._launch_tiles("word_sums", "sum_words", self._partial)
        self._launch_arrays("word_sums", "join_words", self._partial, sums)


#: number of elements that a block and a thread process at a time: `TILE` and `W` of runs.cuh
DESCENT_TILE, PACK = 4096, 4


class RunTable:
    """The runs of one update in the device's memory, uploaded if they differ from the previous update's.

    Args:
        item: dtype of scales and decays.
        capacity: maximum number of runs.
    """

    def __init__(self, runtime: CudaRuntime, item: str, capacity: int) -> None:
        places = [(name, np.int64) for name in ("start", "stop", "offset", "first_tile")]
        self._row = np.dtype([*places, ("gradient_scale", item), ("decay", item)])
        self.capacity, self.tiles = capacity, 0
        self.memory = runtime.device.allocate(capacity * self._row.itemsize)
        self._staging = Staging(runtime, capacity * self._row.itemsize, count=2)
        self._runs: Sequence[UpdateRun] = ()

    def set(self, runs: Sequence[UpdateRun]) -> None:
        """Set the table's runs. No run may be empty."""
        if runs == self._runs:
            return
        self._runs = runs
        firsts = list(accumulate((-(-(run.stop - run.start // PACK * PACK) // DESCENT_TILE) for run in runs), initial=0))
        self.tiles = firsts[-1]
        rows = [
            (run.start, run.stop, run.offset, first, run.gradient_scale, run.decay)
            for run, first in zip(runs, firsts, strict=False)
        ]
        raw = np.array(rows, self._row).view(np.uint8)
        self._staging.upload(self.memory[: raw.size], raw)


class RunTables:
    """Tables of runs, one for each part of the buffers that is updated separately, and the launches over them.

    Args:
        buffers: flat arrays that the kernel reads or writes; None for missing ones.
    """

    def __init__(self, runtime: CudaRuntime, dtype: str, buffers: Sequence[DeviceArray | None]) -> None:
        self._runtime, self.buffers = runtime, buffers
        self.scalar = np.dtype(dtype).type
        arrays = [array for array in buffers if array is not None]
        self._aligned = np.int32(all(array.pointer % (PACK * array.itemsize) == 0 for array in arrays))
        self._tables: dict[tuple[int, int], list[RunTable]] = {}

    def launch(self, source: str, kernel: str, runs: Iterable[UpdateRun], *scalars: np.generic) -> None:
        """Enqueue a kernel over the elements of `runs`. `scalars` are its arguments after the runs."""
        wanted = tuple(run for run in runs if run.start < run.stop)
        if not wanted:
            return
        table = self._table(wanted)
        table.set(wanted)
        grid = grid_for(table.tiles, 1, self._runtime.device.multiprocessors)
        last = (*scalars, self._aligned, np.int64(table.tiles))
        kernel = f"{kernel}_{TAGS[np.dtype(self.scalar).name]}"
        self._runtime.launch(source, kernel, grid, (_THREADS,), *self.buffers, table.memory, np.int32(len(wanted)), *last)

    def _table(self, runs: Sequence[UpdateRun]) -> RunTable:
        """Return the table for the part of the buffers from the first to the last run.

        A step updates a part once. If a table is too small, a larger one is added, since kernels may still read the small one.
        """
        tables = self._tables.setdefault((runs[0].start, runs[-1].stop), [])
        if not tables or tables[-1].capacity < len(runs):
            capacity = 1 << (len(runs) - 1).bit_length()
            tables.append(RunTable(self._runtime, str(self.scalar.__name__), capacity))
        return tables[-1]


class CudaDescent:
    """Implementation of `Descent`, bit-equal to the host's.

    Args:
        gradient: flat gradient, of the size of `data`.
        momentum: flat state; None if there is none.
        shadow: bfloat16 copy of `data`; None if there is none.
    """

    def __init__(
        self,
        runtime: CudaRuntime,
        data: DeviceArray,
        gradient: DeviceArray,
        momentum: DeviceArray | None,
        shadow: DeviceArray | None,
        *,
        factor: float,
        nesterov: bool,
    ) -> None:
        self._tables = RunTables(runtime, data.dtype, (data, gradient, momentum, shadow))
        self._factor, self._nesterov = self._tables.scalar(factor), np.int32(nesterov)

    def update(self, runs: Iterable[UpdateRun], lr: float) -> None:
        self._tables.launch("descent", "descend", runs, self._tables.scalar(lr), self._factor, self._nesterov)


class CudaMomentDescent:
    """Implementation of `MomentDescent`, bit-equal to the host's. Arguments: see `Arithmetic.moment_descent`."""

    def __init__(
        self,
        runtime: CudaRuntime,
        data: DeviceArray,
        gradient: DeviceArray,
        first: DeviceArray,
        second: DeviceArray,
        shadow: DeviceArray | None,
        rule: MomentRule,
    ) -> None:
        self._tables = RunTables(runtime, data.dtype, (data, gradient, first, second, shadow))
        constants = (rule.beta1, 1.0 - rule.beta1, rule.beta2, 1.0 - rule.beta2, rule.epsilon)
        self._constants = [*(self._tables.scalar(constant) for constant in constants), np.int32(rule.decoupled)]

    def update(self, runs: Iterable[UpdateRun], corrections: Corrections, lr: float) -> None:
        self._launch(runs, corrections, lr, directs=False)

    def direct(self, runs: Iterable[UpdateRun], corrections: Corrections) -> None:
        self._launch(runs, corrections, 0.0, directs=True)

    def _launch(self, runs: Iterable[UpdateRun], corrections: Corrections, lr: float, *, directs: bool) -> None:
        scalar = self._tables.scalar
        scales = (scalar(corrections.first), scalar(corrections.root))
        self._tables.launch("moments", "moments", runs, scalar(lr), *self._constants, *scales, np.int32(directs))


#: pinned memory for copies of whole arrays: initial number of buffers, maximum number, and size of a buffer. Large arrays add
#: buffers, so that the host can copy a whole batch to them while the device computes.
STAGING_COUNT, STAGING_MOST, STAGING_BYTES = 4, 64, 4 << 20

#: number of elements that a thread casts at a time: 16 bytes of float32
_CAST_WIDTH = 4


class CudaArithmetic(Arithmetic):
    """Implementation of `Arithmetic` on one device.

    Tables of arrays, and pinned memory for fetches, are allocated at the first call for the same arrays and reused, so that later
    steps allocate nothing.

    Attributes:
        made_mirrors: result of `mirrors`; None before its first call.
    """

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._staging = Staging(runtime, STAGING_BYTES, STAGING_COUNT, STAGING_MOST)
        self._unrounded: DeviceArray | None = None
        self._fetches: dict[tuple[int, int], FetchBuffers] = {}
        self._table_of = functools.partial(_table, {}, runtime, self._staging)
        self.made_mirrors: CudaMirrors | None = None
        self._messages: CudaMessages | None = None

    def mirrors(self) -> CudaMirrors:
        """Return the mirrors, made at the first call. A single rank never calls it, and has neither mirrors nor their streams."""
        if self.made_mirrors is None:
            self.made_mirrors = CudaMirrors(self._runtime)
        return self.made_mirrors

    def messages(self) -> CudaMessages:
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
        width = pack_width(target.itemsize, 0, (target,))
        _launch_flat(self._runtime, f"fill_{TAGS[target.dtype]}", width, target, _scalar(target, value))

    def add(self, target: Array, source: Array) -> None:
        _add(self._runtime, target, source, 1.0)

    def subtract(self, target: Array, source: Array) -> None:
        _add(self._runtime, target, source, -1.0)

    def average_into(self, target: Array, source: Array, kept: float) -> None:
        _check_sizes(target, source)
        width = pack_width(target.itemsize, 0, (target, source))
        _launch_flat(self._runtime, f"average_{TAGS[target.dtype]}", width, target, source, _scalar(target, kept))

    def copy_box(self, target: Array, target_box: Box, source: Array, source_box: Box, *, accumulate: bool = False) -> None:
        shape = shape_of(target_box)
        assert target.dtype == source.dtype, f"{source!r} does not have the dtype of {target!r}"
        assert shape == shape_of(source_box), f"boxes {target_box} and {source_box} have different shapes"
        if not size_of(target_box):
            return
        (to, to_steps), (origin, origin_steps) = _corner(target, target_box), _corner(source, source_box)
        _, rows, columns, channels = (1,) * (_DIMS - len(shape)) + shape
        width = pack_width(target.itemsize, math.gcd(channels, *to_steps, *origin_steps), (to, origin))
        packs = channels // width
        steps = [np.int64(step) for step in (*to_steps, *origin_steps)]
        kernel = f"{'add' if accumulate else 'copy'}_box_{TAGS[target.dtype]}_w{width}"
        sizes = np.int32(rows), np.int32(columns), np.int32(packs)
        self._runtime.launch_items("copies", kernel, size_of(target_box) // width, to, origin, *steps, *sizes)

    def sum_pixels(self, target: Array, source: Array, scale: float) -> None:
        # A thread sums in the order of the pixels, so the bits do not depend on the launch.
        _launch_pixels(self._runtime, "sum_pixels", target, source, source, target, scale)

    def spread_pixels(self, target: Array, source: Array, scale: float) -> None:
        _launch_pixels(self._runtime, "spread_pixels", target, source, target, source, scale)

    def square_sums(self, arrays: Sequence[Array]) -> np.ndarray:
        return self._table_of(arrays).square_sums().result().copy() if arrays else np.zeros(0)

    def fetch_finite(self, arrays: Sequence[Array]) -> Fetch:
        return self._table_of(arrays).finite(arrays) if arrays else HostFetch(np.zeros(0, np.bool_))

    def word_sums(self, arrays: Sequence[Array]) -> CudaWordSums:
        return CudaWordSums(self._runtime, arrays, self._staging)

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
        if target.dtype != "bfloat16":
            self._staging.reserve(target.nbytes)
            self._staging.upload(target, source)
            return
        # Upload float32, and round it by a kernel: on the host, rounding takes much longer than the copy.
        self._staging.reserve(4 * target.size)
        if self._unrounded is None:
            self._unrounded = self.zeros(STAGING_BYTES // 4, "float32")
        places, values, step = target.reshape(-1), np.ascontiguousarray(source).reshape(-1), self._unrounded.size
        for low in range(0, target.size, step):
            high = min(low + step, target.size)
            piece = self._unrounded[: high - low]
            self._staging.upload(piece, values[low:high])
            self.copy(places[low:high], piece)

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
    """Enqueue a kernel of copies.cu over the elements of flat arrays, `width` elements at a time."""
    grid = grid_for(-(-target.size // width), runtime.threads, runtime.device.multiprocessors)
    runtime.launch("copies", f"{kernel}_w{width}", grid, (runtime.threads,), target, *arguments, np.int64(target.size))


def _launch_pixels(
    runtime: CudaRuntime,
    kernel: str,
    target: DeviceArray,
    source: DeviceArray,
    images: DeviceArray,
    means: DeviceArray,
    scale: float,
) -> None:
    """Enqueue a kernel of pixel_sums.cu over the packs of the target, between `images` (N, H, W, C) and `means` (N, 1, 1, C)."""
    n, height, width, channels = images.shape
    assert means.shape == (n, 1, 1, channels), f"{means!r} does not have one pixel for each of {images!r}"
    assert target.dtype == source.dtype, f"{source!r} does not have the dtype of {target!r}"
    wide = pack_width(target.itemsize, channels, (target, source))
    sizes = np.int64(height * width), np.int32(channels // wide)
    name = f"{kernel}_{TAGS[target.dtype]}_w{wide}"
    runtime.launch_items("pixel_sums", name, target.size // wide, target, source, _scalar(target, scale), *sizes)


def _corner(array: DeviceArray, box: Box) -> tuple[DeviceArray, tuple[int, ...]]:
    """Return the flat array from the box's first element on, and the strides of the three outer dims in elements."""
    assert all(start >= 0 and stop <= size for (start, stop), size in zip(box, array.shape, strict=True)), (
        f"{box} leaves {array!r}"
    )
    steps = [math.prod(array.shape[dim + 1 :]) for dim in range(array.ndim)]
    first = sum(start * step for (start, _), step in zip(box, steps, strict=True))
    outer = (0,) * (_DIMS - array.ndim) + tuple(steps[:-1])
    return array.reshape(-1)[first:], outer


def _check_sizes(target: DeviceArray, source: Array) -> None:
    assert target.size == source.size, f"{source.size} elements do not fit {target!r}"


def _scalar(array: DeviceArray, value: float) -> np.generic:
    """Return `value` as a kernel argument, in the dtype in which elements of `array` are computed."""
    scalar: np.generic = np.dtype(parameter_dtype(array.dtype)).type(value)
    return scalar
