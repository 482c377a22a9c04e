"""A file for HDF5 to write through, so that a full disk is an error and not a crash."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hpctrain.storage.hdf5_target import Hdf5Target


class GuardedFile(Hdf5Target):
    """A new file that HDF5 writes through. It takes every write; the first that the system refused is kept in `error`.

    HDF5 cannot give up a file whose disk is full: it tries to flush again at every later chance and ends in a segmentation
    fault. So it never learns of it, and the maker of the file asks for `error`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.error: OSError | None = None

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view) and (count := os.preadv(self._descriptor, [view[done:]], self._at + done)):
            done += count
        self._at += done
        return done

    def write(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        done = 0
        try:
            while done < len(view) and self.error is None:
                done += os.pwrite(self._descriptor, view[done:], self._at + done)
        except OSError as error:
            self.error = error
        self._at += len(view)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        length = self._at if size is None else size
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
        try:
            if self.error is None:
                os.fsync(self._descriptor)
        finally:
            self._release()
        if self.error is not None:
            raise self.error

    def abandon(self) -> None:
        """Let go of a file that is of no use, without waiting for the disk."""
        self._release()

    def _end(self) -> int:
        return os.fstat(self._descriptor).st_size
