"""Random rotation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from hpctrain.data import picture_operations
from hpctrain.data.augmentations.base import Augmentation


@dataclass(frozen=True)
class Rotation(Augmentation):
    """Rotate images about their centre by a random angle, like torchvision's RandomRotation; uncovered pixels are black.

    Args:
        degrees: Maximum angle in either direction, in degrees, from 0 to 180, such as 15.
        interpolation: Interpolation of rotated images: "nearest" or "bilinear".
    """

    degrees: float
    interpolation: Literal["nearest", "bilinear"] = "nearest"

    name: ClassVar[str] = "rotation"
    draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        self.require(0 <= self.degrees <= 180, "degrees", "is outside [0, 180]; a usual value is 15")

    def output_shape(self, h: int, w: int, c: int) -> tuple[int, int, int]:
        picture_operations.check_channels(self.name, c)
        return h, w, c

    def apply(self, images: np.ndarray, u: np.ndarray, out: np.ndarray) -> None:
        for image, target, angle in zip(images, out, (self.degrees * (2 * u[:, 0] - 1)).tolist(), strict=True):
            target[...] = picture_operations.changed(image, [("rotate", angle)], self.interpolation)
