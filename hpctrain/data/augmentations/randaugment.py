"""Several random operations with one strength."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from hpctrain.data.picture_operations import NAMES, SIGNED, OperationRanges, OperationsAugmentation

MOST_OPERATIONS = 8

RANGES = OperationRanges(shear=0.3, rotation=30.0, enhancement=0.9, posterized_bits=4, translation=None)


@dataclass(frozen=True)
class RandAugment(OperationsAugmentation):
    """Apply operations drawn from torchvision's 14, all with the same strength (Cubuk et al., NeurIPS 2020).

    Args:
        operations: Number of operations per image, from 1 to 8.
        magnitude: Strength of each operation, from 0 to bins - 1.
        bins: Number of strength levels, from no change to the maximum; at least 2.
        interpolation: Interpolation of sheared, shifted and rotated images: "nearest" or "bilinear".
    """

    operations: int = 2
    magnitude: int = 9
    bins: int = 31
    interpolation: Literal["nearest", "bilinear"] = "nearest"

    name: ClassVar[str] = "randaugment"
    draws: ClassVar[int] = 2 * MOST_OPERATIONS

    def __post_init__(self) -> None:
        legal = 1 <= self.operations <= MOST_OPERATIONS
        self.require(legal, "operations", f"is outside 1 to {MOST_OPERATIONS}; a usual value is 2")
        self.require(self.bins >= 2, "bins", "is less than 2; a usual value is 31")
        legal = 0 <= self.magnitude < self.bins
        self.require(legal, "magnitude", f"is outside 0 to bins - 1 = {self.bins - 1}; a usual value is 9 of 31")

    def choices(self, size: tuple[int, int], u: np.ndarray) -> list[tuple[str, float]]:
        chosen = []
        for which, sign in u.reshape(-1, 2)[: self.operations].tolist():
            name = NAMES[int(which * len(NAMES))]
            magnitude = RANGES.magnitude(name, self.magnitude, self.bins, size)
            chosen.append((name, -magnitude if name in SIGNED and sign < 0.5 else magnitude))
        return chosen
