"""Writers of data files: chunk by chunk, under a temporary name until the file is complete and on the disk.

The block of samples is at its final place from the beginning, so finishing the file writes HDF5's structures around it and copies
nothing. A journal has a line for each chunk: its size, its checksum, and the data that the writer needs to resume. A chunk is
valid if its line is complete and its bytes match the checksum. An interrupted conversion therefore continues after the last valid
chunk, whether a process was killed or a machine lost data.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import logging
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
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
from hpctrain.launch import processes
from hpctrain.storage.atomic_write import PARTIAL, publish, target_of
from hpctrain.storage.hdf5_store import StoreFile

#: offset of the block in the file; HDF5's first structures fit before it
BLOCK_OFFSET = 4096
_JOURNAL = ".journal"
_JOURNAL_VERSION = 1


class UnfinishedFile:
    """Block of samples of the unfinished data file `path`, appended to in chunks. One process at a time.

    Args:
        source: identifier of the inputs and settings of the conversion. An unfinished file with the same source is continued.
            None: start from scratch under a unique temporary name; an interruption leaves no file.

    Attributes:
        path: temporary path of the file.
        size: size of the block, in bytes.

    Raises:
        OSError: the file cannot be created.
        DataError: another process is writing the same file, or a file of another program has the temporary name.
    """

    def __init__(self, path: Path, source: str | None = None) -> None:
        path = target_of(path)
        self._target, self.keeps = path, source is not None
        self.path = path.with_name(path.name + PARTIAL if self.keeps else f".{path.name}.{processes.own_mark()}.tmp")
        self._journal_path = self.path.with_name(self.path.name + _JOURNAL)
        self.size = self._journal_size = 0
        self.descriptor = self._opened(self.path)
        self._journal: int | None = None
        self._header = _line({"journal": _JOURNAL_VERSION, "source": hashlib.sha256((source or "").encode()).hexdigest()})
        try:
            if self.keeps:
                self._lock()
                if os.fstat(self.descriptor).st_size and not self._journal_path.is_file():
                    raise self._foreign(self.path)  # such as a download of the same name
                self._journal = self._opened(self._journal_path)
            else:
                os.ftruncate(self.descriptor, 0)
        except BaseException:
            self.close()
            raise

    def kept(self) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
        """Yield the existing chunks in order: the data passed to `append`, and the bytes. Must be read to the end.

        Bytes after the last valid chunk are cut off.
        """
        if self._journal is None:
            return
        lines = os.pread(self._journal, os.fstat(self._journal).st_size, 0).splitlines(keepends=True)
        if lines and lines[0] != self._header:
            logging.getLogger(__name__).warning(
                "%s belongs to a conversion of other images or with other options; starting from scratch", self.path
            )
            lines = []
        whole = len(self._header)
        for line in lines[1:]:
            record = _record(line)
            block = None if record is None else self._chunk(record)
            if record is None or block is None:
                break
            whole += len(line)
            self.size += len(block)
            yield record["of"], block
        if not lines:
            os.ftruncate(self._journal, 0)
            write_at(self._journal, self._header, 0)
        os.ftruncate(self._journal, whole)
        self._journal_size = whole
        os.ftruncate(self.descriptor, BLOCK_OFFSET + self.size)
        write_at(self.descriptor, bytes(BLOCK_OFFSET), 0)  # an interrupted `finish` may have written there

    def append(self, block: memoryview, of: dict[str, Any]) -> None:
        """Append a chunk.

        Args:
            of: JSON-compatible data that `kept` yields with the chunk.

        Raises:
            OSError: the chunk cannot be written.
        """
        write_at(self.descriptor, block, BLOCK_OFFSET + self.size)
        if self._journal is not None:  # after the bytes, so that each line describes existing bytes
            line = _line({"bytes": len(block), "crc32": zlib.crc32(block), "of": of})
            write_at(self._journal, line, self._journal_size)
            self._journal_size += len(line)
        self.size += len(block)

    def read(self, start: int, count: int) -> np.ndarray:
        """Return bytes of the block, (count,) uint8, or fewer at the file's end.

        Raises:
            OSError: the bytes cannot be read.
        """
        block = np.empty(count, np.uint8)
        return block[: read_at(self.descriptor, block.data, BLOCK_OFFSET + start)]

    def publish(self) -> None:
        """Rename the finished file, which must be on the disk, to its final name."""
        publish(self.path, self._target)
        self.close()
        if self.keeps:
            self._journal_path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Delete the unfinished file and its journal. No effect after `publish`."""
        if self.descriptor < 0:
            return
        self.path.unlink(missing_ok=True)
        if self.keeps:
            self._journal_path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Close the files without deleting them."""
        for descriptor in (self.descriptor, -1 if self._journal is None else self._journal):
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptor, self._journal = -1, None

    def _lock(self) -> None:
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                raise DataError(f"Another process is writing {self.path}; wait for it, or give another output name.") from error
            # Without locks in the file system, the user must not run two conversions to one name.

    def _opened(self, path: Path) -> int:
        """Open or create a file of the conversion, and return its descriptor."""
        try:
            return open_own(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if os.path.lexists(path):
                raise self._foreign(path, f"({error.strerror})") from error
            raise

    def _foreign(self, path: Path, why: str = "without the journal of a conversion") -> DataError:
        return DataError(
            f"{path} already exists {why}, so another program may have written it; move it away, or give another output name."
        )

    def _chunk(self, record: dict[str, Any]) -> np.ndarray | None:
        """Return the bytes of the next chunk; None if they do not match their checksum."""
        with contextlib.suppress(OSError):
            block = self.read(self.size, record["bytes"])
            if len(block) == record["bytes"] and zlib.crc32(block.data) == record["crc32"]:
                return block
        return None


def _line(content: dict[str, Any]) -> bytes:
    """Return a line of the journal, which begins with its own checksum."""
    text = json.dumps(content, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _record(line: bytes) -> dict[str, Any] | None:
    """Return the content of a journal line; None if the line is incomplete or damaged."""
    if not line.endswith(b"\n") or line[:9] != b"%08x " % zlib.crc32(line[9:-1]):
        return None
    record: dict[str, Any] = json.loads(line[9:])
    return record


#: from this version of its format on, HDF5 stores checksums of its own structures
_LIBVER = ("v110", "v110")
_PAGE_BYTES = 4096


class DataFileWriter:
    """Writer of a data file in chunks. The file appears, complete and on the disk, when the `with` block ends without an error.

    Use as a context manager. After an error no file is left. An interruption (KeyboardInterrupt, a kill) leaves an unfinished
    file if `source` is given, and the next writer with the same `path` and `source` continues it.

    Args:
        path: file to create or replace. Missing directories are created.
        count: maximum number of samples.
        shape: (H, W, C) of every image.
        fit: method by which pictures are resized to the shape ("crop", "squash"), stored in the file.
        source: identifier of the inputs and settings of the conversion; None: an interrupted conversion leaves no file.
        value_range: (low, high) of the values of more than 8 bits that became 0 and 255, stored in the file; None: those of their
            type.

    Attributes:
        done: number of items of the source that are written or skipped.
        skipped: names of skipped items.
    """

    def __init__(
        self,
        path: str | Path,
        count: int,
        shape: tuple[int, int, int],
        class_names: Sequence[str],
        fit: str | None = None,
        source: str | None = None,
        value_range: ValueRange | None = None,
    ) -> None:
        self._value_range = value_range
        self._path, self._count, self.shape = Path(path), count, shape
        self._names, self._fit = [str(name) for name in class_names], fit
        _check(self._path, count, shape, self._names)
        self.done = 0
        self.skipped: list[str] = []
        self._labels: list[np.ndarray] = []
        self._sums: list[int] = []
        self._histogram = np.zeros((shape[2], 256), np.int64)
        self._digest = hashlib.sha256()
        with self._system_errors():
            if self._path.is_dir():
                raise DataError(f"{self._path} is a directory; give the path of a file, such as {self._path / 'train.h5'}.")
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = UnfinishedFile(self._path, source)
            for record, block in self._file.kept():
                self._account(record, block)
        if self.done:
            logging.getLogger(__name__).info("continuing %s after the first %d of %d images", self._file.path, self.done, count)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                with self._system_errors():
                    self._finish()
            elif self._file.keeps and not issubclass(kind, Exception):
                self._file.close()
        finally:
            self._file.discard()

    def _check_images(self, images: np.ndarray) -> None:
        if images.shape[1:] != self.shape or images.dtype != np.uint8:
            raise DataError(
                f"{self._path} must hold uint8 images of shape {self.shape}, not {images.dtype} of {images.shape[1:]}."
            )

    def _add(self, block: memoryview, labels: np.ndarray, skipped: Sequence[str], **more: Any) -> None:
        """Append the stored bytes of samples."""
        assert len(self._sums) + len(labels) <= self._count, "more samples than announced"
        check_labels(self._path, labels, len(self._names), first=len(self._sums))
        record = {"labels": labels.tolist(), "skipped": list(skipped), **more}
        with self._system_errors():
            self._file.append(block, record)
        self._account(record, np.frombuffer(block, np.uint8))

    def _account(self, record: dict[str, Any], block: np.ndarray) -> None:
        """Add a chunk that is already in the file to the totals."""
        self._labels.append(np.array(record["labels"], np.int64))
        self.done += len(record["labels"]) + len(record["skipped"])
        self.skipped += record["skipped"]
        self._digest.update(block.data)

    def _system_errors(self) -> AbstractContextManager[None]:
        return system_errors_as(f"The data file {self._path} cannot be written")

    def _finish(self) -> None:
        if not self._sums:
            raise DataError(f"{self._path} would hold no images; a data file needs at least one.")
        with StoreFile(os.dup(self._file.descriptor)) as stored:
            # Large objects start on a page, so the map has no more pages than the images.
            aligned = {"alignment_threshold": _PAGE_BYTES, "alignment_interval": _PAGE_BYTES}
            with h5py.File(stored, "w", libver=_LIBVER, **aligned) as file:
                self._describe(file)
                mean, std = _moments(self._histogram)
                _put(file, "labels", np.concatenate(self._labels).astype("<i8"))
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
        self._file.publish()

    def _describe(self, file: h5py.File) -> None:
        """Create the dataset of the samples with its attributes."""
        raise NotImplementedError

    def _block(self, file: h5py.File, name: str, shape: tuple[int, ...]) -> h5py.Dataset:
        """Return the dataset of the samples, whose bytes are already in the file."""
        created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        created.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        created.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        created.set_obj_track_times(False)
        space = h5py.h5s.create_simple(shape)
        dataset = h5py.Dataset(h5py.h5d.create(file.id, name.encode(), h5py.h5t.STD_U8LE, space, created))
        if dataset.id.get_offset() != BLOCK_OFFSET:
            assert self._file.size < _PAGE_BYTES, "large objects begin on the first page after the structures"
            dataset[...] = self._file.read(0, self._file.size).reshape(shape)
            os.ftruncate(self._file.descriptor, 0)
        dataset.attrs["sha256"] = np.bytes_(self._digest.hexdigest())
        if self._fit is not None:
            dataset.attrs[FIT] = np.bytes_(self._fit)
        if self._value_range is not None:
            dataset.attrs[RANGE] = np.array(self._value_range, "<f8")
        return dataset


class ImageFileWriter(DataFileWriter):
    """Writer of a data file of pixels; see `DataFileWriter`."""

    def append(self, images: np.ndarray, labels: np.ndarray, skipped: Sequence[str] = ()) -> None:
        """Append images (n, H, W, C) uint8 with labels (n,).

        Args:
            skipped: names of pictures of the source that are left out at this place.

        Raises:
            DataError: the images have another shape, a label is outside 0 .. classes - 1, or the disk is full.
        """
        self._check_images(images)
        assert len(labels) == len(images), "one label per image"
        self._add(np.ascontiguousarray(images).reshape(-1).data, labels, skipped)

    def _account(self, record: dict[str, Any], block: np.ndarray) -> None:
        super()._account(record, block)
        images = block.reshape(-1, *self.shape)
        self._sums += [sum_of(image) for image in images]
        self._histogram += histogram(images)

    def _describe(self, file: h5py.File) -> None:
        self._block(file, "images", (len(self._sums), *self.shape))


class EncodedFileWriter(DataFileWriter):
    """Writer of a data file of picture files; see `DataFileWriter`.

    Args:
        max_pixels: maximum number of pixels of a picture, stored for the readers of the file; None: the decoder's own limit.
    """

    def __init__(self, *arguments: Any, max_pixels: int | None = None, **options: Any) -> None:
        self._max_pixels = max_pixels
        self._sizes: list[int] = []
        self._pixel_sums: list[int] = []
        super().__init__(*arguments, **options)

    def append(self, contents: Sequence[bytes], images: np.ndarray, labels: np.ndarray, skipped: Sequence[str] = ()) -> None:
        """Append picture files, with the images that they decode to; see `ImageFileWriter.append`."""
        self._check_images(images)
        assert len(labels) == len(images) == len(contents), "one label and one file per image"
        images = np.ascontiguousarray(images)
        more = {
            "sizes": [len(content) for content in contents],
            "pixel_sums": [sum_of(image) for image in images],
            "histogram": histogram(images).tolist(),
        }
        self._add(memoryview(b"".join(contents)), labels, skipped, **more)

    def _account(self, record: dict[str, Any], block: np.ndarray) -> None:
        super()._account(record, block)
        ends = np.cumsum([0, *record["sizes"]])
        self._sums += [sum_of(block[start:stop]) for start, stop in itertools.pairwise(ends)]
        self._sizes += record["sizes"]
        self._pixel_sums += record["pixel_sums"]
        self._histogram += np.array(record["histogram"], np.int64)

    def _describe(self, file: h5py.File) -> None:
        block = self._block(file, "blob", (self._file.size,))
        block.attrs[FORM] = np.array(self.shape, "<i8")
        if self._max_pixels is not None:
            block.attrs[MAX_PIXELS] = self._max_pixels
        _put(file, "offsets", np.cumsum([0, *self._sizes]).astype("<i8"))
        _put(file, "pixel_sums", np.array(self._pixel_sums, "<u4"))


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
    with ImageFileWriter(path, count, shape, class_names, fit, value_range=value_range) as writer:
        for images, labels in chunks:
            writer.append(images, labels)


def histogram(images: np.ndarray) -> np.ndarray:
    """Return the number of pixels with each value, by channel, of images (n, H, W, C) uint8: (C, 256) int64."""
    channels = range(images.shape[3])
    return np.stack([np.bincount(images[..., channel].reshape(-1), minlength=256) for channel in channels]).astype(np.int64)


def _check(path: Path, count: int, shape: tuple[int, int, int], names: Sequence[str]) -> None:
    if count < 1:
        raise DataError(f"{path} would hold no images; a data file needs at least one.")
    if min(shape) < 1:
        raise DataError(f"{path} would hold images of shape {shape}; height, width and channels are at least 1.")
    if not names:
        raise DataError(f"{path} would define no classes; give at least one class name.")
    check_names(path, names)


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
