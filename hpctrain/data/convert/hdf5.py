"""HDF5 files of other programs, with one dataset of images and one of labels."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path

import h5py

from hpctrain.core.errors import DataError, errors_as
from hpctrain.data.convert.arrays import ForeignImages, Layout, channels_first, class_labels
from hpctrain.data.convert.common import require_memory
from hpctrain.data.files import require_file
from hpctrain.storage.hdf5_store import require_stored, system_reason

_SHOWN = 20
_MATLAB = "MATLAB_class"  # attribute of the arrays in MATLAB's files of version 7.3


@contextmanager
def opened(path: Path, images: str = "images", labels: str = "labels", layout: Layout | None = None) -> Iterator[ForeignImages]:
    """Yield the images and labels of a file, which stays open during the block.

    Args:
        images: name of the dataset of images, such as group/x.
        labels: name of the dataset of labels: whole numbers (N,) or (N, 1), or one-hot (N, K).
        layout: layout of images with 4 dims; None: see `arrays.channels_first`.

    Raises:
        DataError: the file is missing, unreadable or not HDF5; a dataset is missing; or the datasets do not hold images and
            labels.
    """
    require_file(path, "foreign HDF5 file", "give the path of an existing one")
    with _data_errors(path, "cannot be read"):
        file = h5py.File(os.path.realpath(path), "r", locking=False)
    with file:
        with _data_errors(path, "cannot be read"):
            pixels, targets = _dataset(path, file, images, "--images"), _dataset(path, file, labels, "--labels")
            names = f"{pixels.name[1:]} in {path}", f"{targets.name[1:]} in {path}"
            if pixels.chunks is not None:
                require_memory(math.prod(pixels.chunks) * pixels.dtype.itemsize, f"A chunk of {names[0]}")
            require_memory(math.prod(pixels.shape[1:]) * pixels.dtype.itemsize, f"An image of {names[0]}")
            if _MATLAB in pixels.attrs:
                raise DataError(f"{names[0]} is an array of MATLAB, whose dims are in reverse order; save the arrays as an .npz.")
            first = channels_first(names[0], tuple(pixels.shape or ()), pixels.dtype, layout)
            of_labels = class_labels(names[1], targets, len(pixels))
            source = ForeignImages(path, pixels, first, *of_labels, partial(_data_errors, path))
        yield source


def _dataset(path: Path, file: h5py.File, key: str, option: str) -> h5py.Dataset:
    found = None
    with errors_as(DataError, lambda why: f"{path} does not have all values of {key}: {why}.", system_reason), suppress(KeyError):
        require_stored(file, key)
        found = file[key]
    if not isinstance(found, h5py.Dataset):
        names: list[str] = []
        file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        available = ", ".join(names[:_SHOWN]) or "none"
        more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise DataError(f"{path} has no dataset {key!r} (it has {available}{more}); select one with {option}.")
    return found


def _data_errors(path: Path, what: str) -> AbstractContextManager[None]:
    return errors_as(DataError, lambda why: f"The HDF5 file {path} {what}: {why}.", system_reason)
