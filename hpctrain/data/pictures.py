"""Pictures of any size, as files, read as if they were in a data file: by the very functions of the converters."""

from __future__ import annotations

import operator
import stat
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np

from hpctrain.data.convert.common import in_order
from hpctrain.data.convert.folder import images_below
from hpctrain.data.decoder import Fit, decode
from hpctrain.data.facts import ImageForm
from hpctrain.data.files import system_errors_as
from hpctrain.errors import DataError, ShapeError

_DECODED_CHANNELS = (1, 3)
#: files that are read to compare the pictures of two ranks, and the first bytes of each
_MOST_COMPARED, _COMPARED_BYTES = 16, 1 << 16


def picture_files(places: Sequence[Path]) -> tuple[Path, ...]:
    """The files that places stand for, in their order: each itself, and the images below a directory, sorted.

    Raises:
        DataError: a place that is not there, or a directory without an image.
    """
    files: list[Path] = []
    for place in places:
        with system_errors_as(f"The directory {place} cannot be read"):
            below = images_below(place)
        if place.is_dir() and not below:
            raise DataError(f"The directory {place} holds no image; give one with files that end in .jpg, .jpeg or .png.")
        if not place.exists():
            raise DataError(f"There is no image {place}; give the path of a JPEG or PNG file, or of a directory of some.")
        files += below or [place]
    return tuple(files)


def picture_facts(files: Sequence[Path]) -> dict[str, str]:
    """Return the size and the crc32 of some files, by name, by which ranks know that they have the same pictures.

    They are at most 16, evenly spread, of each of which at most 64 KiB are read.
    """
    count = min(len(files), _MOST_COMPARED)
    return {str(files[place]): _fact(files[place]) for place in np.linspace(0, len(files) - 1, count).astype(int).tolist()}


def _fact(path: Path) -> str:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return "no regular file"
        with path.open("rb") as file:
            return f"{status.st_size:,} bytes with crc32 {zlib.crc32(file.read(_COMPARED_BYTES)):08x}"
    except OSError as error:
        return f"not there ({error.strerror})"


class DecodedPictures:
    """Pictures in one form, decoded when they are read; it is indexed as an array (N, H, W, C) of uint8 is.

    A picture that cannot be decoded reads as zeros. Several threads may read.

    Args:
        files: of the pictures. form: they are brought to. threads: that decode at once.

    Attributes:
        shape: (N, H, W, C). broken: number -> the sentence that says why it cannot be decoded, of those that were read so far.

    Raises:
        ShapeError: a form of another number of channels than pictures can be turned into.
    """

    def __init__(self, files: Sequence[Path], form: ImageForm, threads: int = 1) -> None:
        if form.shape[2] not in _DECODED_CHANNELS:
            raise ShapeError(
                f"The model reads images of {form.shape[2]} channels, but pictures are grey (1) or RGB (3); "
                "evaluate it on a data file instead."
            )
        self.shape = (len(files), *form.shape)
        self.broken: dict[int, str] = {}
        self._files, self._form, self._threads = files, form, threads

    def __getitem__(self, index: int | slice | tuple[int | slice, slice, slice]) -> np.ndarray:
        """Pixels of one sample (h, w, C) or of several (n, h, w, C): whole, or a region of them."""
        samples, *region = index if isinstance(index, tuple) else (index,)
        rows, columns = region or (slice(None), slice(None))
        if isinstance(samples, slice):
            numbers = range(self.shape[0])[samples]
            whole = self.take(np.array(numbers, np.int64), np.empty((len(numbers), *self.shape[1:]), np.uint8))
            return whole[:, rows, columns]
        return self._decoded(operator.index(samples))[rows, columns]

    def take(self, samples: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Whole images of samples (n,), written to `out` (n, H, W, C), which is returned."""
        for target, pixels in zip(out, in_order(self._decoded, samples.tolist(), self._threads), strict=True):
            target[...] = pixels
        return out

    def _decoded(self, number: int) -> np.ndarray:
        height, width, channels = self._form.shape
        try:
            return decode(self._files[number], (height, width), cast(Fit, self._form.fit), channels)
        except DataError as error:
            self.broken[number] = str(error)
            return np.zeros(self._form.shape, np.uint8)
