"""Writes data files: in chunks, under a temporary name until they are complete and on disk."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np

from hpctrain.data.files import system_errors_as
from hpctrain.data.format import ENCODED_VERSION, FIT, FORM, FORMAT, MAX_PIXELS, VERSION, check_labels, check_names, digest_of, names_digest, sum_of
from hpctrain.data.unfinished import BLOCK_OFFSET, UnfinishedFile
from hpctrain.core.errors import DataError
from hpctrain.log import get_logger
from hpctrain.storage.store_file import StoreFile

#: HDF5 keeps checksums of its own structures from this version of its format on
_LIBVER = ("v110", "v110")
_PAGE_BYTES = 4096


class DataFileWriter:
    """Writes a data file in chunks; the file appears, complete and on disk, only when the block ends without an error.

    Use as a context manager. An error leaves nothing. An interruption (KeyboardInterrupt, a kill) leaves the beginning, if
    `source` is given, and the next writer with the same `path` and `source` goes on behind it.

    Args:
        path: the file to make or replace; its directory is made where it is missing. count: samples at most.
        shape: (H, W, C) of every image. class_names: what label 0, 1, ... means.
        fit: how pictures are brought to this shape ("crop", "squash"), to be remembered.
        source: names all that the file is made of and how; None: nothing is kept of an interrupted one.

    Attributes:
        shape: as given. done: items of the source that are dealt with. skipped: names of those that were left out.
    """

    def __init__(
        self,
        path: str | Path,
        count: int,
        shape: tuple[int, int, int],
        class_names: Sequence[str],
        fit: str | None = None,
        source: str | None = None,
    ) -> None:
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
                raise DataError(f"{self._path} is a directory; give a file to write, such as {self._path / 'train.h5'}.")
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = UnfinishedFile(self._path, source)
            for record, block in self._file.kept():
                self._account(record, block)
        if self.done:
            get_logger(__name__).info("going on with %s behind the first %d of %d images", self._file.path, self.done, count)

    def __enter__(self) -> DataFileWriter:
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

    @property
    def _written(self) -> int:
        """Samples so far."""
        return len(self._sums)

    def _check_images(self, images: np.ndarray) -> None:
        if images.shape[1:] != self.shape or images.dtype != np.uint8:
            raise DataError(f"{self._path} holds uint8 images of shape {self.shape}, not {images.dtype} of {images.shape[1:]}.")

    def _add(self, block: memoryview, labels: np.ndarray, skipped: Sequence[str], **more: Any) -> None:
        """Append the stored bytes of some samples."""
        assert self._written + len(labels) <= self._count, "more samples than announced"
        check_labels(self._path, labels, len(self._names), first=self._written)
        record = {"labels": labels.tolist(), "skipped": list(skipped), **more}
        with self._system_errors():
            self._file.append(block, record)
        self._account(record, np.frombuffer(block, np.uint8))

    def _account(self, record: dict[str, Any], block: np.ndarray) -> None:
        """Take note of a chunk, which is in the file."""
        self._labels.append(np.array(record["labels"], np.int64))
        self.done += len(record["labels"]) + len(record["skipped"])
        self.skipped += record["skipped"]
        self._digest.update(block.data)

    def _system_errors(self) -> AbstractContextManager[None]:
        return system_errors_as(f"The data file {self._path} cannot be written")

    def _finish(self) -> None:
        if self._written == 0:
            raise DataError(f"{self._path} would hold no image; a data file needs at least one.")
        with StoreFile(self._file.path, keep=True) as stored:
            # Large objects start on a page, so that the map needs no more pages than the images have.
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
            stored.finish()
        self._file.publish()

    def _describe(self, file: h5py.File) -> None:
        """Make the dataset of the samples, and say what they are."""
        raise NotImplementedError

    def _block(self, file: h5py.File, name: str, shape: tuple[int, ...]) -> h5py.Dataset:
        """The dataset of the samples, whose bytes are in the file already."""
        created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        created.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        created.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        created.set_obj_track_times(False)
        space = h5py.h5s.create_simple(shape)
        dataset = h5py.Dataset(h5py.h5d.create(file.id, name.encode(), h5py.h5t.STD_U8LE, space, created))
        if dataset.id.get_offset() != BLOCK_OFFSET:
            assert self._file.size < _PAGE_BYTES, "large objects begin on the first page behind the structures"
            dataset[...] = np.frombuffer(self._file.read(0, self._file.size), np.uint8).reshape(shape)
            self._file.clear()
        dataset.attrs["sha256"] = np.bytes_(self._digest.hexdigest())
        if self._fit is not None:
            dataset.attrs[FIT] = np.bytes_(self._fit)
        return dataset


class ImageFileWriter(DataFileWriter):
    """Writes a data file of pixels; see `DataFileWriter`."""

    def __enter__(self) -> ImageFileWriter:
        return self

    def append(self, images: np.ndarray, labels: np.ndarray, skipped: Sequence[str] = ()) -> None:
        """Add images (n, H, W, C) uint8 with labels (n,).

        Args:
            skipped: names of pictures of the source that are left out with these.

        Raises:
            DataError: images of another shape, a label outside 0 .. classes - 1, or a disk that is full.
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
        self._block(file, "images", (self._written, *self.shape))
        file.attrs["version"] = VERSION


class EncodedFileWriter(DataFileWriter):
    """Writes a data file of picture files; see `DataFileWriter`.

    Args:
        max_pixels: of the largest picture; stored for the readers of the file. None: the decoder's own limit.
    """

    def __init__(self, *arguments: Any, max_pixels: int | None = None, **options: Any) -> None:
        self._max_pixels = max_pixels
        self._sizes: list[int] = []
        self._pixel_sums: list[int] = []
        super().__init__(*arguments, **options)

    def __enter__(self) -> EncodedFileWriter:
        return self

    def append(
        self,
        contents: Sequence[bytes],
        images: np.ndarray,
        labels: np.ndarray,
        skipped: Sequence[str] = (),
    ) -> None:
        """Add the contents of picture files, with the images (n, H, W, C) uint8 that they decode to and labels (n,).

        Args:
            skipped: names of pictures of the source that are left out with these.

        Raises:
            DataError: images of another shape, a label outside 0 .. classes - 1, or a disk that is full.
        """
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
        file.attrs["version"] = ENCODED_VERSION


def write(
    path: str | Path,
    count: int,
    shape: tuple[int, int, int],
    class_names: Sequence[str],
    chunks: Iterable[tuple[np.ndarray, np.ndarray]],
    fit: str | None = None,
) -> None:
    """Write (images, labels) chunks as one data file; see `ImageFileWriter`."""
    with ImageFileWriter(path, count, shape, class_names, fit) as writer:
        for images, labels in chunks:
            writer.append(images, labels)


def histogram(images: np.ndarray) -> np.ndarray:
    """(C, 256) int64: how often each value is in each channel of images (n, H, W, C) uint8."""
    channels = range(images.shape[3])
    return np.stack([np.bincount(images[..., channel].reshape(-1), minlength=256) for channel in channels]).astype(np.int64)


def _check(path: Path, count: int, shape: tuple[int, int, int], names: Sequence[str]) -> None:
    if count < 1:
        raise DataError(f"{path} would hold no image; a data file needs at least one.")
    if min(shape) < 1:
        raise DataError(f"{path} would hold images of shape {shape}; height, width and channels are at least 1.")
    if not names:
        raise DataError(f"{path} would have no class; name at least one.")
    check_names(path, names)


def _put(file: h5py.File, name: str, values: np.ndarray) -> None:
    """A dataset with its checksum."""
    file.create_dataset(name, data=values).attrs["sha256"] = np.bytes_(digest_of(values))


def _moments(histogram: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and population standard deviation per channel of values 0..255 scaled to 0..1; exact sums, in integers."""
    mean, std = [], []
    for counts in histogram.tolist():
        n = sum(counts)
        total = sum(value * count for value, count in enumerate(counts))
        squares = sum(value * value * count for value, count in enumerate(counts))
        mean.append(total / n / 255)
        std.append((n * squares - total * total) ** 0.5 / n / 255)
    return np.array(mean), np.array(std)
