"""Central window of each image."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.errors import ShapeError
from hpctrain.core.intervals import Box, moved
from hpctrain.data.augmentations.base import Augmentation, WindowAugmentation


@dataclass(frozen=True)
class CenterCrop(WindowAugmentation):
    """Cut out the central square window of each image.

    Args:
        size: Side of the window, in pixels, such as 224; at most the shorter side of the images.
    """

    size: int

    name: ClassVar[str] = "center_crop"

    def __post_init__(self) -> None:
        self.require(self.size >= 1, "size", "is not positive; the minimum is 1, a usual value 224")

    def resized(self, side: int) -> Augmentation:
        return replace(self, size=side)

    def output_shape(self, h: int, w: int, c: int) -> tuple[int, int, int]:
        if min(h, w) < self.size:
            raise ShapeError(f"center_crop.size {self.size} is larger than the images of {h}x{w}; at most {min(h, w)} fits.")
        return self.size, self.size, c

    def apply(self, images: np.ndarray, u: np.ndarray, out: np.ndarray) -> None:
        top, left = (images.shape[1] - self.size) // 2, (images.shape[2] - self.size) // 2
        out[...] = images[:, top : top + self.size, left : left + self.size]

    def windows(self, size: tuple[int, int], u: np.ndarray) -> NDArray[np.int64]:
        top, left = (size[0] - self.size) // 2, (size[1] - self.size) // 2
        return np.tile(np.array([top, left, 1]), (len(u), 1))

    def source(self, size: tuple[int, int], u: np.ndarray | None, region: Box) -> Box:
        return moved(region, ((size[0] - self.size) // 2, (size[1] - self.size) // 2))

    def apply_region(
        self, part: np.ndarray, source: Box, size: tuple[int, int], u: np.ndarray, region: Box, out: np.ndarray
    ) -> None:
        out[...] = part
