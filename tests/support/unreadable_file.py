"""A data file of made-up images, some of which its disk does not give back."""

from __future__ import annotations

import errno
from collections.abc import Collection
from pathlib import Path

import numpy as np

from hpctrain.data import format as data_format
from hpctrain.data.format import ImageFile
from hpctrain.data.mapped_reader import MappedReader
from tests.support.training import Task, stored


def write(path: Path, task: Task) -> None:
    """The images of a task as a data file."""
    pixels, labels = stored(task)
    names = [f"class {number}" for number in range(task.classes)]
    data_format.write(path, task.samples, task.image_shape, names, [(pixels, labels)])


def open_broken(path: Path, unreadable: Collection[int]) -> ImageFile:
    """The file, on a disk that refuses some samples."""
    file = ImageFile.open(path)
    intact = file.pixels
    assert isinstance(intact, MappedReader)
    assert isinstance(intact._map, np.memmap)
    file.pixels = BrokenReader(path, intact._map, intact._offset, unreadable)
    return file


class BrokenReader(MappedReader):
    """Reads as its base does, from a disk that refuses the `unreadable` samples."""

    def __init__(self, path: Path, images: np.memmap, offset: int, unreadable: Collection[int]) -> None:
        super().__init__(path, images, offset)
        self._refused, self._image_bytes = list(unreadable), int(np.prod(images.shape[1:]))

    def _gather(self, wanted: np.ndarray, out: np.ndarray) -> int:
        refused = np.flatnonzero(np.isin(wanted[0] // self._image_bytes, self._refused))
        end = refused[0] if len(refused) else wanted.shape[1]
        return super()._gather(wanted[:, :end], out)

    def _read_piece(self, at: int, out: memoryview) -> None:
        if (at - self._offset) // self._image_bytes in self._refused:
            raise OSError(errno.EIO, "Input/output error")
        super()._read_piece(at, out)
