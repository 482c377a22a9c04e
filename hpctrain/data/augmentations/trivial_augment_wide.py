"""One random operation with a random strength."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from hpctrain.data import picture_operations
from hpctrain.data.augmentations.base import Augmentation
from hpctrain.data.picture_operations import NAMES, SIGNED, OperationRanges

_RANGES = OperationRanges(shear=0.99, rotation=135.0, enhancement=0.99, posterized_bits=6, translation=32.0)


@dataclass(frozen=True)
class TrivialAugmentWide(Augmentation):
    """Apply one operation drawn from torchvision's 14, with a random strength (Mueller and Hutter, ICCV 2021).

    Args:
        bins: Number of strength levels, from no change to the maximum; at least 2.
        interpolation: Interpolation of sheared, shifted and rotated images: "nearest" or "bilinear".
    """

    bins: int = 31
    interpolation: Literal["nearest", "bilinear"] = "nearest"

    name: ClassVar[str] = "trivial_augment_wide"
    draws: ClassVar[int] = 3

    def __post_init__(self) -> None:
        self.require(self.bins >= 2, "bins", "is less than 2; a usual value is 31")

    def output_shape(self, h: int, w: int, c: int) -> tuple[int, int, int]:
        picture_operations.check_channels(self.name, c)
        return h, w, c

    def apply(self, images: np.ndarray, u: np.ndarray, out: np.ndarray) -> None:
        size = images.shape[1], images.shape[2]
        for image, target, drawn in zip(images, out, u, strict=True):
            target[...] = picture_operations.changed(image, [self.choice(size, drawn)], self.interpolation)

    def choice(self, size: tuple[int, int], u: np.ndarray) -> tuple[str, float]:
        """Return (operation, magnitude) for random numbers u (draws,) and an image of `size` (H, W)."""
        which, strength, sign = u.tolist()
        name = NAMES[int(which * len(NAMES))]
        magnitude = _RANGES.magnitude(name, int(strength * self.bins), self.bins, size)
        return name, -magnitude if name in SIGNED and sign < 0.5 else magnitude
