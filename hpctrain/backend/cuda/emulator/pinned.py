"""Pinned memory of the emulated device: host memory that copies may use without waiting."""

from __future__ import annotations

import weakref

import numpy as np

_NOBODY_HAS_WRITTEN = 0xFF


class PinnedMemory:
    """All of it that a device has given out."""

    def __init__(self) -> None:
        self._ranges: dict[int, int] = {}  # begin -> end

    def allocate(self, size_bytes: int) -> np.ndarray:
        """uint8 (size_bytes,), not zeroed."""
        memory = np.full(size_bytes, _NOBODY_HAS_WRITTEN, np.uint8)
        begin = memory.ctypes.data
        self._ranges[begin] = begin + size_bytes
        weakref.finalize(memory, self._ranges.pop, begin, None).atexit = False
        return memory

    def require(self, array: np.ndarray) -> np.ndarray:
        """All bytes of an array, uint8, over the same memory.

        Raises:
            ValueError: it is not contiguous, or not in pinned memory.
        """
        if not array.flags.c_contiguous:
            raise ValueError(f"A copy takes contiguous memory; an array of shape {array.shape} has strides {array.strides}.")
        begin, end = array.ctypes.data, array.ctypes.data + array.nbytes
        if array.nbytes and not any(first <= begin and end <= last for first, last in list(self._ranges.items())):
            raise ValueError(f"A copy takes pinned memory; this array of shape {array.shape} is not in what `pinned` gave.")
        return array.reshape(-1).view(np.uint8)
