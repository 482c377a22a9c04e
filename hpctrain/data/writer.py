"""Writer of data files: chunk by chunk, under a temporary name until the file is complete and on the disk.

The block of samples is at its final place from the beginning, so finishing the file writes HDF5's structures around it and copies
nothing. A journal has a line for each chunk: its size, its checksum, and the data that the writer needs to resume. A chunk is
valid if its line is complete and its bytes match the checksum. An interrupted conversion therefore continues after the last valid
chunk, whether a process was killed or a machine lost data.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import h5py
import numpy as np

from hpctrain.core.errors import DataError
from hpctrain.core.files import open_own, read_at, write_at
from hpctrain.data.files import system_errors_as
from hpctrain.data.image_file import (
    FIT,
    FORM,
    FORMAT,
    MAX_PIXELS,
    RANGE,
    VERSION,
    check_labels,
    check_names,
    digest_of,
    names_digest,
)
from hpctrain.data.readers import ValueRange, sum_of
from hpctrain.storage.atomic_write import PARTIAL, publish, replacing, target_of
from hpctrain.storage.hdf5_store import StoreFile

# Offset of the block in the file; HDF5's first structures fit before it.
_BLOCK_OFFSET = 4096
#: from this version of its format on, HDF5 stores checksums of its own structures
_LIBVER = ("v110", "v110")
_PAGE_BYTES = 4096
_JOURNAL_VERSION = 2


class ImageFileWriter:
    """Writer of a data file in chunks. The file appears, complete and on the disk, when the `with` block ends without an error.

    Use it as a context manager. After an error no file is left. An interruption (KeyboardInterrupt, a kill) leaves an unfinished
    file if `source` is given, and the next writer with the same `path` and `source` continues it.

    Args:
        path: file to create or replace. Missing directories are created.
        count: maximum number of samples.
        shape: (H, W, C) of every image.
        fit: method by which pictures are resized to the shape ("crop", "squash"), stored in the file.
        value_range: (low, high), the values that became 0 and 255, stored in the file; None: see `Stored.value_range`.
        keeps_files: whether the file stores picture files instead of pixels.
        max_pixels: maximum number of pixels of a picture, stored for the readers of picture files; None: the decoder's own limit.
        source: identifier of the inputs and settings of the conversion.

    Attributes:
        skipped: names of the source's items that are left out.
    """

    def __init__(
        self,
        path: str | Path,
        count: int,
        shape: tuple[int, int, int],
        class_names: Sequence[str],
        fit: str | None = None,
        value_range: ValueRange | None = None,
        keeps_files: bool = False,
        max_pixels: int | None = None,
        source: str | None = None,
    ) -> None:
        self._path, self._count, self._shape = Path(path), count, shape
        self._names = [str(name) for name in class_names]
        self._fit, self._value_range, self._keeps_files, self._max_pixels = fit, value_range, keeps_files, max_pixels
        self._source = source
        check_names(self._path, self._names)
        self.skipped: list[str] = []
        self._labels: list[int] = []
        self._sums: list[int] = []
        self._pixel_sums: list[int] = []
        self._sizes: list[int] = []  # of picture files
        self._size = 0
        self._histogram = np.zeros((shape[2], 256), np.int64)
        self._digest = hashlib.sha256()
        self._open_files, self._file = ExitStack(), -1
        self._journal, self._journal_size = -1, 0

    def __enter__(self) -> Self:
        with self._system_errors():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._source is None:
                partial = self._open_files.enter_context(replacing(self._path))
                self._file = self._open_files.enter_context(open(partial, "r+b", buffering=0)).fileno()
            else:
                self._file, self._journal = self._open_files.enter_context(_resumable(self._path))
                self._resume(_line({"journal": _JOURNAL_VERSION, "source": self._source}))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._open_files.__exit__(kind, error, trace)
            return
        with self._system_errors(), self._open_files:
            self._finish()

    @property
    def done(self) -> int:
        """Number of items of the source that are written or left out."""
        return len(self._sums) + len(self.skipped)

    def append(self, images: np.ndarray, labels: np.ndarray, contents: Sequence[bytes] = (), skipped: Sequence[str] = ()) -> None:
        """Append images (n, H, W, C) uint8 with labels (n,).

        Args:
            contents: picture files that decode to the images, if the file stores picture files.
            skipped: names of the source's items between these images that are left out.

        Raises:
            DataError: the images have another shape, a label is outside 0 .. classes - 1, or the file cannot be written.
        """
        if images.shape[1:] != self._shape or images.dtype != np.uint8:
            raise DataError(
                f"{self._path} must hold uint8 images of shape {self._shape}, not {images.dtype} of {images.shape[1:]}."
            )
        assert len(labels) == len(images), "one label per image"
        assert len(self._sums) + len(labels) <= self._count, "more samples than announced"
        check_labels(self._path, labels, len(self._names), first=len(self._sums))
        images = np.ascontiguousarray(images)
        record = {"labels": labels.tolist(), "skipped": list(skipped), "histogram": _histogram(images).tolist()}
        pixel_sums = [sum_of(image) for image in images]
        if self._keeps_files:
            assert len(contents) == len(images), "one file per image"
            block = memoryview(b"".join(contents))
            record |= {"sums": list(map(zlib.crc32, contents)), "sizes": list(map(len, contents)), "pixel_sums": pixel_sums}
        else:
            block = images.reshape(-1).data
            record |= {"sums": pixel_sums, "sizes": [], "pixel_sums": []}
        with self._system_errors():
            write_at(self._file, block, _BLOCK_OFFSET + self._size)
            if self._source is not None:  # after the bytes, so that each line describes existing bytes
                line = _line({"bytes": len(block), "crc32": zlib.crc32(block), **record})
                write_at(self._journal, line, self._journal_size)
                self._journal_size += len(line)
        self._account(record, block)

    def _account(self, record: dict[str, Any], block: memoryview) -> None:
        """Add a chunk that is already in the file to the totals."""
        self.skipped += record["skipped"]
        self._labels += record["labels"]
        self._sums += record["sums"]
        self._pixel_sums += record["pixel_sums"]
        self._sizes += record["sizes"]
        self._size += len(block)
        self._histogram += np.array(record["histogram"], np.int64)
        self._digest.update(block)

    def _resume(self, header: bytes) -> None:
        """Account for the valid chunks of an interrupted conversion, and cut off the bytes after them."""
        lines = os.pread(self._journal, os.fstat(self._journal).st_size, 0).splitlines(keepends=True)
        log = logging.getLogger(__name__)
        if lines and lines[0] != header:
            log.warning(
                "%s%s belongs to a conversion of other images or with other options; starting from scratch", self._path, PARTIAL
            )
            lines = []
        self._journal_size = len(header)
        for line in lines[1:]:
            record = _record(line)
            if record is None:
                break
            block = memoryview(bytearray(record["bytes"]))
            with suppress(OSError):
                read_at(self._file, block, _BLOCK_OFFSET + self._size)
            if zlib.crc32(block) != record["crc32"]:
                break
            self._journal_size += len(line)
            self._account(record, block)
        os.ftruncate(self._journal, self._journal_size)
        write_at(self._journal, header, 0)
        os.ftruncate(self._file, _BLOCK_OFFSET + self._size)
        write_at(self._file, bytes(_BLOCK_OFFSET), 0)  # an interrupted `_finish` may have written there
        if self.done:
            log.info("continuing %s%s after the first %d of %d images", self._path, PARTIAL, self.done, self._count)

    def _system_errors(self) -> AbstractContextManager[None]:
        return system_errors_as(f"The data file {self._path} cannot be written")

    def _finish(self) -> None:
        if not self._sums or min(self._shape) < 1:
            raise DataError(
                f"{self._path} would hold {len(self._sums)} images of shape {self._shape}; all numbers must be at least 1."
            )
        with StoreFile(os.dup(self._file)) as stored:
            # Large objects start on a page, so the map has no more pages than the images.
            aligned = {"alignment_threshold": _PAGE_BYTES, "alignment_interval": _PAGE_BYTES}
            with h5py.File(stored, "w", libver=_LIBVER, **aligned) as file:
                if self._keeps_files:
                    block = self._block(file, "blob", (self._size,))
                    block.attrs[FORM] = np.array(self._shape, "<i8")
                    if self._max_pixels is not None:
                        block.attrs[MAX_PIXELS] = self._max_pixels
                    _put(file, "offsets", np.cumsum([0, *self._sizes]).astype("<i8"))
                    _put(file, "pixel_sums", np.array(self._pixel_sums, "<u4"))
                else:
                    self._block(file, "images", (len(self._sums), *self._shape))
                mean, std = _moments(self._histogram)
                _put(file, "labels", np.array(self._labels, "<i8"))
                _put(file, "mean", mean.astype("<f8"))
                _put(file, "std", std.astype("<f8"))
                _put(file, "sums", np.array(self._sums, "<u4"))
                encoded = [name.encode() for name in self._names]
                text = h5py.string_dtype("utf-8", max(1, *map(len, encoded)))
                file.create_dataset("class_names", data=np.array(encoded, text)).attrs["sha256"] = np.bytes_(
                    names_digest(self._names)
                )
                file.attrs["format"] = np.bytes_(FORMAT)
                file.attrs["version"] = VERSION
            stored.finish()

    def _block(self, file: h5py.File, name: str, shape: tuple[int, ...]) -> h5py.Dataset:
        """Return the dataset of the samples, whose bytes are already in the file."""
        created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        created.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        created.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        created.set_obj_track_times(False)
        space = h5py.h5s.create_simple(shape)
        dataset = h5py.Dataset(h5py.h5d.create(file.id, name.encode(), h5py.h5t.STD_U8LE, space, created))
        if dataset.id.get_offset() != _BLOCK_OFFSET:
            values = np.empty(shape, np.uint8)
            assert values.nbytes < _PAGE_BYTES, "large objects begin on the first page after the structures"
            read_at(self._file, values.reshape(-1).data, _BLOCK_OFFSET)
            dataset[...] = values
            os.ftruncate(self._file, 0)
        dataset.attrs["sha256"] = np.bytes_(self._digest.hexdigest())
        if self._fit is not None:
            dataset.attrs[FIT] = np.bytes_(self._fit)
        if self._value_range is not None:
            dataset.attrs[RANGE] = np.array(self._value_range, "<f8")
        return dataset


@contextmanager
def _resumable(path: Path) -> Iterator[tuple[int, int]]:
    """Yield the open file `path`.partial and its journal, which stay after an interruption, and publish the file after the block.

    Only one process at a time may write. After an error no file is left.

    Raises:
        OSError: the files cannot be created or published.
        DataError: another process is writing the same file, or a file that cannot be opened or continued has a temporary name.
    """

    def opened(name: Path) -> int:
        try:
            descriptor = open_own(name, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if os.path.lexists(name):
                raise DataError(f"{name} already exists, but cannot be opened ({error.strerror}); {advice}.") from error
            raise
        files.callback(os.close, descriptor)
        return descriptor

    target, advice = target_of(path), "move it away, or choose another output name"
    partial, journal = (target.with_name(target.name + PARTIAL + suffix) for suffix in ("", ".journal"))
    with ExitStack() as files:
        block = opened(partial)
        try:
            fcntl.flock(block, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                raise DataError(f"Another process is writing {partial}; wait for it, or give another output name.") from error
            # Without locks in the file system, the user must not run two conversions to one name.
        if os.fstat(block).st_size and not journal.is_file():
            why = "already exists without the journal of a conversion, so another program may have written it"
            raise DataError(f"{partial} {why}; {advice}.")  # such as a download of the same name
        lines = opened(journal)
        try:
            yield block, lines
            publish(partial, target)
        except Exception:
            partial.unlink(missing_ok=True)
            journal.unlink(missing_ok=True)
            raise
        journal.unlink(missing_ok=True)


def _line(content: dict[str, Any]) -> bytes:
    """Return a line of the journal, which begins with its own checksum."""
    text = json.dumps(content, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _record(line: bytes) -> dict[str, Any] | None:
    """Return the content of a line of the journal; None if the line is incomplete or damaged."""
    if not line.endswith(b"\n") or line[:9] != b"%08x " % zlib.crc32(line[9:-1]):
        return None
    record: dict[str, Any] = json.loads(line[9:])
    return record


def write_data_file(
    path: str | Path,
    count: int,
    shape: tuple[int, int, int],
    class_names: Sequence[str],
    chunks: Iterable[tuple[np.ndarray, np.ndarray]],
    fit: str | None = None,
    value_range: ValueRange | None = None,
) -> None:
    """Write (images, labels) chunks as one data file; see `ImageFileWriter`."""
    with ImageFileWriter(path, count, shape, class_names, fit, value_range) as writer:
        for images, labels in chunks:
            writer.append(images, labels)


def _histogram(images: np.ndarray) -> np.ndarray:
    """Return the number of pixels with each value, by channel, of images (n, H, W, C) uint8: (C, 256) int64."""
    channels = range(images.shape[3])
    return np.stack([np.bincount(images[..., channel].reshape(-1), minlength=256) for channel in channels]).astype(np.int64)


def _put(file: h5py.File, name: str, values: np.ndarray) -> None:
    """Write a dataset with its checksum."""
    file.create_dataset(name, data=values).attrs["sha256"] = np.bytes_(digest_of(values))


def _moments(histogram: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and population standard deviation per channel, in units of 0..1, from exact integer sums."""
    mean, std = [], []
    for counts in histogram.tolist():
        n = sum(counts)
        total = sum(value * count for value, count in enumerate(counts))
        squares = sum(value * value * count for value, count in enumerate(counts))
        mean.append(total / n / 255)
        std.append((n * squares - total * total) ** 0.5 / n / 255)
    return np.array(mean), np.array(std)
