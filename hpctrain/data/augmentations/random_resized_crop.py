"""Random window of each image, resized."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.intervals import Box, moved, relative, size_of, whole
from hpctrain.data import opencv
from hpctrain.data.augmentations.base import MOST_PIXELS, Augmentation, ResamplingAugmentation
from hpctrain.data.resampling import reach, resample, resample_region

_RESIZE_TRIES = 10


@dataclass(frozen=True)
class RandomResizedCrop(ResamplingAugmentation):
    """Cut out a window of random area and aspect ratio, and resize it to a square (Szegedy et al., CVPR 2015).

    Up to ten windows are drawn until one fits into the image; otherwise the largest central window within `ratio` is used.
    Resizing is bilinear, with the triangle filter widened for axes that are reduced.

    Pillow resizes the reduced axes with the widened filter. Then OpenCV resizes the enlarged axes, for which both filters are
    equal.

    Args:
        size: Side of the result, in pixels, such as 224.
        scale: Minimum and maximum share of the image's area, within (0, 1].
        ratio: Minimum and maximum aspect ratio of the window, width over height.
    """

    size: int
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (0.75, 4 / 3)

    name: ClassVar[str] = "random_resized_crop"
    draws: ClassVar[int] = 2 * _RESIZE_TRIES + 2
    interpolates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.require(self.size >= 1, "size", "is not positive; the minimum is 1, a usual value 224")
        low, high = self.scale
        self.require(0 < low <= high <= 1, "scale", "must be low <= high within (0, 1], such as [0.08, 1.0]")
        self.require(self.size <= MOST_PIXELS, "size", f"is too large; the maximum is {MOST_PIXELS}")
        low, high = self.ratio
        legal = 1e-3 <= low <= high <= 1e3
        self.require(legal, "ratio", "must be low <= high within [0.001, 1000], such as [0.75, 1.333]")

    def resized(self, side: int) -> Augmentation:
        return replace(self, size=side)

    def output_shape(self, h: int, w: int, c: int) -> tuple[int, int, int]:
        return self.size, self.size, c

    def apply(self, images: np.ndarray, u: np.ndarray, out: np.ndarray) -> None:
        boxes = self.boxes(images.shape[1], images.shape[2], u)
        for image, target, (top, left, height, width) in zip(images, out, boxes.tolist(), strict=True):
            self._resize(image[top : top + height, left : left + width], target)

    def source_boxes(self, size: tuple[int, int], u: np.ndarray) -> NDArray[np.int64]:
        return self.boxes(*size, u)

    def source(self, size: tuple[int, int], u: np.ndarray | None, region: Box) -> Box:
        if u is None:
            return whole(size)
        if not size_of(region):
            return region
        top, left, height, width = self._box(size, u)
        rows, columns = reach(region[0], height, self.size), reach(region[1], width, self.size)
        return moved((rows, columns), (top, left))

    def apply_region(
        self, part: np.ndarray, source: Box, size: tuple[int, int], u: np.ndarray, region: Box, out: np.ndarray
    ) -> None:
        top, left, height, width = self._box(size, u)
        rows, columns = relative(source, ((top, 0), (left, 0)))
        if min(height, width) <= self.size:
            window = np.zeros((height, width, part.shape[2]), np.uint8)
            window[rows, columns] = part
            whole_result = np.empty((self.size, self.size, part.shape[2]), np.uint8)
            self._resize(window, whole_result)
            out[...] = whole_result[slice(*region[0]), slice(*region[1])]
            return
        resample_region(part, (rows, columns), (height, width), (self.size, self.size), region, out)

    def _resize(self, window: np.ndarray, out: np.ndarray) -> None:
        height, width = window.shape[:2]
        if max(height, width) > self.size:
            window = resample(window, min(height, self.size), min(width, self.size))
        if min(height, width) < self.size:
            opencv.enlarge(window, out)
        else:
            out[...] = window

    def _box(self, size: tuple[int, int], u: np.ndarray) -> tuple[int, int, int, int]:
        top, left, height, width = self.boxes(*size, u[None])[0].tolist()
        return top, left, height, width

    def boxes(self, height: int, width: int, u: np.ndarray) -> NDArray[np.int64]:
        """Return the windows (N, 4) int64 within (height, width) for u (N, draws): top, left, height and width of each."""
        area = height * width * (self.scale[0] + (self.scale[1] - self.scale[0]) * u[:, 0 : 2 * _RESIZE_TRIES : 2])
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        aspect = np.exp(low + (high - low) * u[:, 1 : 2 * _RESIZE_TRIES : 2])
        w = np.rint(np.sqrt(area * aspect)).astype(np.int64)
        h = np.rint(np.sqrt(area / aspect)).astype(np.int64)
        fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
        first, rows = fits.argmax(axis=1), np.arange(len(u))
        w, h = w[rows, first], h[rows, first]
        top = (u[:, -2] * (height - h + 1)).astype(np.int64)
        left = (u[:, -1] * (width - w + 1)).astype(np.int64)
        boxes = np.stack([top, left, h, w], axis=1)
        boxes[~fits.any(axis=1)] = self._central(height, width)
        return boxes

    def _central(self, height: int, width: int) -> tuple[int, int, int, int]:
        aspect = min(max(width / height, self.ratio[0]), self.ratio[1])
        h = max(1, min(height, round(width / aspect)))
        w = max(1, min(width, round(height * aspect)))
        return (height - h) // 2, (width - w) // 2, h, w
