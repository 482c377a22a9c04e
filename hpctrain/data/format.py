"""The one data format: an HDF5 file with all images of a split, uint8, in one contiguous block.

| object        | shape          | type    | what it holds |
|---------------|----------------|---------|---------------|
| `images`      | (N, H, W, C)   | uint8   | contiguous, unfiltered: readable by offset |
| `labels`      | (N,)           | int64   | 0 .. classes - 1 |
| `class_names` | (classes,)     | string  | |
| `mean`, `std` | (C,)           | float64 | per channel over the whole file, in units of 0..1 |

Attributes of the root: `format`, `version`; of each dataset: `sha256` of its bytes. HDF5 opens the file, without locks, to learn
where the images lie; from then on they are a memory map, so that reading a sample is a copy from the page cache.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import h5py
import numpy as np

from hpctrain.errors import DataError

FORMAT = "hpctrain-images"
VERSION = 1
_CHUNK_BYTES = 16 << 20
_PAGE_BYTES = 4096


class ImageFileWriter:
    """Writes a data file in chunks; the file appears, complete and on disk, only when the block ends without an error.

    Use as a context manager. At most `count` samples of `shape` (H, W, C) may be appended; fewer are allowed (unreadable
    images were skipped), which costs one copy.

    Args:
        path: the file to make or replace; its directory is made where it is missing.
        class_names: what label 0, 1, ... means.
    """

    def __init__(self, path: str | Path, count: int, shape: tuple[int, int, int], class_names: Sequence[str]) -> None:
        self._path = Path(path)
        if count < 1:
            raise DataError(f"{self._path} would hold no image; a data file needs at least one.")
        if min(shape) < 1:
            raise DataError(f"{self._path} would hold images of shape {shape}; height, width and channels are at least 1.")
        if not class_names:
            raise DataError(f"{self._path} would have no class; name at least one.")
        self._names = [str(name) for name in class_names]
        self._temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _create(self._temporary)
        self._images = self._file.create_dataset("images", (count, *shape), np.uint8)
        self._labels = np.zeros(count, np.int64)
        self._written = 0
        self._histogram = np.zeros((shape[2], 256), np.int64)
        self._digest = hashlib.sha256()

    def append(self, images: np.ndarray, labels: np.ndarray) -> None:
        """Add images (n, H, W, C) uint8 with labels (n,).

        Raises:
            DataError: images of another shape, or a label outside 0 .. classes - 1.
        """
        shape, stop = self._images.shape[1:], self._written + len(images)
        if images.shape[1:] != shape or images.dtype != np.uint8:
            raise DataError(f"{self._path} holds uint8 images of shape {shape}, not {images.dtype} of {images.shape[1:]}.")
        assert len(labels) == len(images), "one label per image"
        assert stop <= len(self._labels), "more samples than announced"
        _check_labels(self._path, labels, len(self._names), first=self._written)
        images = np.ascontiguousarray(images)
        self._images[self._written : stop] = images
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
                self._finish()
        finally:
            self._file.close()
            self._temporary.unlink(missing_ok=True)

    def _finish(self) -> None:
        if self._written == 0:
            raise DataError(f"{self._path} would hold no image; a data file needs at least one.")
        if self._written < len(self._labels):
            self._shorten()
        mean, std = _moments(self._histogram)
        self._images.attrs["sha256"] = self._digest.hexdigest()
        self._add("labels", self._labels[: self._written].astype("<i8"))
        self._add("mean", mean.astype("<f8"))
        self._add("std", std.astype("<f8"))
        names = self._file.create_dataset("class_names", data=self._names, dtype=h5py.string_dtype())
        names.attrs["sha256"] = _names_digest(self._names)
        self._file.attrs["format"] = FORMAT
        self._file.attrs["version"] = VERSION
        self._file.close()
        _publish(self._temporary, self._path)

    def _add(self, name: str, values: np.ndarray) -> None:
        self._file.create_dataset(name, data=values).attrs["sha256"] = hashlib.sha256(values.tobytes()).hexdigest()

    def _shorten(self) -> None:
        """Copy what was written into a file of its true size (a contiguous dataset cannot shrink)."""
        short = self._temporary.with_suffix(".short")
        try:
            with _create(short) as target:
                images = target.create_dataset("images", (self._written, *self._images.shape[1:]), np.uint8)
                for part in _chunks(images.shape):
                    images[part] = self._images[part]
            self._file.close()
            os.replace(short, self._temporary)
        finally:
            short.unlink(missing_ok=True)
        self._file = h5py.File(self._temporary, "r+", locking=False)
        self._images = self._file["images"]


class ImageFile:
    """An open data file. It holds no file handle: only a read-only memory map, which ends with the object.

    Attributes:
        images: (N, H, W, C) uint8, read-only map. labels: (N,) int64, in memory. class_names: one per class.
        mean, std: (C,) float64, in units of 0..1.
    """

    def __init__(
        self,
        path: Path,
        images: np.ndarray,
        labels: np.ndarray,
        class_names: tuple[str, ...],
        moments: tuple[np.ndarray, np.ndarray],
        manifest: dict[str, str],
    ) -> None:
        self.path = path
        self.images = images
        self.labels = labels
        self.class_names = class_names
        self.mean, self.std = moments
        self.manifest = manifest

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, C) of every image."""
        height, width, channels = self.images.shape[1:]
        return height, width, channels

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def open(cls, path: str | Path) -> ImageFile:
        """Open for reading, without file locks (parallel file systems often have none).

        Raises:
            DataError: missing, truncated, empty, not of this format, or with a label outside 0 .. classes - 1.
        """
        path = Path(path)
        if not path.is_file():
            raise DataError(
                f"There is no data file {path}; make it with `hpctrain data convert`, or with "
                "`hpctrain data fetch fashion-mnist --out DIRECTORY`."
            )
        try:
            with h5py.File(path, "r", locking=False) as file:
                return cls._read(path, file)
        except (OSError, KeyError, RuntimeError) as error:
            reason = "is truncated" if "truncated" in str(error) else "is damaged, or not an HDF5 file"
            raise DataError(f"The data file {path} {reason}; make it again with `hpctrain data convert` or `fetch`.") from error

    @classmethod
    def _read(cls, path: Path, file: h5py.File) -> ImageFile:
        _check_format(path, file)
        labels = np.asarray(file["labels"][()], np.int64)
        names = tuple(name.decode() for name in file["class_names"][()])
        if not labels.size:
            raise DataError(f"The data file {path} holds no image; at least one is needed.")
        _check_labels(path, labels, len(names))
        moments = np.asarray(file["mean"][()], np.float64), np.asarray(file["std"][()], np.float64)
        manifest = {name: str(file[name].attrs["sha256"]) for name in ("images", "labels", "class_names", "mean", "std")}
        return cls(path, _map(path, file["images"], len(labels), len(moments[0])), labels, names, moments, manifest)

    def verify(self) -> None:
        """Compare every dataset with its sha256; reads the whole file.

        Raises:
            DataError: names the dataset that changed since it was written.
        """
        images = hashlib.sha256()
        for part in _chunks(self.images.shape):
            images.update(np.ascontiguousarray(self.images[part]).data)
        found = {
            "images": images.hexdigest(),
            "labels": hashlib.sha256(self.labels.astype("<i8").tobytes()).hexdigest(),
            "mean": hashlib.sha256(self.mean.astype("<f8").tobytes()).hexdigest(),
            "std": hashlib.sha256(self.std.astype("<f8").tobytes()).hexdigest(),
            "class_names": _names_digest(self.class_names),
        }
        wrong = [name for name, digest in found.items() if self.manifest[name] != digest]
        if wrong:
            raise DataError(f"In {self.path} {', '.join(wrong)} changed since the file was written; make it again.")


def write(
    path: str | Path,
    count: int,
    shape: tuple[int, int, int],
    class_names: Sequence[str],
    chunks: Iterable[tuple[np.ndarray, np.ndarray]],
) -> None:
    """Write (images, labels) chunks as one data file; see `ImageFileWriter`."""
    with ImageFileWriter(path, count, shape, class_names) as writer:
        for images, labels in chunks:
            writer.append(images, labels)


def _create(path: Path) -> h5py.File:
    # Large objects start on a page, so that the map needs no more pages than the images have.
    return h5py.File(path, "w", locking=False, alignment_threshold=_PAGE_BYTES, alignment_interval=_PAGE_BYTES)


def _publish(temporary: Path, path: Path) -> None:
    """Give a complete file its name once its bytes are on disk, and make the name durable too."""
    _sync(temporary)
    os.replace(temporary, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _chunks(shape: tuple[int, ...]) -> Iterator[slice]:
    """Slices of the first dim of a uint8 array, of about 16 MiB each."""
    samples = max(1, _CHUNK_BYTES // max(1, int(np.prod(shape[1:], dtype=np.int64))))
    for start in range(0, shape[0], samples):
        yield slice(start, min(start + samples, shape[0]))


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


def _names_digest(names: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(names), ensure_ascii=False).encode()).hexdigest()


def _check_labels(path: Path, labels: np.ndarray, classes: int, first: int = 0) -> None:
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if wrong.size:
        raise DataError(
            f"In {path} sample {first + int(wrong[0])} has label {int(labels[wrong[0]])}, which is outside 0..{classes - 1} "
            f"({classes} classes, {wrong.size} such labels)."
        )


def _check_format(path: Path, file: h5py.File) -> None:
    found, version = file.attrs.get("format"), file.attrs.get("version")
    if found != FORMAT:
        raise DataError(f"{path} is an HDF5 file, but not a data file of hpctrain; make one with `hpctrain data convert`.")
    if version != VERSION:
        raise DataError(f"{path} has version {version} of the data format, this hpctrain reads {VERSION}; convert it again.")


def _map(path: Path, images: h5py.Dataset, count: int, channels: int) -> np.ndarray:
    """Memory map of a contiguous dataset."""
    offset = images.id.get_offset()
    if images.ndim != 4 or images.dtype != np.uint8 or offset is None:
        raise DataError(f"{path} does not hold contiguous uint8 images (N, H, W, C); convert it again.")
    if images.shape[0] != count or images.shape[3] != channels:
        raise DataError(f"{path} holds images of {images.shape}, but {count} labels and means of {channels} channels.")
    if offset + images.size > path.stat().st_size:
        raise DataError(f"The data file {path} is truncated: {offset + images.size} bytes are needed, it has fewer.")
    return np.asarray(np.memmap(path, np.uint8, "r", offset, images.shape))
