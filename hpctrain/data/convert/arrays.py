"""Arrays of images and labels: `.npz` and `.npy` files, and the functions that `hdf5` shares.

Labels are integers or one-hot rows. Images are integers of 8 bits, or deeper integers or floating-point numbers, which are scaled
to 8 bits from a range that is given or measured over all images.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hpctrain.core.errors import DataError, errors_as
from hpctrain.core.files import open_regular
from hpctrain.data.convert.common import Advance, named_labels, no_progress, range_up_to, require_memory
from hpctrain.data.decoding import scaled
from hpctrain.data.files import require_file, require_new, system_errors_as
from hpctrain.data.readers import ValueRange
from hpctrain.data.writer import write_data_file
from hpctrain.storage.hdf5_store import system_reason

Layout = Literal["nhwc", "nchw"]

_CHANNELS = (1, 3, 4)
_BYTES_AT_ONCE, _MOST_BYTES_OF_CHUNKS = 16 << 20, 256 << 20
#: names of the arrays of images and of labels that are looked for, in this order
IMAGES, LABELS = ("x", "images", "data"), ("y", "labels", "targets")
_LARGEST_BYTE = 255
#: ranges of floating-point numbers that need no --range and are not stored
_FLOAT_RANGES: tuple[ValueRange, ...] = ((0.0, 1.0), (0.0, float(_LARGEST_BYTE)))


@dataclass(frozen=True)
class ForeignImages:
    """Images and labels of another program.

    Attributes:
        images: array or HDF5 dataset (N, H, W), (N, H, W, C) or, if `channels_first`, (N, C, H, W).
        channels_first: whether channels precede height and width.
        labels: (N,) int64.
        classes: minimum number of classes.
        errors: function from the end of a sentence, such as "cannot be read", to a context that turns errors into `DataError`.
    """

    path: Path
    images: Any
    channels_first: bool
    labels: np.ndarray
    classes: int
    errors: Callable[[str], AbstractContextManager[None]]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of an image, (H, W, C)."""
        sizes = self.images.shape[1:]
        if len(sizes) == 2:
            return sizes[0], sizes[1], 1
        return (sizes[1], sizes[2], sizes[0]) if self.channels_first else sizes

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (number of the first image, images as stored) of consecutive blocks of about 16 MiB.

        Raises:
            DataError: a part cannot be read, or a value is not finite.
        """
        one, chunks = math.prod(self.shape) * self.images.dtype.itemsize, getattr(self.images, "chunks", None)
        rows = chunks[0] if chunks else 1  # HDF5 decompresses chunks as a whole
        step = max(1, _BYTES_AT_ONCE // one, min(rows, _MOST_BYTES_OF_CHUNKS // one))
        for start in range(0, len(self.labels), step):
            with self.errors(f"cannot be read from image {start} on"):
                values = np.asarray(self.images[start : start + step])
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                wrong = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(1))
                raise DataError(f"{self.path} has a value that is not finite in image {start + int(wrong[0])}; correct it.")
            yield start, values


def opened(file: Path, images: str | None = None, labels: str | None = None, layout: Layout | None = None) -> ForeignImages:
    """Read the arrays of an .npz file, or of an .npy file of images and one of labels.

    Args:
        images: name of the array of images; None: one of `IMAGES`. Ignored for an .npy file.
        labels: name of the array of labels, or path of an .npy file; None: one of `LABELS`.
        layout: layout of images with 4 dims; None: see `channels_first`.

    Raises:
        DataError: a file is missing, damaged or too large for memory; an array is missing; or the arrays do not hold images and
            labels.
    """
    require_file(file, "file of arrays", "give the path of an existing .npz or .npy")
    if file.suffix == ".npy":
        if labels is None:
            raise DataError(f"{file} holds images only; give the .npy file of their labels in --labels.")
        pixels, targets = _npy(file), _npy(Path(labels))
        names = str(file), labels
    else:
        with _data_errors(file, "cannot be read"), open(open_regular(file), "rb") as content:  # NumPy leaves a damaged file open
            arrays = np.load(content, allow_pickle=False)
            if not hasattr(arrays, "zip"):
                raise DataError(f"{file} holds a single array; rename it to .npy, and give the labels in --labels.")
            chosen = _key(file, arrays, images, IMAGES, "--images"), _key(file, arrays, labels, LABELS, "--labels")
            sizes = {member.filename.removesuffix(".npy"): member.file_size for member in arrays.zip.infolist()}
            require_memory(sum(sizes[key] for key in chosen), file)
            pixels, targets = (np.asarray(arrays[key]) for key in chosen)
        names = f"{chosen[0]} in {file}", f"{chosen[1]} in {file}"
    first = channels_first(names[0], pixels.shape, pixels.dtype, layout)
    values, classes = class_labels(names[1], targets, len(pixels))
    return ForeignImages(file, pixels, first, values, classes, partial(_data_errors, file))


def _npy(path: Path) -> np.ndarray:
    require_file(path, "array file", "give the path of an existing .npy")
    with _data_errors(path, "cannot be read"):
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


def _key(file: Path, arrays: Any, key: str | None, usual: Sequence[str], option: str) -> str:
    """Return `key`, the name of an array, or by default the first of the `usual` names that the file has.

    Raises:
        DataError: there is no such array. The message lists the first 20 arrays.
    """
    found = next((name for name in (usual if key is None else (key,)) if name in arrays.files), None)
    if found is None:
        available = ", ".join(arrays.files[:20]) or "none"
        raise DataError(f"{file} has no array {' or '.join(usual) if key is None else key} (it has {available}); give {option}.")
    return found


def _data_errors(path: Path, what: str) -> AbstractContextManager[None]:
    return errors_as(DataError, lambda why: f"{path} {what}: {why}.", system_reason)


def convert(
    source: ForeignImages,
    out: Path,
    class_names: Sequence[str] | None = None,
    *,
    value_range: ValueRange | None = None,
    measures: bool = True,
    overwrite: bool = False,
    advance: Advance = no_progress,
) -> None:
    """Write images and labels as one data file.

    Args:
        value_range: values that become 0 and 255; values beyond them are clipped. None: integers are kept if none is above 255,
            and other values are scaled from the range that is measured over all images.
        measures: whether the range of integers above 255 may be measured; False: such integers need `value_range`.

    Raises:
        DataError: the values have no known range, a label has no class name, a part is unreadable, the disk has too little space,
            or `out` exists.
    """
    require_new(out, overwrite)
    labels, names = named_labels(source.labels, class_names, source.path, source.classes)
    source = replace(source, labels=labels)
    count, needed = len(source.labels), len(source.labels) * math.prod(source.shape)
    folder = next(folder for folder in out.absolute().parents if folder.is_dir())
    with system_errors_as(f"The data file {out} cannot be written"):
        free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"The images in {source.path} need {needed:,} bytes, but the disk of {out} has {free:,} free; write to another disk."
        )
    measured = _measured(source) if value_range is None else None
    if measured is not None and not measures and source.images.dtype.kind in "iu":
        raise DataError(
            f"The images in {source.path} have values above 255, but the data file of the class names has no range for them; "
            f"give the values of black and white, such as --range {measured[0]:g} {measured[1]:g}."
        )
    value_range = measured if value_range is None else value_range
    stored = value_range if source.images.dtype.kind in "iu" or value_range not in _FLOAT_RANGES else None
    write_data_file(out, count, source.shape, names, _chunks(source, value_range, advance), value_range=stored)


def _measured(source: ForeignImages) -> ValueRange | None:
    """Return the range of the values of all images; None if they are integers up to 255.

    Raises:
        DataError: some values are negative, integers of more than 16 bits, or floating-point numbers above 1 that are not all
            whole numbers up to 255, so that their range is unknown.
    """
    dtype = source.images.dtype
    if dtype == np.uint8:
        return None
    least, most, whole = math.inf, -math.inf, True
    for _, values in source.blocks():
        least, most = min(least, float(values.min())), max(most, float(values.max()))
        whole = whole and (dtype.kind != "f" or bool((values == np.rint(values)).all()))
    is_byte, is_unit = whole and most <= _LARGEST_BYTE, most <= 1
    if least < 0 or most >= 1 << 16 or (dtype.kind == "f" and not (is_byte or is_unit)):
        usual = [low_high for low_high in _FLOAT_RANGES if dtype.kind == "f" and least >= 0 and most <= _LARGEST_BYTE]
        ranges = [f"--range {low:g} {high:g}" for low, high in usual or [(min(0.0, least), max(0.0, most))]]
        raise DataError(
            f"The images in {source.path} have values from {least:.9g} to {most:.9g} ({dtype}), whose range is unknown; give the "
            f"values of black and white, such as {' or '.join(ranges)}."
        )
    if dtype.kind == "f":
        return _FLOAT_RANGES[0] if is_unit else _FLOAT_RANGES[1]
    return None if most <= _LARGEST_BYTE else range_up_to(most) or (0.0, float((1 << 16) - 1))


def channels_first(name: str, shape: tuple[int, ...], dtype: np.dtype, layout: Layout | None) -> bool:
    """Return whether the channels of images precede height and width.

    Without a layout, channels are the second or the last of 4 dims, if exactly one of these is 1, 3 or 4.

    Raises:
        DataError: the array does not hold images, or its layout is ambiguous.
    """
    if dtype.kind not in "iuf":
        raise DataError(f"{name} holds values of type {dtype}, but images must be numbers; convert them first.")
    if len(shape) not in (3, 4) or min(shape) < 1:
        raise DataError(f"{name} holds an array of {shape}; images must be (N, H, W), (N, H, W, C) or (N, C, H, W).")
    if len(shape) == 3:
        return False
    first, last = shape[1] in _CHANNELS, shape[3] in _CHANNELS
    if layout is None and first == last:
        raise DataError(f"{name} holds an array of {shape}, in which channels may be first or last; give --layout nchw or nhwc.")
    return first if layout is None else layout == "nchw"


def class_labels(name: str, labels: Any, count: int) -> tuple[np.ndarray, int]:
    """Return (labels (N,) int64, minimum number of classes) of an array or HDF5 dataset.

    Raises:
        DataError: the array does not hold one whole number, or one one-hot row, per image.
    """
    shape = tuple(labels.shape or ())  # a null dataset has no shape
    one_hot = len(shape) == 2 and shape[0] == count and shape[1] > 1
    if labels.dtype.kind not in "iufb" or not (one_hot or (shape and math.prod(shape) == count)):
        raise DataError(
            f"{name} holds {labels.dtype} of shape {shape}; labels of {count:,} images must be whole numbers, ({count},) or "
            f"({count}, 1), or one-hot rows ({count}, K)."
        )
    require_memory(2 * labels.nbytes, name)
    values = np.asarray(labels[()])
    if one_hot:
        wrong = np.flatnonzero(~(((values == 0) | (values == 1)).all(1) & (values.sum(1) == 1)))
        if wrong.size:
            raise DataError(f"{name} is not one-hot: row {int(wrong[0])} of {shape} does not have a single 1 among zeros.")
        return values.argmax(1).astype(np.int64), shape[1]
    return whole_labels(name, values.reshape(-1)), 1


def whole_labels(name: str, values: np.ndarray) -> np.ndarray:
    """Return labels (N,) of any numeric type as int64.

    Raises:
        DataError: a label is not a whole number between -2^31 and 2^31.
    """
    if values.dtype.kind == "f" or values.dtype.itemsize > 4:
        wide = values.astype(np.longdouble)  # holds 64 bits of both signs
        wrong = np.flatnonzero(~((np.abs(wide) < 1 << 31) & (wide == np.floor(wide))))
        if wrong.size:
            label = f"{name} has label {values[wrong[0]]} for image {int(wrong[0])}"
            raise DataError(f"{label}; labels must be whole numbers between -2^31 and 2^31.")
    return values.astype(np.int64)


def _chunks(source: ForeignImages, value_range: ValueRange | None, advance: Advance) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for start, values in source.blocks():
        pixels = values.astype(np.uint8) if value_range is None else scaled(values, value_range)
        if source.channels_first:
            pixels = pixels.transpose(0, 2, 3, 1)
        yield np.ascontiguousarray(pixels).reshape(-1, *source.shape), source.labels[start : start + len(pixels)]
        advance(len(pixels))
