"""Images of a file, read so that what a disk refuses is an exception that names the sample.

A file that becomes unreadable under a memory map (an error of its disk, a file that is cut short, a file system that is gone)
ends the process that touches it by SIGBUS, without a word of the file. So the map is never touched from here: the system copies
out of it (`process_vm_readv` of this very process, one call for up to 1,024 pieces of a batch), and says where it could not go
on. What is missing then is read from the file, again after some pauses, which tells the reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import numpy as np

from hpctrain.data.unreadable import ReadPolicy, UnreadableError
from hpctrain.log import get_logger

_PIECES_AT_ONCE = 1024  # the system takes no more
_BYTES_AT_ONCE = 1 << 30  # of a call; it ends at 2 GiB
# A file system that was mounted again, or a server that was started again, may need the file opened again.
_LOST = (errno.ESTALE, errno.ENOTCONN, errno.EBADF, errno.ENODEV, errno.EIO)
_REFUSED = (errno.EPERM, errno.ENOSYS)


class MappedReader:
    """Reads samples of images (N, H, W, C) uint8 that lie in one block of a file. One thread at a time.

    Args:
        path: of the file, which is held open. images: a map of the block. offset: of its first byte in the file.

    Attributes:
        policy: what becomes of samples that cannot be read.
        replaced: by sample that could not be read, the one that is read in its place.
    """

    def __init__(self, path: Path, images: np.memmap, offset: int) -> None:
        self.shape = images.shape
        self.policy = ReadPolicy()
        self.replaced: dict[int, int] = {}
        self._path, self._map, self._offset = path, images, offset
        self._unreadable: set[int] = set()
        self._descriptor = os.open(path, os.O_RDONLY)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._identity = _identity(os.fstat(self._descriptor))
        self._gathers = True

    def reads_by_calls(self) -> None:
        """Read each sample by a system call of its own from now on, not out of the map.

        For samples that are read once: a parallel file system serves a call for all bytes of a sample, and a map page by page.
        """
        self._gathers = False

    def take(self, samples: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Whole images of samples (n,), written to `out` (n, H, W, C), which is contiguous and is returned.

        Raises:
            UnreadableError: a sample cannot be read, and none may stand in for it.
        """
        height, width, _ = self.shape[1:]
        self._read(np.asarray(samples, np.int64), slice(0, height), slice(0, width), out)
        return out

    def __getitem__(self, index: int | slice | tuple[int | slice, slice, slice]) -> np.ndarray:
        """Pixels of a sample or of several, of whole images or of a region, as of an array; errors as of `take`."""
        wanted, *region = index if isinstance(index, tuple) else (index,)
        rows, columns = (
            slice(*part.indices(size)) for part, size in zip(region or [slice(None)] * 2, self.shape[1:3], strict=True)
        )
        numbers = range(self.shape[0])[wanted]
        samples = np.array([numbers] if isinstance(numbers, int) else numbers, np.int64)
        size = (max(0, rows.stop - rows.start), max(0, columns.stop - columns.start), self.shape[3])
        out = np.empty((len(samples), *size), np.uint8)
        self._read(samples, rows, columns, out)
        return out[0] if isinstance(numbers, int) else out

    def _read(self, samples: np.ndarray, rows: slice, columns: slice, out: np.ndarray) -> None:
        """Read until every sample, or one that stands in for it, is there."""
        if not out.size:
            return
        starts, length = self._pieces(rows, columns)
        target = out.reshape(len(samples), len(starts), length)
        pending, patient = np.arange(len(samples)), True
        while len(pending):
            actual = self._standing(samples[pending])
            failed = self._attempt(actual, pending, starts, target, patient)
            for position, why in failed.items():
                self._replace(int(samples[pending[position]]), int(actual[position]), why)
            pending, patient = pending[list(failed)], False

    def _pieces(self, rows: slice, columns: slice) -> tuple[np.ndarray, int]:
        """Where the neighbouring bytes of a region of an image begin, and how many there are of each."""
        width, channels = self.shape[2:]
        if columns.stop - columns.start == width:
            return np.array([rows.start * width * channels], np.int64), (rows.stop - rows.start) * width * channels
        starts = (np.arange(rows.start, rows.stop, dtype=np.int64) * width + columns.start) * channels
        return starts, (columns.stop - columns.start) * channels

    def _standing(self, samples: np.ndarray) -> np.ndarray:
        """The samples that are read for these."""
        if not self.replaced:
            return samples
        return np.array([self.replaced.get(sample, sample) for sample in samples.tolist()], np.int64)

    def _attempt(
        self, samples: np.ndarray, places: np.ndarray, starts: np.ndarray, target: np.ndarray, patient: bool
    ) -> Mapping[int, str]:
        """Read samples to `target[places]`; those that cannot be read, by their number here, with the reason.

        patient: read them again after some pauses.
        """
        size = int(np.prod(self.shape[1:]))
        sources = (samples[:, None] * size + starts).reshape(-1)
        targets = (places[:, None] * len(starts) + np.arange(len(starts))).reshape(-1) * target.shape[2]
        failed: dict[int, str] = {}
        done = self._gather(sources, targets, target)
        while done < len(sources):
            number = done // len(starts)
            if int(samples[number]) in self._unreadable:
                failed[number] = "it could not be read before"
            else:
                why = self._read_file(int(samples[number]) * size + starts, target[places[number]], patient)
                if why is not None:
                    failed[number], patient = why, False
            done = (number + 1) * len(starts)
            done += self._gather(sources[done:], targets[done:], target)
        return failed

    def _gather(self, sources: np.ndarray, targets: np.ndarray, out: np.ndarray) -> int:
        """Copy pieces out of the map as far as that is possible; give how many."""
        length = out.shape[2]
        at_once = max(1, min(_PIECES_AT_ONCE, _BYTES_AT_ONCE // length))
        for begin in range(0, len(sources) if self._gathers else 0, at_once):
            part = slice(begin, begin + at_once)
            pieces = np.empty((2, len(sources[part]), 2), np.uint64)
            pieces[0, :, 0], pieces[1, :, 0] = out.ctypes.data + targets[part], self._map.ctypes.data + sources[part]
            pieces[:, :, 1] = length
            count = pieces.shape[1]
            copied = _copy(os.getpid(), pieces[0].ctypes.data, count, pieces[1].ctypes.data, count, 0)
            if copied < count * length:
                self._gathers = copied >= 0 or ctypes.get_errno() not in _REFUSED
                return int(begin + max(0, copied) // length)
        return len(sources) if self._gathers else 0

    def _read_file(self, starts: np.ndarray, out: np.ndarray, patient: bool) -> str | None:
        """Read the pieces (in bytes of the block) of one sample from the file; None, or the reason why that cannot be done."""
        pauses = self.policy.pauses_seconds if patient else ()
        why = None
        for pause in (*pauses, None):
            try:
                for start, piece in zip(starts.tolist(), out, strict=True):
                    self._read_piece(self._offset + start, memoryview(piece))
                return None
            except EOFError as error:
                return str(error)
            except OSError as error:
                why = error.strerror or str(error)
                lost = error.errno in _LOST
            if pause is not None:
                time.sleep(pause)
                if lost:
                    self._open_again()
        return f"{why}, in {len(pauses) + 1} attempts" if pauses else why

    def _read_piece(self, at: int, out: memoryview) -> None:
        while len(out):
            count = os.preadv(self._descriptor, [out], at)
            if not count:
                raise EOFError(f"the file ends at byte {os.fstat(self._descriptor).st_size}, and was longer when it was opened")
            out, at = out[count:], at + count

    def _open_again(self) -> None:
        """Open the path again, if it is the same file still."""
        with contextlib.suppress(OSError):
            opened = os.open(self._path, os.O_RDONLY)
            if _identity(os.fstat(opened)) != self._identity:
                os.close(opened)
                return
            self._close()
            self._descriptor = opened
            self._close = weakref.finalize(self, os.close, opened)

    def _replace(self, sample: int, actual: int, why: str) -> None:
        """Let another sample stand in for `sample`, for which `actual` could not be read.

        Raises:
            UnreadableError: that is not allowed, or there were too many.
        """
        policy = self.policy
        named = f"ample {actual} of the data file {self._path} cannot be read: {why}"
        if policy.most is None:
            raise UnreadableError(f"S{named}{policy.place}.")
        self._unreadable.add(actual)
        if len(self._unreadable) > policy.most or len(self._unreadable) == self.shape[0]:
            raise UnreadableError(
                f"S{named}; with it there are {len(self._unreadable)} such samples, and data.max_unreadable allows for "
                f"{policy.most}{policy.place}."
            )
        count = self.shape[0]
        others = ((sample + distance) % count for distance in range(1, count))
        if not self.replaced:
            get_logger(__name__).info(f"s{named}; others stand in for such samples{policy.place}")
        self.replaced[sample] = next(other for other in others if other not in self._unreadable)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _system_copy() -> Callable[..., int]:
    """The system's copy from one process to another, which here are the same."""
    copy = ctypes.CDLL(None, use_errno=True).process_vm_readv
    address, number = ctypes.c_void_p, ctypes.c_ulong
    copy.argtypes, copy.restype = [ctypes.c_int, address, number, address, number, number], ctypes.c_ssize_t
    return cast(Callable[..., int], copy)


_copy = _system_copy()
