"""Random replacement of a rectangle of normalised pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.intervals import Box, intersect, relative, shape_of
from hpctrain.data.augmentations.base import FillingAugmentation, Words

_TRIES = 10
_QUANTILE_BITS = 16


@dataclass(frozen=True)
class RandomErasing(FillingAugmentation):
    """Replace a rectangle of random area and aspect ratio after normalisation; must be last (Zhong et al., AAAI 2020).

    As in torchvision, up to ten rectangles are drawn until one is lower and narrower than the image. If none is, nothing is
    erased.

    Args:
        probability: Probability that a rectangle of an image is erased, in [0, 1].
        scale: Minimum and maximum share of the image's area, within [0, 1].
        ratio: Minimum and maximum aspect ratio of the rectangle, height over width.
        value: Fill value in units of normalised pixels, so 0 is the mean of the data; or "random": a standard normal number for
            each element.
    """

    probability: float = 0.5
    scale: tuple[float, float] = (0.02, 0.33)
    ratio: tuple[float, float] = (0.3, 3.3)
    value: float | Literal["random"] = 0.0

    name: ClassVar[str] = "random_erasing"
    draws: ClassVar[int] = 1 + 2 * _TRIES + 2

    def __post_init__(self) -> None:
        self.require(0 <= self.probability <= 1, "probability", "is outside [0, 1]; a usual value is 0.5")
        low, high = self.scale
        self.require(0 <= low <= high <= 1, "scale", "must be low <= high within [0, 1], such as [0.02, 0.33]")
        low, high = self.ratio
        self.require(1e-3 <= low <= high <= 1e3, "ratio", "must be low <= high within [0.001, 1000], such as [0.3, 3.3]")
        legal = self.value == "random" or math.isfinite(self.value)
        self.require(legal, "value", 'must be finite, or "random"; a usual value is 0')

    def change(self, pixels: np.ndarray, size: tuple[int, int], u: np.ndarray, words: Words, region: Box) -> None:
        box = self.box(size, u)
        if box is None:
            return
        inside = intersect(box, region)
        if inside is None:
            return
        where = relative(inside, region)
        if self.value == "random":
            # Draw for the whole rectangle even if the region holds only a part of it: drawing a contiguous range of words is many
            # times faster than drawing scattered words.
            shape = (*shape_of(box), pixels.shape[2])
            steps = words(math.prod(shape)).reshape(shape)[relative(inside, box)] >> np.uint32(32 - _QUANTILE_BITS)
            pixels[where] = _quantiles()[steps]
        else:
            pixels[where] = self.value

    @property
    def fill(self) -> float | None:
        return None if self.value == "random" else self.value

    def box(self, size: tuple[int, int], u: np.ndarray) -> Box | None:
        if u[0] >= self.probability:
            return None
        height, width = size
        tries = u[1 : 1 + 2 * _TRIES]
        area = height * width * (self.scale[0] + (self.scale[1] - self.scale[0]) * tries[0::2])
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        aspect = np.exp(low + (high - low) * tries[1::2])
        h, w = np.rint(np.sqrt(area * aspect)).astype(np.int64), np.rint(np.sqrt(area / aspect)).astype(np.int64)
        fits = np.flatnonzero((h < height) & (w < width))
        if not fits.size:
            return None
        rows, columns = int(h[fits[0]]), int(w[fits[0]])
        top, left = int(u[-2] * (height - rows + 1)), int(u[-1] * (width - columns + 1))
        return (top, top + rows), (left, left + columns)


@cache
def _quantiles() -> NDArray[np.float64]:
    """Return the normal quantiles at the midpoints of 65,536 equal probabilities, (65536,) float64.

    Looking up a quantile is much faster than computing it for each element.
    """
    steps = 1 << _QUANTILE_BITS
    normal = NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / steps) for i in range(steps)])
