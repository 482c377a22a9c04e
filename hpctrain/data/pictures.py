"""Picture files of any size, indexed like the images of a data file, and found and decoded by the functions of the converters."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np

from hpctrain.core.errors import DataError, ShapeError
from hpctrain.core.files import open_regular
from hpctrain.data.convert.common import in_order, listed, range_up_to
from hpctrain.data.convert.folder import Search
from hpctrain.data.decoding import FOREIGN_SUFFIXES, SUFFIXES, Fit, decode, deep_maximum
from hpctrain.data.image_file import ImageForm
from hpctrain.data.readers import ReadImages

_DECODED_CHANNELS = (1, 3)
_log = logging.getLogger(__name__)
#: limits of the comparison of pictures between ranks: the number of files, and the first bytes of each
_MOST_COMPARED, _COMPARED_BYTES = 16, 1 << 16


def picture_files(places: Sequence[Path]) -> tuple[Path, ...]:
    """Return the picture files at `places`, in this order. A place is a picture file or a directory, whose pictures are sorted.

    Unreadable pictures are included. Other entries of a directory are left out and logged.

    Raises:
        DataError: a place is missing, a directory has no picture, or a directory at any depth is unreadable.
    """
    files: list[Path] = []
    for place in places:
        if place.is_dir():
            files += _below(place)
        elif place.exists():
            files.append(place)
        else:
            raise DataError(
                f"There is no image {place}; give the path of a picture file, such as a JPEG, or of a directory of pictures."
            )
    return tuple(files)


def _below(directory: Path) -> list[Path]:
    search = Search()
    found = search.pictures(directory)
    closed = [f"{path}: {reason}" for path, reason in search.unreadable if path.suffix.lower() not in SUFFIXES | FOREIGN_SUFFIXES]
    if closed:
        raise DataError(f"In {directory} {listed('place', closed)} cannot be read; repair this, or give the paths of pictures.")
    pictures = sorted([*found, *(path for path, _ in search.unreadable)])
    notes = [str(note) for note in search.left_out() if not note.unreadable]
    if not pictures:
        why = "".join(f"; {note}" for note in notes)
        raise DataError(
            f"The directory {directory} contains no pictures; give one with picture files, such as .jpg or .png{why}."
        )
    for note in notes:
        _log.warning("%s: %s", directory, note)
    return pictures


def picture_facts(files: Sequence[Path]) -> dict[str, str]:
    """Return size and crc32 of some files, by name, so that ranks can check that they have the same pictures.

    At most 64 KiB of each of at most 16 evenly spaced files are read.
    """
    count = min(len(files), _MOST_COMPARED)
    return {str(files[place]): _fact(files[place]) for place in np.linspace(0, len(files) - 1, count).astype(int).tolist()}


def _fact(path: Path) -> str:
    try:
        with open(open_regular(path), "rb") as file:
            return f"{os.fstat(file.fileno()).st_size:,} bytes with crc32 {zlib.crc32(file.read(_COMPARED_BYTES)):08x}"
    except OSError as error:
        return f"missing or unreadable ({error.strerror})"


class DecodedPictures(ReadImages):
    """Pictures in one form, decoded when they are read; indexed like a uint8 array (N, H, W, C).

    A picture that cannot be decoded reads as zeros. Several threads may read.

    Args:
        form: form to which the pictures are converted.
        max_pixels: maximum number of pixels of a picture; see `decoding.decode`.

    Attributes:
        shape: (N, H, W, C).
        broken: reason for each failure, by picture number, for the pictures read so far.

    Raises:
        ShapeError: pictures cannot be converted to the number of channels of the form.
    """

    def __init__(self, files: Sequence[Path], form: ImageForm, threads: int = 1, max_pixels: int | None = None) -> None:
        if form.shape[2] not in _DECODED_CHANNELS:
            raise ShapeError(
                f"The model expects images of {form.shape[2]} channels, but pictures are grey (1) or RGB (3); "
                "evaluate it on a data file instead."
            )
        self.shape: tuple[int, ...] = (len(files), *form.shape)
        self.broken: dict[int, str] = {}
        self._files, self._form, self._threads, self._max_pixels = files, form, threads, max_pixels

    def take(self, samples: np.ndarray, out: np.ndarray) -> np.ndarray:
        numbers = samples.tolist()
        images = in_order(self._decoded, numbers, self._threads) if len(numbers) > 1 else map(self._decoded, numbers)
        for target, pixels in zip(out, images, strict=True):
            target[...] = pixels
        return out

    def _decoded(self, number: int) -> np.ndarray:
        height, width, channels = self._form.shape
        try:
            how = cast(Fit, self._form.fit), channels, self._max_pixels, self._form.value_range
            most, (_, white) = deep_maximum(self._files[number], self._max_pixels), self._form.value_range or (0, 65535)
            if most > white or (most > 0 and not self._form.value_range and range_up_to(most)):
                _log.warning("%s has values up to %d, but white is %g in the training images.", self._files[number], most, white)
            return decode(self._files[number], (height, width), *how)
        except DataError as error:
            self.broken[number] = str(error)
            return np.zeros(self._form.shape, np.uint8)
