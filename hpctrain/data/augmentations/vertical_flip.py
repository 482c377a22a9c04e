"""Random vertical mirroring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hpctrain.core.intervals import Box, hull
from hpctrain.data.augmentations.base import Augmentation


@dataclass(frozen=True)
class VerticalFlip(Augmentation):
    """Mirror images vertically at random.

    Args:
        probability: Probability that an image is mirrored, in [0, 1].
    """

    probability: float = 0.5

    name: ClassVar[str] = "vertical_flip"
    draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        self.require(0 <= self.probability <= 1, "probability", "is outside [0, 1]; a usual value is 0.5")

    def apply(self, images: np.ndarray, u: np.ndarray, out: np.ndarray) -> None:
        for image, target, flipped in zip(images, out, (u[:, 0] < self.probability).tolist(), strict=True):
            target[...] = image[::-1] if flipped else image

    def source(self, size: tuple[int, int], u: np.ndarray | None, region: Box) -> Box:
        (top, bottom), columns = region
        flipped = (size[0] - bottom, size[0] - top), columns
        if u is None:
            return hull([region, flipped]) or region
        return flipped if u[0] < self.probability else region

    def apply_region(
        self, part: np.ndarray, source: Box, size: tuple[int, int], u: np.ndarray, region: Box, out: np.ndarray
    ) -> None:
        out[...] = part[::-1] if u[0] < self.probability else part
