"""HDF5 files of other programs, with one dataset of images and one of labels."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import h5py
import numpy as np

from hpctrain.core.errors import DataError
from hpctrain.data.convert.common import Advance, no_progress, numbered_names, require_memory
from hpctrain.data.files import require_file, require_new, system_errors_as
from hpctrain.data.readers import reason
from hpctrain.data.writer import write_data_file

Layout = Literal["nhwc", "nchw"]

_CHANNELS = (1, 3, 4)
_BYTES_AT_ONCE, _MOST_BYTES_OF_CHUNKS = 16 << 20, 256 << 20
_SHOWN = 20


@dataclass(frozen=True)
class ForeignImages:
    """Images and labels of an open file.

    Attributes:
        images: (N, H, W), (N, H, W, C) or, if `channels_first`, (N, C, H, W).
        channels_first: whether channels precede height and width.
        labels: (N,) int64.
        classes: minimum number of classes.
    """

    path: Path
    images: h5py.Dataset
    channels_first: bool
    labels: np.ndarray
    classes: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of an image, (H, W, C)."""
        sizes = self.images.shape[1:]
        if len(sizes) == 2:
            return sizes[0], sizes[1], 1
        return (sizes[1], sizes[2], sizes[0]) if self.channels_first else sizes


@contextmanager
def opened(path: Path, images: str = "images", labels: str = "labels", layout: Layout | None = None) -> Iterator[ForeignImages]:
    """Open a file and read its labels.

    Args:
        images: name of the dataset of images, such as group/x.
        labels: name of the dataset of labels: whole numbers (N,) or (N, 1), or one-hot (N, K).
        layout: layout of images with 4 dims; None: channels are the second or the last dim, if exactly one of these is 1, 3 or 4.

    Raises:
        DataError: the file is missing, unreadable or not HDF5; a dataset is missing; or the datasets do not hold images and
            labels.
    """
    require_file(path, "foreign HDF5 file", "give the path of an existing one")
    with _errors_of(path, "cannot be read"):
        file = h5py.File(path, "r", locking=False)
    with file:
        with _errors_of(path, "cannot be read"):
            pixels, targets = _dataset(path, file, images, "--images"), _dataset(path, file, labels, "--labels")
            source = ForeignImages(path, pixels, _check_images(path, pixels, layout), *_labels(path, targets, pixels))
        yield source


def convert(
    source: ForeignImages,
    out: Path,
    class_names: Sequence[str] | None = None,
    *,
    overwrite: bool = False,
    advance: Advance = no_progress,
) -> None:
    """Write the images and labels of an open file as one data file.

    Raises:
        DataError: a pixel is outside 0 .. 255, a label has no class name, a part is unreadable, the disk has too little space, or
            `out` exists.
    """
    require_new(out, overwrite)
    names = numbered_names(source.labels, source.path, source.classes) if class_names is None else class_names
    count, needed = len(source.labels), len(source.labels) * math.prod(source.shape)
    folder = next(folder for folder in out.absolute().parents if folder.is_dir())
    with system_errors_as(f"The data file {out} cannot be written"):
        free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"The images in {source.path} need {needed:,} bytes, but the disk of {out} has {free:,} free; write to another disk."
        )
    write_data_file(out, count, source.shape, names, _chunks(source, advance))


def _dataset(path: Path, file: h5py.File, key: str, option: str) -> h5py.Dataset:
    try:
        found = file[key]
    except (KeyError, ValueError, RuntimeError):
        found = None
    if not isinstance(found, h5py.Dataset):
        names: list[str] = []
        file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        available = ", ".join(names[:_SHOWN]) or "none"
        more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise DataError(f"{path} has no dataset {key!r} (it has {available}{more}); select one with {option}.")
    return found


def _check_images(path: Path, images: h5py.Dataset, layout: Layout | None) -> bool:
    """Check the dataset of images, and return whether channels come first.

    Raises:
        DataError: the dataset does not hold whole numbers or images, is not stored in the file, or has an ambiguous layout.
    """
    shape = _shape(images)
    name = f"{images.name[1:]} in {path}"
    if images.dtype.kind not in "iu":
        raise DataError(
            f"{name} holds values of type {images.dtype}, but images must be whole numbers 0..255; scale and round them first."
        )
    if len(shape) not in (3, 4) or min(shape) < 1:
        raise DataError(f"{name} holds an array of {shape}; images must be (N, H, W), (N, H, W, C) or (N, C, H, W).")
    if images.is_virtual:
        others = [each.file_name for each in images.virtual_sources() if each.file_name != "."]
        missing = [name for name in others if not (path.parent / name).is_file()]
        if missing:
            raise DataError(f"{name} refers to other files, and {missing[0]} is missing; copy it to {path.parent}.")
    elif images.id.get_storage_size() == 0:
        raise DataError(f"{name} has shape {shape}, but no values were written; write the images first.")
    if images.chunks is not None:
        require_memory(math.prod(images.chunks) * images.dtype.itemsize, f"A chunk of {name}")
    require_memory(math.prod(shape[1:]) * images.dtype.itemsize, f"An image of {name}")
    if len(shape) == 3:
        return False
    first, last = shape[1] in _CHANNELS, shape[3] in _CHANNELS
    if layout is None and first == last:
        raise DataError(f"{name} holds an array of {shape}, in which channels may be first or last; give --layout nchw or nhwc.")
    return first if layout is None else layout == "nchw"


def _shape(dataset: h5py.Dataset) -> tuple[int, ...]:
    return tuple(dataset.shape or ())  # a null dataset has no shape


def _labels(path: Path, labels: h5py.Dataset, images: h5py.Dataset) -> tuple[np.ndarray, int]:
    """Return (labels (N,) int64, minimum number of classes).

    Raises:
        DataError: the dataset does not hold one whole number, or one one-hot row, per image.
    """
    count, shape = _shape(images)[0], _shape(labels)
    name = f"{labels.name[1:]} in {path}"
    one_hot = len(shape) == 2 and shape[0] == count and shape[1] > 1
    if labels.dtype.kind not in "iufb" or not (one_hot or (shape and math.prod(shape) == count)):
        raise DataError(
            f"{name} holds {labels.dtype} of shape {shape}; labels of {count} images must be whole numbers, ({count},) or "
            f"({count}, 1), or one-hot rows ({count}, K)."
        )
    require_memory(2 * labels.nbytes, name)
    values = np.asarray(labels[()])
    if one_hot:
        wrong = np.flatnonzero(~(((values == 0) | (values == 1)).all(1) & (values.sum(1) == 1)))
        if wrong.size:
            raise DataError(f"{name} is not one-hot: row {int(wrong[0])} of {shape} does not have a single 1 among zeros.")
        return values.argmax(1).astype(np.int64), shape[1]
    values = values.reshape(-1)
    if values.dtype.kind == "f":
        wrong = np.flatnonzero(~(np.isfinite(values) & (values == np.floor(values)) & (np.abs(values) < 1 << 31)))
        if wrong.size:
            label = f"{name} has label {values[wrong[0]]} for image {int(wrong[0])}"
            raise DataError(f"{label}; labels must be whole numbers between -2^31 and 2^31.")
    return values.astype(np.int64), 1


def _chunks(source: ForeignImages, advance: Advance) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    images, one = source.images, math.prod(source.shape) * source.images.dtype.itemsize
    rows = images.chunks[0] if images.chunks else 1  # HDF5 decompresses chunks as a whole
    step = max(1, _BYTES_AT_ONCE // one, min(rows, _MOST_BYTES_OF_CHUNKS // one))
    for start in range(0, len(source.labels), step):
        with _errors_of(source.path, f"cannot be read from image {start} on"):
            values = np.asarray(images[start : start + step])
        if values.dtype != np.uint8:
            wrong = np.flatnonzero(((values < 0) | (values > 255)).reshape(len(values), -1).any(1))
            if wrong.size:
                raise DataError(f"{source.path} has pixels outside 0..255 in image {start + int(wrong[0])}; scale them first.")
            values = values.astype(np.uint8)
        if source.channels_first:
            values = values.transpose(0, 2, 3, 1)
        yield np.ascontiguousarray(values).reshape(-1, *source.shape), source.labels[start : start + step]
        advance(len(values))


@contextmanager
def _errors_of(path: Path, what: str) -> Iterator[None]:
    """Turn any error inside the block into a `DataError`.

    Raises:
        DataError: the block raised an error.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # h5py raises almost anything for damaged files
        why = reason(error) or (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise DataError(f"The HDF5 file {path} {what}: {why}.") from error
