"""Random rotation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from hpctrain.data.picture_operations import OperationsAugmentation


@dataclass(frozen=True)
class Rotation(OperationsAugmentation):
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

    def choices(self, size: tuple[int, int], u: np.ndarray) -> list[tuple[str, float]]:
        return [("rotate", float(self.degrees * (2 * u[0] - 1)))]
