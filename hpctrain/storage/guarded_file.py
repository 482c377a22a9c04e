"""A file for HDF5 to write through, so that a full disk is an error and not a crash."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any


class GuardedFile(io.RawIOBase):
    """A new file that HDF5 writes through. It takes every write; the first that the system refused is kept in `error`.

    HDF5 cannot give up a file whose disk is full: it tries to flush again at every later chance and ends in a segmentation
    fault. So it never learns of it, and the maker of the file asks for `error`.
    """

    def __init__(self, path: Path) -> None:
        self.error: OSError | None = None
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        self._place = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: os.fstat(self._descriptor).st_size}[whence]
        self._place = base + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view) and (count := os.preadv(self._descriptor, [view[done:]], self._place + done)):
            done += count
        self._place += done
        return done

    def write(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        done = 0
        try:
            while done < len(view) and self.error is None:
                done += os.pwrite(self._descriptor, view[done:], self._place + done)
        except OSError as error:
            self.error = error
        self._place += len(view)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        length = self._place if size is None else size
        try:
            os.ftruncate(self._descriptor, length)
        except OSError as error:
            self.error = self.error or error
        return length

    def close(self) -> None:
        """Bring the contents to the disk and let go of the file.

        Raises:
            OSError: the first error of all, this one's included.
        """
        if self.closed:
            return
        super().close()
        try:
            if self.error is None:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
        if self.error is not None:
            raise self.error

    def abandon(self) -> None:
        """Let go of a file that is of no use, without waiting for the disk."""
        if not self.closed:
            super().close()
            os.close(self._descriptor)
