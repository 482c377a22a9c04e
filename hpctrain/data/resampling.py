"""Bilinear resizing of images, and of regions of images with the same pixels."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from hpctrain.core.intervals import Box, Interval


def resample(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize (h, w, C) uint8 bilinearly to (height, width, C): columns, then rows, rounded to uint8 after each pass.

    The passes are separate calls. A single call would let Pillow choose the order, which affects the rounding, and a region of an
    image must have the same pixels as the whole image.
    """
    if image.shape[2] == 3:
        return _in_two_passes(image, height, width)
    target = np.empty((height, width, image.shape[2]), np.uint8)
    for channel in range(image.shape[2]):
        target[..., channel] = _in_two_passes(image[..., channel], height, width)
    return target


def _in_two_passes(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize an image of three channels (h, w, 3) or one channel (h, w); see `resample`."""
    made = Image.fromarray(np.ascontiguousarray(image))
    for size in ((width, image.shape[0]), (width, height)):
        if made.size != size:
            made = made.resize(size, Image.Resampling.BILINEAR)
    return np.asarray(made)


def resample_region(
    part: np.ndarray, place: tuple[slice, slice], size: tuple[int, int], resized: tuple[int, int], region: Box, out: np.ndarray
) -> None:
    """Write a region of an image of `size`, resized to `resized`, to `out`, with the pixels that `resample` returns.

    Each pass covers the full length of its axis, so the filter weights are the same. Pixels that the filter does not reach are
    zero.

    Args:
        part: pixels of the image that the region needs.
        place: rows and columns of `part` in the image.
    """
    (rows, columns), channels = place, part.shape[2]
    wide = np.zeros((part.shape[0], size[1], channels), np.uint8)
    wide[:, columns] = part
    high = np.zeros((size[0], out.shape[1], channels), np.uint8)
    high[rows] = resample(wide, part.shape[0], resized[1])[:, slice(*region[1])]
    out[...] = resample(high, resized[0], out.shape[1])[slice(*region[0])]


def reach(interval: Interval, size: int, resized: int) -> Interval:
    """Return the input elements that the triangle filter needs for the output elements `interval`, or slightly more.

    Args:
        size: number of input elements.
        resized: number of output elements.
    """
    scale = size / resized
    around = max(scale, 1.0) + 1.5
    start, stop = (interval[0] + 0.5) * scale - around, (interval[1] - 0.5) * scale + around
    return max(0, math.floor(start)), min(size, math.ceil(stop))
