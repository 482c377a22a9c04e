"""Base class of the NumPy operators, memory allocation, and division of tensors into blocks of rows that fit a cache.

A block of a channels-last tensor is a few rows of a matrix whose width is a multiple of C. Inner loops are then thousands of
elements long, even with few channels, and element-wise NumPy runs at the speed of the cache. Per-channel vectors are repeated to
the width of the matrix. Sums over the rows of tall matrices use the tensor's dtype within a block, and float64 over blocks.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import numpy as np

from hpctrain.backend.operators import Accumulating, PlainOperator
from hpctrain.backend.specs import Shape

_HUGE_PAGE = 2 << 20


def allocate(size_bytes: int) -> np.ndarray:
    """Return a zeroed uint8 array in its own memory mapping, on huge pages if available. The mapping is freed with the array."""
    if size_bytes == 0:
        return np.zeros(0, np.uint8)
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size_bytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


class NumpyOperator(Accumulating, PlainOperator):
    """Base of operators in the host's plain memory, whose `backward_input` adds to gradients on request."""

    saved: Sequence[np.ndarray]
    scratch: Sequence[np.ndarray]


# Minimum width at which broadcasting a vector over rows is as fast as flat arrays; narrower rows take twice as long (measured).
_WIDTH = 1 << 13
# Two such blocks of float32 fit an L2 cache of 0.5-1 MB. With smaller blocks, the cost of more calls exceeds the gain.
_BLOCK_ELEMENTS = 1 << 16


class RowBlocks:
    """Division of tensors of one shape (..., C), seen as matrices (M, C), into blocks of rows."""

    def __init__(self, shape: Shape) -> None:
        self.channels = shape[-1]
        self.rows = math.prod(shape[:-1])
        self.repeat = max(1, min(self.rows, _WIDTH // max(1, self.channels)))
        self.width = self.repeat * self.channels
        self.height = max(1, _BLOCK_ELEMENTS // max(1, self.width))

    @property
    def largest(self) -> int:
        """Number of elements in the largest block."""
        return min(self.height * self.width, self.rows * self.channels)

    def views(self, array: np.ndarray) -> list[np.ndarray]:
        """Return the blocks of `array` as 2-D views, in order. An incomplete last matrix row is a separate, shorter view."""
        flat = array.reshape(-1)
        whole = flat.size - flat.size % self.width if self.width else 0
        step = self.height * self.width
        views = [flat[low : min(low + step, whole)].reshape(-1, self.width) for low in range(0, whole, step)]
        if whole < flat.size:
            views.append(flat[whole:].reshape(1, -1))
        return views

    def tile(self, vector: np.ndarray, dtype: str) -> np.ndarray:
        """Return a per-channel vector (C,) repeated to the width of a full block; a narrower block uses its first elements."""
        return np.tile(vector.astype(dtype), self.repeat)

    def sums(self) -> np.ndarray:
        """Return a float64 accumulator of zeros, as wide as a block, for the column sums of blocks."""
        return np.zeros(self.width, np.float64)

    def fold(self, sums: np.ndarray) -> np.ndarray:
        """Reduce the column sums of blocks to sums per channel, float64 (C,)."""
        return np.asarray(sums.reshape(-1, self.channels).sum(axis=0, dtype=np.float64))


# The product with a vector of ones reads a block at the speed of the cache, three times as fast as np.add.reduce.
_BLOCK_ROWS = 1024


def column_sums(matrix: np.ndarray, out: np.ndarray) -> None:
    """Write the sums over the rows of `matrix` (M, C) to `out` (C,), of any float dtype; zeros if M is 0."""
    total = np.zeros(matrix.shape[1], np.float64)
    ones = np.ones(min(_BLOCK_ROWS, matrix.shape[0]), matrix.dtype)
    for start in range(0, matrix.shape[0], _BLOCK_ROWS):
        block = matrix[start : start + _BLOCK_ROWS]
        total += ones[: block.shape[0]] @ block
    out[...] = total
