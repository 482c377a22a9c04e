"""Pinned memory of the emulated device: host memory that copies may use without waiting."""

from __future__ import annotations

import weakref
from bisect import bisect_right, insort

import numpy as np

_NOBODY_HAS_WRITTEN = 0xFF


class PinnedMemory:
    """All of it that a device has given out."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}  # begin -> end
        self._begins: list[int] = []  # sorted

    def allocate(self, size_bytes: int) -> np.ndarray:
        """uint8 (size_bytes,), not zeroed."""
        memory = np.full(size_bytes, _NOBODY_HAS_WRITTEN, np.uint8)
        begin = memory.ctypes.data
        self._ends[begin] = begin + size_bytes
        insort(self._begins, begin)
        weakref.finalize(memory, self._forget, begin).atexit = False
        return memory

    def _forget(self, begin: int) -> None:
        self._begins.remove(begin)
        del self._ends[begin]

    def require(self, array: np.ndarray) -> np.ndarray:
        """All bytes of an array, uint8, over the same memory.

        Raises:
            ValueError: it is not contiguous, or not in pinned memory.
        """
        if not array.flags.c_contiguous:
            raise ValueError(f"A copy takes contiguous memory; an array of shape {array.shape} has strides {array.strides}.")
        begin, begins = array.ctypes.data, self._begins.copy()  # others allocate meanwhile
        place = bisect_right(begins, begin)
        end = self._ends.get(begins[place - 1], 0) if place else 0
        if array.nbytes and begin + array.nbytes > end:
            raise ValueError(f"A copy takes pinned memory; this array of shape {array.shape} is not in what `pinned` gave.")
        return array.reshape(-1).view(np.uint8)
