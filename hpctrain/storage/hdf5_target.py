"""The base of files that HDF5 writes through: a new file, and the place in it where HDF5 is."""

from __future__ import annotations

import io
import os
from pathlib import Path


class Hdf5Target(io.RawIOBase):
    """A new, empty file, open for reading and writing at any place. It replaces one of its name.

    A subclass says where the file ends (`_end`), and reads and writes at `_at`.

    Args:
        keep: leave the bytes in place that a file of this name has.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, *, keep: bool = False) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | (0 if keep else os.O_TRUNC), 0o666)
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_SET:
            offset += self._at if whence == os.SEEK_CUR else self._end()
        self._at = offset
        return self._at

    def tell(self) -> int:
        return self._at

    def _end(self) -> int:
        """The size of the file in bytes, as HDF5 sees it."""
        raise NotImplementedError

    def _release(self) -> bool:
        """Let go of the file without waiting for the disk; False where that was done before."""
        if self.closed:
            return False
        super().close()
        os.close(self._descriptor)
        return True
