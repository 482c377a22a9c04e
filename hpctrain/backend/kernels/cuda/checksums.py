"""Checksums of many arrays of a device, and a guard of them by sums: two launches for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from hpctrain.backend.cuda.device import grid_for
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.kernels.cuda.fetch import CudaFetch, FetchBuffers
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime
from hpctrain.backend.cuda.runtime import Staging

#: words that a block sums in one go: `TILE` of tables.cuh
TILE = 8192

_THREADS = 256
_POLYNOMIAL, _ONE = 0xEDB88320, 0x80000000  # of checksums.cu


class WordSums:
    """Sums over the 32-bit words of each of some flat arrays, at least one; they are kept by the caller.

    Args:
        kind: "remainders" of CRC-32 without its inversions, or sums of "words". staging: the table of arrays goes through it to
            the device, once.
    """

    def __init__(self, runtime: CudaRuntime, arrays: Sequence[DeviceArray], kind: str, staging: Staging) -> None:
        assert all(array.nbytes % 4 == array.pointer % 4 == 0 for array in arrays), "arrays are summed by words of 4 bytes"
        self._runtime, self._kind, self.count = runtime, kind, len(arrays)
        sizes = [array.nbytes // 4 for array in arrays]
        firsts = list(accumulate((-(-size // TILE) for size in sizes), initial=0))
        self._tiles = firsts[-1]
        rows = [(array.pointer, size, first) for array, size, first in zip(arrays, sizes, firsts, strict=False)]
        self._table = runtime.device.allocate(3 * (self.count + 1) * 8).view("int64")
        staging.upload(self._table, np.array([*rows, (0, 0, self._tiles)], np.int64))
        self._partial = self.memory(self._tiles)

    def memory(self, count: int) -> DeviceArray:
        """Memory for so many sums, uint32."""
        return self._runtime.device.allocate(4 * count).view("uint32")

    def sum_into(self, sums: DeviceArray) -> None:
        """Enqueue the sums, of as many words as there are arrays."""
        grid = grid_for(self._tiles, 1, self._runtime.device.multiprocessors)
        arguments = (self._table, np.int32(self.count), self._partial, np.int64(self._tiles))
        self._runtime.launch("checksums", f"sum_{self._kind}", grid, (_THREADS,), *arguments)
        self._runtime.launch("checksums", f"join_{self._kind}", (self.count,), (_THREADS,), self._table, self._partial, sums)


class CudaChecksums:
    """Implements `ArrayChecksums`. Keeps the arrays.

    Args:
        of_zeros: for each array, the checksum of the same number of zero bytes, if `kind` omits that term.
    """

    def __init__(
        self, runtime: CudaRuntime, arrays: Sequence[DeviceArray], staging: Staging, kind: str, of_zeros: Sequence[int] = (0,)
    ) -> None:
        self._arrays, self._words = tuple(arrays), WordSums(runtime, arrays, kind, staging)
        self._sums = self._words.memory(self._words.count)
        self._fetches = FetchBuffers(runtime, self._sums.nbytes)
        self._of_zeros = np.array(of_zeros, np.uint32)

    def fetch(self) -> CudaFetch:
        self._words.sum_into(self._sums)
        return self._fetches.fetch(self._sums, lambda sums: sums ^ self._of_zeros)


class CudaGuard:
    """Implements `ArrayGuard`. Keeps the arrays."""

    def __init__(self, runtime: CudaRuntime, arrays: Sequence[DeviceArray], staging: Staging) -> None:
        self._runtime, self._arrays = runtime, tuple(arrays)
        self._words = WordSums(runtime, arrays, "words", staging)
        self._sums, self._remembered = (self._words.memory(self._words.count) for _ in range(2))
        self._changed = runtime.device.allocate(self._words.count)
        self._fetches = FetchBuffers(runtime, self._words.count)

    def remember(self) -> None:
        self._words.sum_into(self._remembered)

    def compare(self) -> None:
        self._words.sum_into(self._sums)
        arguments = self._changed, self._sums, self._remembered
        self._runtime.launch_items("checksums", "mark_changed", self._words.count, *arguments)

    def fetch_changed(self) -> CudaFetch:
        return self._fetches.fetch(self._changed, lambda marks: marks != 0)


@dataclass(frozen=True)
class CudaWatchedArrays:
    """Implements `WatchedArrays`."""

    runtime: CudaRuntime
    arrays: tuple[DeviceArray, ...]
    staging: Staging

    def checksums(self) -> CudaChecksums:
        of_zeros = [checksum_of_zeros(array.nbytes) for array in self.arrays]
        return CudaChecksums(self.runtime, self.arrays, self.staging, "remainders", of_zeros)

    def sums(self) -> CudaChecksums:
        return CudaChecksums(self.runtime, self.arrays, self.staging, "words")

    def guard(self) -> CudaGuard:
        return CudaGuard(self.runtime, self.arrays, self.staging)


def checksum_of_zeros(size_bytes: int) -> int:
    """CRC-32 of so many zero bytes, without making them: what its inversions alone add to that of any bytes."""
    power, square, bits = _ONE, _ONE >> 1, 8 * size_bytes
    while bits:
        if bits & 1:
            power = _product(power, square)
        square, bits = _product(square, square), bits >> 1
    return _product(0xFFFFFFFF, power) ^ 0xFFFFFFFF


def _product(a: int, b: int) -> int:
    """The product of polynomials over GF(2), modulo that of CRC-32; bit 31 is the coefficient of x^0."""
    total = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            total ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return total
