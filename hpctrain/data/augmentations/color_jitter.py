"""Random brightness, contrast, saturation and hue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hpctrain.data.picture_operations import OperationsAugmentation

_FACTORS = {"brightness": "brightness", "contrast": "contrast", "saturation": "color"}


@dataclass(frozen=True)
class ColorJitter(OperationsAugmentation):
    """Change brightness, contrast, saturation and hue by random amounts, in a random order, like torchvision's ColorJitter.

    Args:
        brightness: Maximum change b of the brightness, whose factor is drawn from [max(0, 1 - b), 1 + b]; 0 for no change.
        contrast: Maximum change of the contrast, like brightness.
        saturation: Maximum change of the saturation, like brightness. It does not affect grey images.
        hue: Maximum turn of the hue in either direction, in [0, 0.5] of the colour circle. It does not affect grey images.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0

    name: ClassVar[str] = "color_jitter"
    draws: ClassVar[int] = 8
    neutral: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        for option in _FACTORS:
            self.require(0 <= getattr(self, option) <= 1e6, option, "is outside [0, 1e6]; a usual value is 0.4")
        self.require(0 <= self.hue <= 0.5, "hue", "is outside [0, 0.5]; a usual value is 0.1")

    def choices(self, size: tuple[int, int], u: np.ndarray) -> list[tuple[str, float]]:
        # Four random numbers for the order, then one for each factor or turn.
        made: list[tuple[str, float] | None] = []
        for drawn, (option, operation) in zip(u[4:7].tolist(), _FACTORS.items(), strict=True):
            change = getattr(self, option)
            low, high = max(0.0, 1.0 - change), 1.0 + change
            made.append((operation, low + (high - low) * drawn) if change else None)
        made.append(("hue", self.hue * (2.0 * float(u[7]) - 1.0)) if self.hue else None)
        return [choice for index in np.argsort(u[:4], kind="stable") if (choice := made[index]) is not None]
