"""Memory of the NumPy kernel set: page-aligned buffers, and their division into arrays."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable

import numpy as np

from hpctrain.backend.alignment import aligned

_HUGE_PAGE = 2 << 20

Shape = tuple[int, ...]
Request = tuple[Shape, str]  # shape, dtype


def allocate(size_bytes: int) -> np.ndarray:
    """A zeroed uint8 array on pages of its own, on huge pages where the system has them; freed with the array."""
    if size_bytes == 0:
        return np.zeros(0, np.uint8)
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size_bytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


def _aligned_bytes(request: Request) -> int:
    shape, dtype = request
    return aligned(math.prod(shape) * np.dtype(dtype).itemsize)


def total_bytes(requests: Iterable[Request]) -> int:
    """Bytes of a buffer that `carve` divides into these arrays."""
    return sum(_aligned_bytes(request) for request in requests)


def carve(buffer: np.ndarray | None, requests: Iterable[Request]) -> list[np.ndarray]:
    """Arrays of these shapes and dtypes, one after another in `buffer` (uint8), each aligned to 64 bytes."""
    if buffer is None:
        buffer = np.empty(0, np.uint8)
    arrays = []
    start = 0
    for shape, dtype in requests:
        stop = start + math.prod(shape) * np.dtype(dtype).itemsize
        arrays.append(buffer[start:stop].view(dtype).reshape(shape))
        start += _aligned_bytes((shape, dtype))
    return arrays
