"""Where the stored bytes of each sample lie in a data file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Extents:
    """The stored bytes of samples, which lie one behind another in one block of a file.

    Attributes:
        first: place of the block's first byte in the file. count: samples. stride: bytes of each sample; None: they differ.
        offsets: (count + 1,) int64 from 0, of each sample's first byte in the block, and of the block's end; None: by `stride`.
    """

    first: int
    count: int
    stride: int | None
    offsets: np.ndarray | None = None

    @classmethod
    def fixed(cls, first: int, count: int, stride: int) -> Extents:
        """Extents of samples that all have `stride` bytes, as pixels do."""
        return cls(first, count, stride)

    @classmethod
    def rising(cls, first: int, offsets: np.ndarray) -> Extents:
        """Extents of samples of different sizes; offsets: (N + 1,) int64, rising from 0."""
        return cls(first, len(offsets) - 1, None, offsets)

    def __len__(self) -> int:
        return self.count

    @property
    def size_bytes(self) -> int:
        """Bytes of the block."""
        return int(self.offsets[-1]) if self.offsets is not None else self.count * (self.stride or 0)

    @property
    def end(self) -> int:
        """Place behind the block in the file."""
        return self.first + self.size_bytes

    def starts(self, samples: np.ndarray) -> np.ndarray:
        """(n,) int64: places of the first bytes of samples (n,) in the block; the file has them at `first` + these."""
        return samples * np.int64(self.stride or 0) if self.offsets is None else self.offsets[samples]

    def sizes(self, samples: np.ndarray) -> np.ndarray:
        """(n,) int64: stored bytes of samples (n,)."""
        if self.offsets is None:
            return np.full(len(samples), self.stride, np.int64)
        sizes: np.ndarray = self.offsets[samples + 1] - self.offsets[samples]
        return sizes

    def samples_of(self, start: int, stop: int) -> range:
        """The samples that have bytes in start .. stop - 1 of the block."""
        if stop <= start or not self.count:
            return range(0)
        if self.offsets is None:
            stride = max(1, self.stride or 0)
            return range(start // stride, min(self.count, -(-stop // stride)))
        first = int(np.searchsorted(self.offsets, start, "right")) - 1
        return range(first, min(self.count, int(np.searchsorted(self.offsets, stop, "left"))))
