"""HDF5 files of other programs, with one dataset of images and one of labels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import h5py

from hpctrain.core.errors import DataError, errors_as
from hpctrain.data.convert.arrays import ForeignImages, Layout, channels_first, class_labels
from hpctrain.data.convert.common import require_memory
from hpctrain.data.files import require_file
from hpctrain.data.readers import reason

_SHOWN = 20


@contextmanager
def opened(path: Path, images: str = "images", labels: str = "labels", layout: Layout | None = None) -> Iterator[ForeignImages]:
    """Open a file and read its labels.

    Args:
        images: name of the dataset of images, such as group/x.
        labels: name of the dataset of labels: whole numbers (N,) or (N, 1), or one-hot (N, K).
        layout: layout of images with 4 dims; None: see `arrays.channels_first`.

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
            first = channels_first(f"{pixels.name[1:]} in {path}", tuple(pixels.shape or ()), pixels.dtype, layout)
            _check_storage(path, pixels)
            of_labels = class_labels(f"{targets.name[1:]} in {path}", targets, len(pixels))
            source = ForeignImages(path, pixels, first, *of_labels, partial(_errors_of, path))
        yield source


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


def _check_storage(path: Path, images: h5py.Dataset) -> None:
    """Raise unless the values of a dataset of images are in the file, and a part of them fits into memory.

    Raises:
        DataError: values are missing or in a missing file, or an image or a chunk is too large.
    """
    shape, name = images.shape, f"{images.name[1:]} in {path}"
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


def _errors_of(path: Path, what: str) -> AbstractContextManager[None]:
    return errors_as(DataError, lambda why: f"The HDF5 file {path} {what}: {why}.", reason)
