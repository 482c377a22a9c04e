"""Writes data files: in chunks, under a temporary name until they are complete and on disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

import h5py
import numpy as np

from hpctrain.data.files import system_errors_as
from hpctrain.data.stored import FIT, FORMAT, VERSION, check_labels, check_names, chunks, digest_of, names_digest
from hpctrain.errors import DataError
from hpctrain.storage.atomic_write import publish
from hpctrain.storage.guarded_file import GuardedFile

#: HDF5 keeps checksums of its own structures from this version of its format on
_LIBVER = ("v110", "v110")
_PAGE_BYTES = 4096


class ImageFileWriter:
    """Writes a data file in chunks; the file appears, complete and on disk, only when the block ends without an error.

    Use as a context manager. At most `count` samples of `shape` (H, W, C) may be appended; fewer are allowed (unreadable
    images were skipped), which costs one copy.

    Args:
        path: the file to make or replace; its directory is made where it is missing.
        class_names: what label 0, 1, ... means. fit: how pictures are brought to this shape ("crop", "squash"), to be remembered.
    """

    def __init__(
        self, path: str | Path, count: int, shape: tuple[int, int, int], class_names: Sequence[str], fit: str | None = None
    ) -> None:
        self._path = Path(path)
        if count < 1:
            raise DataError(f"{self._path} would hold no image; a data file needs at least one.")
        if min(shape) < 1:
            raise DataError(f"{self._path} would hold images of shape {shape}; height, width and channels are at least 1.")
        if not class_names:
            raise DataError(f"{self._path} would have no class; name at least one.")
        self._names, self._fit = [str(name) for name in class_names], fit
        check_names(self._path, self._names)
        self._temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        self._labels = np.zeros(count, np.int64)
        self._written = 0
        self._histogram = np.zeros((shape[2], 256), np.int64)
        self._digest = hashlib.sha256()
        with self._system_errors():
            if self._path.is_dir():
                raise DataError(f"{self._path} is a directory; give a file to write, such as {self._path / 'train.h5'}.")
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _NewFile(self._temporary, (count, *shape))

    def append(self, images: np.ndarray, labels: np.ndarray) -> None:
        """Add images (n, H, W, C) uint8 with labels (n,).

        Raises:
            DataError: images of another shape, a label outside 0 .. classes - 1, or a disk that is full.
        """
        shape, stop = self._file.images.shape[1:], self._written + len(images)
        if images.shape[1:] != shape or images.dtype != np.uint8:
            raise DataError(f"{self._path} holds uint8 images of shape {shape}, not {images.dtype} of {images.shape[1:]}.")
        assert len(labels) == len(images), "one label per image"
        assert stop <= len(self._labels), "more samples than announced"
        check_labels(self._path, labels, len(self._names), first=self._written)
        images = np.ascontiguousarray(images)
        with self._system_errors():
            self._file.write(slice(self._written, stop), images)
        self._labels[self._written : stop] = labels
        self._digest.update(images.data)
        for channel in range(shape[2]):
            self._histogram[channel] += np.bincount(images[..., channel].reshape(-1), minlength=256)
        self._written = stop

    def __enter__(self) -> ImageFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                with self._system_errors():
                    self._finish()
        finally:
            self._file.abandon()
            self._temporary.unlink(missing_ok=True)

    def _system_errors(self) -> AbstractContextManager[None]:
        return system_errors_as(f"The data file {self._path} cannot be written")

    def _finish(self) -> None:
        if self._written == 0:
            raise DataError(f"{self._path} would hold no image; a data file needs at least one.")
        if self._written < len(self._labels):
            self._shorten()
        mean, std = _moments(self._histogram)
        self._file.add_digest("images", self._digest.hexdigest())
        if self._fit is not None:
            self._file.images.attrs[FIT] = np.bytes_(self._fit)
        self._add("labels", self._labels[: self._written].astype("<i8"))
        self._add("mean", mean.astype("<f8"))
        self._add("std", std.astype("<f8"))
        encoded = [name.encode() for name in self._names]
        text = h5py.string_dtype("utf-8", max(1, *map(len, encoded)))
        self._file.add("class_names", np.array(encoded, text))
        self._file.add_digest("class_names", names_digest(self._names))
        self._file.finish()
        publish(self._temporary, self._path)

    def _add(self, name: str, values: np.ndarray) -> None:
        self._file.add(name, values)
        self._file.add_digest(name, digest_of(values))

    def _shorten(self) -> None:
        """Copy the written images into a file of its true size (a contiguous dataset cannot shrink)."""
        path = self._temporary.with_suffix(".short")
        try:
            short = _NewFile(path, (self._written, *self._file.images.shape[1:]))
            for piece in chunks(short.images.shape):
                short.write(piece, self._file.images[piece])
            self._file.abandon()
            self._file = short
            os.replace(path, self._temporary)
        finally:
            path.unlink(missing_ok=True)


class _NewFile:
    """An HDF5 file in the making; its methods raise the OSError of the first write that the system refused.

    Attributes:
        images: (N, H, W, C) uint8, contiguous.
    """

    def __init__(self, path: Path, shape: tuple[int, ...]) -> None:
        self._guarded = GuardedFile(path)
        # Large objects start on a page, so that the map needs no more pages than the images have.
        self._file = h5py.File(
            self._guarded, "w", libver=_LIBVER, alignment_threshold=_PAGE_BYTES, alignment_interval=_PAGE_BYTES
        )
        self.images = self._file.create_dataset("images", shape, np.uint8)

    def write(self, samples: slice, images: np.ndarray) -> None:
        self.images[samples] = images
        if self._guarded.error is not None:
            raise self._guarded.error

    def add(self, name: str, values: np.ndarray) -> None:
        self._file.create_dataset(name, data=values)

    def add_digest(self, name: str, digest: str) -> None:
        self._file[name].attrs["sha256"] = np.bytes_(digest)

    def finish(self) -> None:
        """Say what the file is, and bring it to the disk."""
        self._file.attrs["format"] = np.bytes_(FORMAT)
        self._file.attrs["version"] = VERSION
        self._file.close()
        self._guarded.close()

    def abandon(self) -> None:
        """Let go of the file, which is of no more use; does nothing after `finish`."""
        self._file.close()
        self._guarded.abandon()


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
