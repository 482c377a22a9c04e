"""Stored bytes of samples in a file of the node, written as they are first read from the data file.

The file is read and written by system calls, never mapped: a disk that is full, or a file that somebody cuts short, is an error
of a call and no signal. Each sample has a checksum in memory of the node, so that bytes that have changed are noticed, and read
from the data file again.
"""

from __future__ import annotations

import os
import weakref
import zlib
from collections.abc import Callable

import numpy as np

from hpctrain.comm.shared_memory import SharedMemory
from hpctrain.data.image_file import ReadImages
from hpctrain.data.read_counts import Origin, ReadCounts
from hpctrain.data.unreadable import stand_ins
from hpctrain.log import get_logger

_ABSENT, _THERE = range(2)
_CHECKSUM_BYTES = 4

#: where the bytes of a sample lie in the local file, and how many there are, by its number among those that are kept
PlaceOf = Callable[[int], tuple[int, int]]


def fixed_size(size_bytes: int) -> PlaceOf:
    """The places of samples that have one size."""
    return lambda number: (number * size_bytes, size_bytes)


def table_bytes(count: int) -> int:
    """The memory for the checksums and states of so many samples."""
    return count * (_CHECKSUM_BYTES + 1)


class LocalCopy:
    """The file of a node for samples `first` .. `first + count - 1`. Any thread of any rank of the node may read and write.

    Args:
        descriptor: of the file, which is this object's from now on, and is closed with it. place_of: as above.
        table: memory of the node's ranks, of `table_bytes(count)`; zeros where the file holds nothing yet.

    Attributes:
        checksums, states: views of the table, (count,) uint32 and uint8.
    """

    def __init__(self, descriptor: int, place_of: PlaceOf, table: SharedMemory, first: int, count: int) -> None:
        self.first, self.count = first, count
        self.checksums = table.array[: count * _CHECKSUM_BYTES].view(np.uint32)
        self.states = table.array[count * _CHECKSUM_BYTES : table_bytes(count)]
        self._table, self._place_of = table, place_of
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._told: set[str] = set()
        self._full = False

    def keeps(self, sample: int) -> bool:
        """Whether the file has a place for a sample."""
        return self.first <= sample < self.first + self.count

    def read(self, sample: int, out: memoryview) -> bool:
        """The bytes of a sample; False where they are not there, or are others than were written, and `out` holds anything."""
        if not self.keeps(sample):
            return False
        number = sample - self.first
        if self.states[number] != _THERE:
            return False
        self._table.fence()
        offset, length = self._place_of(number)
        assert length == len(out), "a sample has the size that it was written with"
        why = self._read(out, offset)
        if why is None and zlib.crc32(out) != self.checksums[number]:
            why = "bytes of it have changed"
        if why is None:
            return True
        self.states[number] = _ABSENT
        self._tell(f"the node's local copy of samples cannot be trusted ({why}); these samples are read from the data file again")
        return False

    def write(self, sample: int, stored: memoryview) -> None:
        """Keep the bytes of a sample, if the file has a place for it and the disk has room."""
        if self._full or not self.keeps(sample):
            return
        number = sample - self.first
        offset, length = self._place_of(number)
        assert length == len(stored)
        done = 0
        try:
            while done < length:
                done += os.pwrite(self._descriptor, stored[done:], offset + done)
        except OSError as error:
            self._full = True
            self._tell(f"the node's local copy of samples gets no larger ({error.strerror}); others are read from the data file")
            return
        self.checksums[number] = zlib.crc32(stored)
        self._table.fence()
        self.states[number] = _THERE

    def _read(self, out: memoryview, offset: int) -> str | None:
        """Read all of `out`; None, or why that cannot be."""
        done = 0
        try:
            while done < len(out):
                count = os.preadv(self._descriptor, [out[done:]], offset + done)
                if not count:
                    return "it is cut short"
                done += count
        except OSError as error:
            return error.strerror or str(error)
        return None

    def _tell(self, sentence: str) -> None:
        """Log a sentence once."""
        if sentence not in self._told:
            self._told.add(sentence)
            get_logger(__name__).warning(sentence)


class LocalSamples:
    """Images (N, H, W, C) uint8 of a source, some of which are read from a local copy once they were read.

    Samples that others stand in for are not kept.

    Args:
        source: of images as they are stored. copy: for the same samples.

    Attributes:
        replaced: as of the source.
    """

    def __init__(self, source: ReadImages, copy: LocalCopy, counts: ReadCounts) -> None:
        self.shape = source.shape
        self.replaced = stand_ins(source)
        self._source, self._copy, self._counts = source, copy, counts

    def take(self, samples: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Whole images of samples (n,), written to `out` (n, H, W, C), contiguous, which is returned; errors as of the source."""
        if not len(samples):
            return out
        rows = out.reshape(len(samples), -1)
        missing = np.array(
            [number for number, sample in enumerate(samples.tolist()) if not self._read(sample, rows[number])], int
        )
        if len(missing) < len(samples):
            self._counts.add(Origin.LOCAL, len(samples) - len(missing), (len(samples) - len(missing)) * rows.shape[1])
        if len(missing):
            images = out if len(missing) == len(samples) else np.empty((len(missing), *self.shape[1:]), np.uint8)
            self._source.take(samples[missing], images)
            for sample, image in zip(samples[missing].tolist(), images.reshape(len(missing), -1), strict=True):
                if sample not in self.replaced:
                    self._copy.write(sample, image.data)
            if images is not out:
                out[missing] = images
        return out

    def __getitem__(self, index: int | slice | tuple[int | slice, slice, slice]) -> np.ndarray:
        """Pixels of a sample or of several, of whole images or of a region, as of an array; errors as of the source."""
        wanted, *region = index if isinstance(index, tuple) else (index,)
        rows, columns = region or (slice(None), slice(None))
        if isinstance(wanted, int) and not self._copy.keeps(wanted):
            return self._source[wanted, rows, columns]
        samples = np.arange(self.shape[0])[wanted].reshape(-1)
        images = self.take(samples, np.empty((len(samples), *self.shape[1:]), np.uint8))[:, rows, columns]
        return images[0] if isinstance(wanted, int) else images

    def _read(self, sample: int, row: np.ndarray) -> bool:
        return sample not in self.replaced and self._copy.read(sample, row.data)
