"""Memory for the CPU: aligned, and on huge pages where it is large."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from hpctrain.backend.alignment import ALIGNMENT_BYTES

_HUGE_PAGE_BYTES = 2 << 20


def allocate(size_bytes: int) -> np.ndarray:
    """A zeroed uint8 array; from 2 MiB on aligned to 2 MiB and offered to the kernel for huge pages, else aligned to 64 bytes.

    Zeroed pages are the operating system's: they take memory when they are first touched.
    """
    if size_bytes < _HUGE_PAGE_BYTES:
        return _aligned(np.zeros(size_bytes + ALIGNMENT_BYTES, np.uint8), size_bytes, ALIGNMENT_BYTES)
    room = mmap.mmap(-1, size_bytes + 2 * _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: ordinary ones do
            room.madvise(mmap.MADV_HUGEPAGE)
    return _aligned(np.frombuffer(room, np.uint8), size_bytes, _HUGE_PAGE_BYTES)


def _aligned(room: np.ndarray, size_bytes: int, alignment_bytes: int) -> np.ndarray:
    start = -room.ctypes.data % alignment_bytes
    return room[start : start + size_bytes]
