"""One random operation with a random strength."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from hpctrain.data.picture_operations import NAMES, SIGNED, OperationRanges, OperationsAugmentation

_RANGES = OperationRanges(shear=0.99, rotation=135.0, enhancement=0.99, posterized_bits=6, translation=32.0)


@dataclass(frozen=True)
class TrivialAugmentWide(OperationsAugmentation):
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

    def choices(self, size: tuple[int, int], u: np.ndarray) -> list[tuple[str, float]]:
        which, strength, sign = u.tolist()
        name = NAMES[int(which * len(NAMES))]
        magnitude = _RANGES.magnitude(name, int(strength * self.bins), self.bins, size)
        return [(name, -magnitude if name in SIGNED and sign < 0.5 else magnitude)]
