"""How many samples and bytes a rank has read, by where they came from."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from enum import StrEnum

import numpy as np

from hpctrain.data.readers import BlockReader
from hpctrain.data.image_file import ImageArray
from hpctrain.data.unreadable import stand_ins


class Origin(StrEnum):
    """The place that samples were read from: the data file, a local copy, memory of the node, or that of other nodes."""

    FILE = "file"
    LOCAL = "local"
    MEMORY = "memory"
    NODES = "nodes"


class ReadCounts:
    """Samples and bytes by origin; any thread may add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {origin: [0, 0] for origin in Origin}

    def add(self, origin: Origin, samples: int, n_bytes: int) -> None:
        """So much more was read there."""
        with self._lock:
            count = self._counts[origin]
            count[0] += samples
            count[1] += n_bytes

    def values(self) -> dict[str, int]:
        """By name, as `file_samples` and `file_bytes`; a fresh dict."""
        with self._lock:
            return {
                f"{origin}_{name}": value
                for origin, count in self._counts.items()
                for name, value in zip(("samples", "bytes"), count, strict=True)
            }


def summed(of_ranks: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The counts of several ranks, added up by name."""
    total: dict[str, int] = {}
    for counts in of_ranks:
        for name, value in counts.items():
            total[name] = total.get(name, 0) + value
    return total


class CountedImages:
    """Images that are counted as they are read; arrays may be given, too.

    Attributes:
        replaced: by sample that could not be read, the one that is read in its place.
    """

    def __init__(self, images: ImageArray, counts: ReadCounts, origin: Origin = Origin.FILE) -> None:
        self._images, self._counts, self._origin = images, counts, origin
        self.shape = images.shape
        self.replaced = stand_ins(images)

    def __getitem__(self, index: int | slice | tuple[int | slice, slice, slice]) -> np.ndarray:
        """Pixels of a sample or of several, of whole images or of a region, as of an array."""
        pixels: np.ndarray = self._images[index]
        samples = np.arange(self.shape[0])[index[0] if isinstance(index, tuple) else index].reshape(-1)
        self._counts.add(self._origin, len(samples), self._bytes_of(samples, pixels))
        return pixels

    def take(self, samples: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Whole images of samples (n,), written to `out` (n, H, W, C), which is returned."""
        if isinstance(self._images, np.ndarray):
            np.take(self._images, samples, axis=0, out=out, mode="clip")
        else:
            self._images.take(samples, out)
        self._counts.add(self._origin, len(samples), self._bytes_of(samples, out))
        return out

    def _bytes_of(self, samples: np.ndarray, pixels: np.ndarray) -> int:
        """The size of what was read to make these pixels."""
        if isinstance(self._images, BlockReader) and self._images.decodes:
            return int(self._images.extents.sizes(samples).sum())
        return pixels.nbytes
