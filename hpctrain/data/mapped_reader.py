"""Images of a file of pixels, or regions of them, read as an array's are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hpctrain.data.readers import BlockReader
from hpctrain.data.extents import Extents


class MappedReader(BlockReader):
    """Reads samples of images (N, H, W, C) uint8 that lie in one block of a file. One thread at a time.

    Args:
        path: of the file, which is held open. images: a map of the block. offset: of its first byte in the file.
    """

    def __init__(self, path: Path, images: np.memmap, offset: int) -> None:
        super().__init__(path, images, Extents.fixed(offset, images.shape[0], int(np.prod(images.shape[1:]))))
        self.shape = images.shape

    def take(self, samples: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Whole images of samples (n,), written to `out` (n, H, W, C), which is contiguous and is returned.

        Raises:
            UnreadableError: a sample cannot be read, and none may stand in for it.
        """
        height, width, _ = self.shape[1:]
        self._read(np.asarray(samples, np.int64), slice(0, height), slice(0, width), out)
        return out

    def __getitem__(self, index: int | slice | tuple[int | slice, slice, slice]) -> np.ndarray:
        """Pixels of a sample or of several, of whole images or of a region, as of an array; errors as of `take`."""
        wanted, *region = index if isinstance(index, tuple) else (index,)
        rows, columns = (
            slice(*part.indices(size)) for part, size in zip(region or [slice(None)] * 2, self.shape[1:3], strict=True)
        )
        numbers = range(self.shape[0])[wanted]
        samples = np.array([numbers] if isinstance(numbers, int) else numbers, np.int64)
        size = (max(0, rows.stop - rows.start), max(0, columns.stop - columns.start), self.shape[3])
        out = np.empty((len(samples), *size), np.uint8)
        self._read(samples, rows, columns, out)
        return out[0] if isinstance(numbers, int) else out

    def _read(self, samples: np.ndarray, rows: slice, columns: slice, out: np.ndarray) -> None:
        if not out.size:
            return
        begins, length = self._pieces(rows, columns)

        def attempt(actual: np.ndarray, places: np.ndarray, patient: bool) -> Mapping[int, str]:
            sources = self.extents.starts(actual)[:, None] + begins
            targets = (places[:, None] * len(begins) + np.arange(len(begins))) * length
            return self.fetch(actual, sources, targets, np.full(len(actual), length), out.reshape(-1), patient=patient)

        self._complete(samples, attempt)

    def _pieces(self, rows: slice, columns: slice) -> tuple[np.ndarray, int]:
        """Where the neighbouring bytes of a region of an image begin, and how many there are of each."""
        width, channels = self.shape[2:]
        if columns.stop - columns.start == width:
            return np.array([rows.start * width * channels], np.int64), (rows.stop - rows.start) * width * channels
        starts = (np.arange(rows.start, rows.stop, dtype=np.int64) * width + columns.start) * channels
        return starts, (columns.stop - columns.start) * channels
