"""Random horizontal mirroring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.intervals import Box, hull
from hpctrain.data.augmentations.base import LEAST_FOR_OPENCV, WindowAugmentation


@dataclass(frozen=True)
class Flip(WindowAugmentation):
    """Mirror images horizontally at random.

    Args:
        probability: Probability that an image is mirrored, in [0, 1].
        alternating: Whether an image that is mirrored in one epoch is not mirrored in the next, and vice versa, so that two
            epochs contain each image and its mirror image (Jordan 2024); needs a probability of 0.5.
    """

    probability: float = 0.5
    alternating: bool = False

    name: ClassVar[str] = "flip"
    draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        legal = 0 <= self.probability <= 1
        self.require(legal, "probability", "is outside [0, 1]; a usual value is 0.5")
        legal = not self.alternating or self.probability == 0.5
        self.require(legal, "probability", "does not fit alternating: true, which mirrors half of the images; use 0.5")

    @property
    def alternates(self) -> bool:
        return self.alternating

    def apply(self, images: np.ndarray, u: np.ndarray, out: np.ndarray) -> None:
        for image, target, flipped in zip(images, out, (u[:, 0] < self.probability).tolist(), strict=True):
            if not flipped:
                target[...] = image
            elif image.nbytes < LEAST_FOR_OPENCV:
                target[...] = image[:, ::-1]
            else:
                from hpctrain.data import opencv

                opencv.mirror(image, target)

    def windows(self, size: tuple[int, int], u: np.ndarray) -> NDArray[np.int64]:
        flipped = u[:, 0] < self.probability
        return np.column_stack([np.zeros(len(u), np.int64), np.where(flipped, size[1] - 1, 0), np.where(flipped, -1, 1)])

    def source(self, size: tuple[int, int], u: np.ndarray | None, region: Box) -> Box:
        rows, (left, right) = region
        flipped = rows, (size[1] - right, size[1] - left)
        if u is None:
            return hull([region, flipped]) or region
        return flipped if u[0] < self.probability else region

    def apply_region(
        self, part: np.ndarray, source: Box, size: tuple[int, int], u: np.ndarray, region: Box, out: np.ndarray
    ) -> None:
        out[...] = part[:, ::-1] if u[0] < self.probability else part
