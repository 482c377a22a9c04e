"""Sums of squares of many arrays of a device, and whether they are finite: one launch for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from hpctrain.backend.cuda.device import grid_for
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.kernels.cuda.fetch import CudaFetch, FetchBuffers
from hpctrain.backend.kernels.cuda.runtime import TAGS, CudaRuntime
from hpctrain.backend.cuda.runtime import Staging

#: elements that a block looks at in one go: `TILE` of sums.cu
TILE = 8192

_THREADS = 256


class ArrayTable:
    """Flat arrays of one dtype that are looked at together, at least one; their memory may hold other values each time.

    Args:
        staging: the table goes through it to the device, once.
    """

    def __init__(self, runtime: CudaRuntime, arrays: Sequence[DeviceArray], staging: Staging) -> None:
        assert len({array.dtype for array in arrays}) == 1, "arrays that are summed together have one dtype"
        self._runtime, self._count, self._tag = runtime, len(arrays), TAGS[arrays[0].dtype]
        firsts = list(accumulate((-(-array.size // TILE) for array in arrays), initial=0))
        self._tiles = firsts[-1]
        rows = [(array.pointer, array.size, first) for array, first in zip(arrays, firsts, strict=False)]
        self._table = self._memory(3 * (self._count + 1), 8, "int64")
        staging.upload(self._table, np.array([*rows, (0, 0, self._tiles)], np.int64))
        self._partial, self._sums = self._memory(self._tiles, 8, "float64"), self._memory(self._count, 8, "float64")
        self._flags, self._no_flags = (self._memory(self._count, 1, "uint8") for _ in range(2))
        self._fetch_sums, self._fetch_flags = FetchBuffers(runtime, 8 * self._count), FetchBuffers(runtime, self._count)

    def _memory(self, size: int, item_bytes: int, dtype: str) -> DeviceArray:
        return self._runtime.device.allocate(size * item_bytes).view(dtype)

    def square_sums(self) -> CudaFetch:
        """Enqueue the sums of squares: float64, one for each array, the same bits whatever else is in the table."""
        self._look("square_sums", self._partial)
        self._runtime.launch("sums", "finish_sums", (self._count,), (_THREADS,), self._table, self._partial, self._sums)
        return self._fetch_sums.fetch(self._sums)

    def finite(self, arrays: Sequence[DeviceArray] = ()) -> CudaFetch:
        """Enqueue the answers whether all elements of each array are finite: bool.

        Args:
            arrays: those of the table, where the caller may drop them before the answers are there.
        """
        self._runtime.device.copy(self._runtime.stream, self._flags, self._no_flags)
        self._look("find_not_finite", self._flags)
        return self._fetch_flags.fetch(self._flags, np.logical_not, arrays)

    def _look(self, kernel: str, out: DeviceArray) -> None:
        grid = grid_for(self._tiles, 1, self._runtime.device.multiprocessors)
        arguments = (self._table, np.int32(self._count), out, np.int64(self._tiles))
        self._runtime.launch("sums", f"{kernel}_{self._tag}", grid, (_THREADS,), *arguments)
