"""A new HDF5 file of which HDF5 itself writes no byte to the disk: its structures stay in memory, arrays are written beside it.

So its library, whose lock everything that reads HDF5 shares, never waits for a disk, and never learns that one is full.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.storage.hdf5_target import Hdf5Target

#: bytes that one call writes, right after their checksum was taken
_BLOCK = 1 << 22


class StoreFile(Hdf5Target):
    """The file, as HDF5 sees it. `place` brings arrays to the disk, and `finish` what HDF5 has written.

    Args:
        keep: arrays that lie in a file of this name already stay where they are, if HDF5 puts nothing else there.
    """

    def __init__(self, path: Path, *, keep: bool = False) -> None:
        super().__init__(path, keep=keep)
        self._written: list[tuple[int, bytes]] = []
        self._size = 0

    def readinto(self, buffer: Any) -> int:
        """The bytes that HDF5 has written there; zeros elsewhere."""
        view = memoryview(buffer).cast("B")
        view[:] = bytes(len(view))
        for offset, data in self._written:
            start, stop = max(offset, self._at), min(offset + len(data), self._at + len(view))
            if start < stop:
                view[start - self._at : stop - self._at] = data[start - offset : stop - offset]
        self._at += len(view)
        return len(view)

    def write(self, buffer: Any) -> int:
        data = bytes(memoryview(buffer).cast("B"))
        self._written.append((self._at, data))
        self._at += len(data)
        self._size = max(self._size, self._at)
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        self._size = self._at if size is None else size
        return self._size

    def place(self, offset: int, array: np.ndarray, seen: Callable[[memoryview], None]) -> None:
        """Write the elements of a C-contiguous array to a place that HDF5 has reserved for them.

        seen: is given all bytes, in order, a block at a time.

        Raises:
            OSError: they cannot be written.
        """
        view = array.reshape(-1).view(np.uint8).data
        for begin in range(0, len(view), _BLOCK):
            block = view[begin : begin + _BLOCK]
            seen(block)
            self._write_all(offset + begin, block)
        self._size = max(self._size, offset + len(view))

    def finish(self) -> None:
        """Write what HDF5 wrote, once it has let go of the file, and wait until all is on the disk.

        Raises:
            OSError: it cannot be written.
        """
        os.ftruncate(self._descriptor, self._size)
        for offset, data in self._written:
            self._write_all(offset, memoryview(data))
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Let go of the file; without `finish`, nothing can read it."""
        self._release()

    def _end(self) -> int:
        return self._size

    def _write_all(self, offset: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._descriptor, data[done:], offset + done)
