"""Readers of the stored bytes of samples that turn disk errors into exceptions with the sample's number.

If a memory-mapped file becomes unreadable (disk error, truncated file, lost file system), a process that touches the map is
killed by SIGBUS without an error message. Therefore this module never touches the map. The operating system copies from it
(`process_vm_readv` on this process, with up to 1,024 pieces per call) and returns the number of bytes copied before a failure.
The remaining bytes are read from the file, with repeated attempts. If the last attempt fails, its reason is reported.

`Extents` holds the offsets of each sample's bytes. `ReadPolicy` holds the number of attempts, and whether unreadable samples are
replaced. `MappedReader` reads pixels; `decoding.EncodedReader` decodes picture files.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from hpctrain.core.errors import DataError
from hpctrain.core.files import open_regular

#: values that become 0 and 255
ValueRange = tuple[float, float]
#: index of images: one or several samples, or a region (rows, columns) of them
ImageIndex = int | slice | tuple[int | slice, slice, slice]

#: seconds before each further attempt to read a sample
PAUSES_SECONDS = (0.1, 0.4, 1.6)
#: maximum share of the deadline for all pauses of one sample
_SHARE_OF_DEADLINE = 0.25
# HDF5's text for the error of a system call.


def sum_of(values: np.ndarray) -> int:
    """Return the crc32 of an array's bytes."""
    return zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


class UnreadableError(DataError):
    """Error for unreadable samples. The message contains the file, the sample and the reason."""


class ReadImages(Protocol):
    """Images (N, H, W, C) uint8 that are read, decoded or generated sample by sample, instead of being in an array.

    Attributes:
        shape: (N, H, W, C).
    """

    shape: tuple[int, ...]

    def take(self, samples: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Write whole images of samples (n,) to `out` (n, H, W, C), contiguous, and return it.

        Raises:
            UnreadableError: a sample cannot be read, and no replacement is allowed.
        """

    def __getitem__(self, index: ImageIndex) -> np.ndarray:
        """Return pixels of one or several samples, of whole images or a region, like an array. They are read by `take`."""
        wanted, *region = index if isinstance(index, tuple) else (index,)
        numbers = range(self.shape[0])[wanted]
        samples = np.array([numbers] if isinstance(numbers, int) else numbers, np.int64)
        images = self.take(samples, np.empty((len(samples), *self.shape[1:]), np.uint8))[(slice(None), *region)]
        return images[0] if isinstance(numbers, int) else images


def replacements(images: object) -> Mapping[int, int]:
    """Return the mapping from unreadable samples to replacements, which may grow; empty for images without replacements."""
    return getattr(images, "replaced", {})


@dataclass(frozen=True)
class ReadPolicy:
    """Policy of a rank for unreadable samples.

    Attributes:
        most: maximum number of samples that may be replaced; None: the first unreadable sample raises an error.
        place: place of the reader, for the end of messages, such as " (on rank 1 of 4, node7)".
        pauses_seconds: pauses before each further attempt.
        held_out: (N,) bool, samples that are held out for validation. They never replace training samples, and training samples
            never replace them. None: no sample is held out.
    """

    most: int | None = None
    place: str = ""
    pauses_seconds: tuple[float, ...] = PAUSES_SECONDS
    held_out: np.ndarray | None = None


def pauses_within(deadline_seconds: float) -> tuple[float, ...]:
    """Return the first of `PAUSES_SECONDS` that together fit into a quarter of a deadline."""
    return tuple(_fitting(deadline_seconds * _SHARE_OF_DEADLINE))


def _fitting(seconds: float) -> Iterator[float]:
    for pause in PAUSES_SECONDS:
        seconds -= pause
        if seconds < 0:
            return
        yield pause


@dataclass(frozen=True)
class Extents:
    """Places of the stored bytes of samples, which are consecutive in one block of a file.

    Attributes:
        first: offset of the block in the file.
        stride: bytes of each sample; None if they differ.
        offsets: (count + 1,) int64, offsets of the samples in the block, from 0, and the end of the block; None if `stride` is
            set.
    """

    first: int
    count: int
    stride: int | None
    offsets: np.ndarray | None = None

    @classmethod
    def rising(cls, first: int, offsets: np.ndarray) -> Extents:
        """Return the extents of samples of different sizes.

        Args:
            offsets: (N + 1,) int64, increasing from 0.
        """
        return cls(first, len(offsets) - 1, None, offsets)

    @property
    def size_bytes(self) -> int:
        """Size of the block, in bytes."""
        return int(self.offsets[-1]) if self.offsets is not None else self.count * (self.stride or 0)

    def starts(self, samples: np.ndarray) -> np.ndarray:
        """Return the offsets (n,) int64 of samples (n,) in the block. Add `first` for offsets in the file."""
        return samples * np.int64(self.stride or 0) if self.offsets is None else self.offsets[samples]

    def sizes(self, samples: np.ndarray) -> np.ndarray:
        """Return the sizes (n,) int64 of samples (n,), in bytes."""
        if self.offsets is None:
            return np.full(len(samples), self.stride, np.int64)
        sizes: np.ndarray = self.offsets[samples + 1] - self.offsets[samples]
        return sizes

    def samples_of(self, start: int, stop: int) -> range:
        """Return the samples that have bytes in start .. stop - 1 of the block."""
        if stop <= start or not self.count:
            return range(0)
        if self.offsets is None:
            stride = max(1, self.stride or 0)
            return range(start // stride, min(self.count, -(-stop // stride)))
        first = int(np.searchsorted(self.offsets, start, "right")) - 1
        return range(first, min(self.count, int(np.searchsorted(self.offsets, stop, "left"))))


_PIECES_AT_ONCE = 1024  # the operating system's limit
_CHUNK_BYTES = 16 << 20
_BYTES_AT_ONCE = 1 << 30  # maximum per call; the operating system allows 2 GiB
# Errors after which the file is reopened: its file system may have been remounted, or its server restarted.
_LOST = (errno.ESTALE, errno.ENOTCONN, errno.EBADF, errno.ENODEV, errno.EIO)
_REFUSED = (errno.EPERM, errno.ENOSYS)


class BlockReader(ReadImages):
    """Reader of samples that are stored in one block of a file. Only one thread at a time may read.

    Args:
        path: path of the file, which stays open.
        block: flat memory map of the block.
        extents: places of the samples in the block.

    Attributes:
        replaced: replacement of each unreadable sample, by number.
        decodes: whether the stored bytes are picture files.
        threads: number of decoding threads, which may be changed between two calls.
    """

    decodes: ClassVar[bool] = False

    def __init__(self, path: Path, block: np.memmap, extents: Extents) -> None:
        self.extents = extents
        self.policy, self.threads = ReadPolicy(), 1
        self.replaced: dict[int, int] = {}
        self._path, self._map, self._offset = path, block, extents.first
        self._unreadable: set[int] = set()
        self._descriptor = open_regular(path)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._identity = _identity(os.fstat(self._descriptor))
        self._gathers = True

    def set_policy(self, policy: ReadPolicy) -> None:
        """Set the policy for unreadable samples, starting with the next read."""
        self.policy = policy

    def reads_by_calls(self) -> None:
        """Switch to reading each sample by a system call instead of through the map, from the next read on.

        System calls suit samples that are read once: a parallel file system serves all bytes of a sample in one call, but a map
        page by page.
        """
        self._gathers = False

    def read_sums(self, samples: np.ndarray) -> dict[int, int]:
        """Read samples (n,) by system calls, and return the crc32 of the pixels of the readable ones, by sample."""
        sizes, starts = self.extents.sizes(samples), self.extents.starts(samples)
        ends = np.cumsum(sizes)
        out = np.empty(int(sizes.sum()), np.uint8)
        gathers, self._gathers = self._gathers, False  # the map would also read neighbouring pages
        failed = self.fetch(samples, starts[:, None], (ends - sizes)[:, None], sizes, out, patient=False)
        self._gathers = gathers
        places = zip(samples.tolist(), (ends - sizes).tolist(), ends.tolist(), strict=True)
        return {
            sample: self._pixel_sum(sample, zlib.crc32(out[begin:end].data))
            for number, (sample, begin, end) in enumerate(places)
            if number not in failed
        }

    def pixel_sums(self, sums: np.ndarray | None) -> np.ndarray | None:
        """Return the declared crc32 of each sample's pixels, (N,); None if the file has none.

        Args:
            sums: declared crc32 of the stored bytes.
        """
        return sums

    def _pixel_sum(self, sample: int, stored_sum: int) -> int:
        """Return the crc32 of a sample's pixels, given the crc32 of its stored bytes."""
        return stored_sum

    def blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray, Mapping[int, str]]]:
        """Yield all samples in order, in chunks of about 16 MiB: numbers (n,), stored bytes (flat), and failures by sample."""
        first, count = 0, self.extents.count
        while first < count:
            begin = int(self.extents.starts(np.array([first], np.int64))[0])
            last = self.extents.samples_of(begin, min(self.extents.size_bytes, begin + _CHUNK_BYTES))[-1]
            samples = np.arange(first, last + 1)
            starts, sizes = self.extents.starts(samples), self.extents.sizes(samples)
            out = np.empty(int(sizes.sum()), np.uint8)
            failed = self.fetch(samples, starts[:, None], (starts - starts[0])[:, None], sizes, out, patient=True)
            yield samples, out, {first + number: why for number, why in failed.items()}
            first = last + 1

    def fetch(
        self, samples: np.ndarray, sources: np.ndarray, targets: np.ndarray, sizes: np.ndarray, out: np.ndarray, *, patient: bool
    ) -> Mapping[int, str]:
        """Read pieces of samples (n,) into `out`, flat, and return the reason for each failure, by index in `samples`.

        Args:
            sources: (n, pieces) int64, offsets of the pieces in the block.
            targets: (n, pieces) int64, offsets of the pieces in `out`.
            sizes: (n,) int64, bytes of each piece of a sample.
            patient: whether to repeat failed reads after pauses.
        """
        pieces = sources.shape[1]
        flat = np.stack([sources.reshape(-1), targets.reshape(-1), np.repeat(sizes, pieces)])
        failed: dict[int, str] = {}
        done = self._gather(flat, out)
        while done < sources.size:
            number = done // pieces
            if int(samples[number]) in self._unreadable:
                failed[number] = "an earlier attempt failed"
            else:
                size = int(sizes[number])
                places = [(source, out[at : at + size]) for source, at in zip(sources[number], targets[number], strict=True)]
                why = self._read_file(places, patient)
                if why is not None:
                    failed[number], patient = why, False
            done = (number + 1) * pieces
            done += self._gather(flat[:, done:], out)
        return failed

    def _complete(self, samples: np.ndarray, attempt: Callable[[np.ndarray, np.ndarray, bool], Mapping[int, str]]) -> None:
        """Read every sample, or its replacement if it is unreadable.

        Args:
            attempt: function that reads samples (m,) into places (m,) of the batch, repeatedly if the third argument is true, and
                returns the reasons for failures by index.

        Raises:
            UnreadableError: a sample cannot be read, and no replacement is allowed.
        """
        pending, patient = np.arange(len(samples)), True
        while len(pending):
            actual = samples[pending]
            if self.replaced:
                actual = np.array([self.replaced.get(sample, sample) for sample in actual.tolist()], np.int64)
            failed = attempt(actual, pending, patient)
            for position, why in failed.items():
                self._replace(int(samples[pending[position]]), int(actual[position]), why)
            pending, patient = pending[list(failed)], False

    def _gather(self, wanted: np.ndarray, out: np.ndarray) -> int:
        """Copy pieces out of the map up to the first failure, and return the number of pieces copied.

        Args:
            wanted: (3, pieces) int64: offsets in the block, offsets in `out`, and sizes in bytes.
        """
        sources, targets, sizes = wanted
        at_once = max(1, min(_PIECES_AT_ONCE, _BYTES_AT_ONCE // max(1, int(sizes.max(initial=1)))))
        for begin in range(0, len(sources) if self._gathers else 0, at_once):
            part = slice(begin, begin + at_once)
            pieces = np.empty((2, len(sources[part]), 2), np.uint64)
            pieces[0, :, 0], pieces[1, :, 0] = out.ctypes.data + targets[part], self._map.ctypes.data + sources[part]
            pieces[:, :, 1] = sizes[part]
            count = pieces.shape[1]
            copied = _copy(os.getpid(), pieces[0].ctypes.data, count, pieces[1].ctypes.data, count, 0)
            ends = np.cumsum(sizes[part])
            if copied < ends[-1]:
                self._gathers = copied >= 0 or ctypes.get_errno() not in _REFUSED
                return int(begin + np.searchsorted(ends, max(0, copied), "right"))
        return len(sources) if self._gathers else 0

    def _read_file(self, pieces: list[tuple[int, np.ndarray]], patient: bool) -> str | None:
        """Read pieces (offset in the block, output) of a sample from the file; return the reason for a failure or None."""
        pauses = self.policy.pauses_seconds if patient else ()
        why = None
        for pause in (*pauses, None):
            try:
                for start, piece in pieces:
                    self._read_piece(self._offset + int(start), piece.data)
                return None
            except EOFError as error:
                return str(error)
            except OSError as error:
                why, lost = error.strerror or str(error), error.errno in _LOST
            if pause is not None:
                time.sleep(pause)
                if lost:
                    self._open_again()
        return f"{why}, in {len(pauses) + 1} attempts" if pauses else why

    def _read_piece(self, at: int, out: memoryview) -> None:
        while out:
            if not (count := os.preadv(self._descriptor, [out], at)):
                raise EOFError(f"the file ends at byte {os.fstat(self._descriptor).st_size}, but was longer when it was opened")
            at, out = at + count, out[count:]

    def _open_again(self) -> None:
        """Reopen the path if it is still the same file."""
        with contextlib.suppress(OSError):
            opened = open_regular(self._path)
            if _identity(os.fstat(opened)) != self._identity:
                os.close(opened)
                return
            self._close()
            self._descriptor = opened
            self._close = weakref.finalize(self, os.close, opened)

    def sentence(self, sample: int, why: str) -> str:
        """Return the error message for an unreadable sample."""
        return f"Sample {sample} of the data file {self._path} cannot be read: {why}{self.policy.place}."

    def _replace(self, sample: int, actual: int, why: str) -> None:
        """Replace `sample` by another one, because `actual`, which was read for it, is unreadable.

        Raises:
            UnreadableError: replacements are not allowed, or there are too many.
        """
        policy = self.policy
        named = f"ample {actual} of the data file {self._path} cannot be read: {why}"
        if policy.most is None:
            raise UnreadableError(self.sentence(actual, why))
        self._unreadable.add(actual)
        count = self.extents.count
        if len(self._unreadable) > policy.most or len(self._unreadable) == count:
            limit = f", but data.max_unreadable allows {policy.most}" if len(self._unreadable) > policy.most else ""
            raise UnreadableError(
                f"S{named}; {len(self._unreadable):,} of {count:,} samples are unreadable{limit}{policy.place}."
            )
        held_out = policy.held_out
        others = ((sample + distance) % count for distance in range(1, count))
        alike = (other for other in others if held_out is None or held_out[other] == held_out[sample])
        replacement = next((other for other in alike if other not in self._unreadable), None)
        if replacement is None:
            raise UnreadableError(f"S{named}; no sample is left that could replace it{policy.place}.")
        if not self.replaced:
            logging.getLogger(__name__).info(f"s{named}; such samples are replaced by others{policy.place}")
        self.replaced[sample] = replacement


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


# Copies memory between processes; here both are this process.
_copy = ctypes.CDLL(None, use_errno=True).process_vm_readv
_copy.argtypes = [ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong]
_copy.restype = ctypes.c_ssize_t


class MappedReader(BlockReader):
    """Reader of images (N, H, W, C) uint8 that are stored in one block of a file. Only one thread at a time may read.

    Args:
        images: memory map of the block.
        offset: offset of the block in the file.
    """

    def __init__(self, path: Path, images: np.memmap, offset: int) -> None:
        super().__init__(path, images, Extents(offset, images.shape[0], int(np.prod(images.shape[1:]))))
        self.shape: tuple[int, ...] = images.shape

    def take(self, samples: np.ndarray, out: np.ndarray) -> np.ndarray:
        height, width, _ = self.shape[1:]
        self._read(np.asarray(samples, np.int64), slice(0, height), slice(0, width), out)
        return out

    def __getitem__(self, index: ImageIndex) -> np.ndarray:
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
        if not out.size:
            return
        begins, length = self._pieces(rows, columns)

        def attempt(actual: np.ndarray, places: np.ndarray, patient: bool) -> Mapping[int, str]:
            sources = self.extents.starts(actual)[:, None] + begins
            targets = (places[:, None] * len(begins) + np.arange(len(begins))) * length
            return self.fetch(actual, sources, targets, np.full(len(actual), length), out.reshape(-1), patient=patient)

        self._complete(samples, attempt)

    def _pieces(self, rows: slice, columns: slice) -> tuple[np.ndarray, int]:
        """Return the offsets of the contiguous runs of a region in an image and the length of each run, in bytes."""
        width, channels = self.shape[2:]
        if columns.stop - columns.start == width:
            return np.array([rows.start * width * channels], np.int64), (rows.stop - rows.start) * width * channels
        starts = (np.arange(rows.start, rows.stop, dtype=np.int64) * width + columns.start) * channels
        return starts, (columns.stop - columns.start) * channels
