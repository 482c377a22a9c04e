"""Black padding, then a random window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.intervals import Box, clip, moved, relative
from hpctrain.data.augmentations.base import MOST_PIXELS, WindowAugmentation


@dataclass(frozen=True)
class PadCrop(WindowAugmentation):
    """Pad each image with black, then cut out a random window of the image's original size (He et al., CVPR 2016, section 4.2).

    Args:
        padding: Width of the padding on each side, in pixels.
    """

    padding: int = 4

    name: ClassVar[str] = "pad_crop"
    draws: ClassVar[int] = 2

    def __post_init__(self) -> None:
        self.require(self.padding >= 0, "padding", "is negative; the minimum is 0, a usual value 4")
        self.require(self.padding <= MOST_PIXELS, "padding", f"is too large; the maximum is {MOST_PIXELS}")

    def apply(self, images: np.ndarray, u: np.ndarray, out: np.ndarray) -> None:
        height, width = images.shape[1:3]
        shifts = self._shifts(u)
        out[...] = 0
        for image, target, (dy, dx) in zip(images, out, shifts.tolist(), strict=True):
            rows, to_rows = _overlap(dy, height)
            columns, to_columns = _overlap(dx, width)
            target[to_rows, to_columns] = image[rows, columns]

    def windows(self, size: tuple[int, int], u: np.ndarray) -> NDArray[np.int64]:
        return np.column_stack([self._shifts(u), np.ones(len(u), np.int64)])

    def source(self, size: tuple[int, int], u: np.ndarray | None, region: Box) -> Box:
        if u is not None:
            return clip(moved(region, self._shift(u)), size)
        (top, bottom), (left, right) = region
        return clip(((top - self.padding, bottom + self.padding), (left - self.padding, right + self.padding)), size)

    def apply_region(
        self, part: np.ndarray, source: Box, size: tuple[int, int], u: np.ndarray, region: Box, out: np.ndarray
    ) -> None:
        out[relative(source, moved(region, self._shift(u)))] = part

    def _shift(self, u: np.ndarray) -> tuple[int, int]:
        dy, dx = self._shifts(u).tolist()
        return dy, dx

    def _shifts(self, u: np.ndarray) -> NDArray[np.int64]:
        """Return the shift of each window relative to its image, down and right, for random numbers u (..., 2)."""
        shifts: NDArray[np.int64] = (u * (2 * self.padding + 1)).astype(np.int64) - self.padding
        return shifts


def _overlap(shift: int, size: int) -> tuple[slice, slice]:
    """Return source and target slices of a window shifted by `shift` over an image of `size`; empty if they do not overlap."""
    length = max(0, size - abs(shift))
    source, target = (shift, 0) if shift >= 0 else (0, -shift)
    return slice(source, source + length), slice(target, target + length)
