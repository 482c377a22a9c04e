"""Resize of the whole image."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.intervals import Box, size_of
from hpctrain.data.augmentations.base import MOST_PIXELS, Augmentation, ResamplingAugmentation
from hpctrain.data.resampling import reach, resample, resample_region


@dataclass(frozen=True)
class Resize(ResamplingAugmentation):
    """Resize the whole image so that its shorter side has a given length, with the filter of random_resized_crop.

    Args:
        size: Shorter side of the result, in pixels, such as 256. The aspect ratio is kept.
    """

    size: int

    name: ClassVar[str] = "resize"
    interpolates: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.require(self.size >= 1, "size", "is not positive; the minimum is 1, a usual value 224")
        self.require(self.size <= MOST_PIXELS, "size", f"is too large; the maximum is {MOST_PIXELS}")

    def resized(self, side: int) -> Augmentation:
        return replace(self, size=side)

    def output_shape(self, h: int, w: int, c: int) -> tuple[int, int, int]:
        shorter = min(h, w)
        return h * self.size // shorter, w * self.size // shorter, c

    def apply(self, images: np.ndarray, u: np.ndarray, out: np.ndarray) -> None:
        if images.shape == out.shape:
            out[...] = images
            return
        for image, target in zip(images, out, strict=True):
            target[...] = resample(image, *out.shape[1:3])

    def source_boxes(self, size: tuple[int, int], u: np.ndarray) -> NDArray[np.int64]:
        return np.tile(np.array([0, 0, *size]), (len(u), 1))

    def source(self, size: tuple[int, int], u: np.ndarray | None, region: Box) -> Box:
        height, width, _ = self.output_shape(*size, 0)
        if size == (height, width) or not size_of(region):
            return region
        return reach(region[0], size[0], height), reach(region[1], size[1], width)

    def apply_region(
        self, part: np.ndarray, source: Box, size: tuple[int, int], u: np.ndarray, region: Box, out: np.ndarray
    ) -> None:
        height, width, _ = self.output_shape(*size, 0)
        if size == (height, width):
            out[...] = part
            return
        rows, columns = (slice(*interval) for interval in source)
        resample_region(part, (rows, columns), size, (height, width), region, out)
