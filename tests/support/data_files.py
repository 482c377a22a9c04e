"""Data files that are kept in memory, and files that are not regular."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from hpctrain.comm.shared_memory import SharedMemory
from hpctrain.data.cache import ReadCounts, SampleCache, bytes_for, held_in
from hpctrain.data.image_file import ImageArray, ImageFile
from hpctrain.data.readers import BlockReader, ReadImages

#: by kind, the numbers of a character device; None: a pipe
NODES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "pipe": None}


def stored(file: ImageFile, sample: int) -> bytes:
    """Return the stored bytes of a sample."""
    assert isinstance(file.pixels, BlockReader)
    extents, number = file.pixels.extents, np.array([sample])
    begin = extents.first + int(extents.starts(number)[0])
    return file.path.read_bytes()[begin : begin + int(extents.sizes(number)[0])]


def make_node(path: Path, kind: str) -> Path:
    """Make a copy of /dev/null, /dev/zero or /dev/full, a pipe, a directory or a link to itself at `path`, and return it.

    Skip the test if this user may not make devices.
    """
    if kind == "directory":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        numbers = NODES[kind]
        assert numbers is not None
        try:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(*numbers))
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        except PermissionError:
            pytest.skip("this user may not make devices")
    return path


def in_memory(file: ImageFile, limit_bytes: int = 1 << 20) -> SampleCache:
    """Return the images of a file, with as many of them in memory as fit into `limit_bytes`."""
    image_bytes = int(np.prod(file.shape))
    held = held_in(limit_bytes, len(file), image_bytes)
    memory, counts = SharedMemory(np.zeros(bytes_for(held, image_bytes), np.uint8)), ReadCounts()
    source = _ArrayImages(file.pixels) if isinstance(file.pixels, np.ndarray) else file.pixels
    return SampleCache(source, counts, memory, held)


class _ArrayImages(ReadImages):
    """An array as what is read sample by sample."""

    def __init__(self, images: np.ndarray) -> None:
        self.shape = images.shape
        self._images = images

    def take(self, samples: np.ndarray, out: np.ndarray) -> np.ndarray:
        out[...] = self._images[samples]
        return out


def cached(file: ImageFile, *, cache: bool) -> ImageArray | None:
    """Return the images in memory, or None, for which the loader reads them from the file."""
    return in_memory(file) if cache else None
