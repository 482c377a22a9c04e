"""Pairs of operations that a search found for a data set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from hpctrain.data.augmentations.randaugment import RANGES
from hpctrain.data.picture_operations import SIGNED, OperationsAugmentation

_BINS = 10


class _Step(NamedTuple):
    operation: str
    probability: float
    position: int  # strength, from 0 to _BINS - 1


# Tables 7 to 9 of the paper: pairs of operation, probability and strength; operations without a number have no strength.
_TABLES = {
    "imagenet": """
        posterize 0.4 8, rotate 0.6 9; solarize 0.6 5, autocontrast 0.6; equalize 0.8, equalize 0.6;
        posterize 0.6 7, posterize 0.6 6; equalize 0.4, solarize 0.2 4; equalize 0.4, rotate 0.8 8;
        solarize 0.6 3, equalize 0.6; posterize 0.8 5, equalize 1.0; rotate 0.2 3, solarize 0.6 8;
        equalize 0.6, posterize 0.4 6; rotate 0.8 8, color 0.4 0; rotate 0.4 9, equalize 0.6; equalize 0.0, equalize 0.8;
        invert 0.6, equalize 1.0; color 0.6 4, contrast 1.0 8; rotate 0.8 8, color 1.0 2; color 0.8 8, solarize 0.8 7;
        sharpness 0.4 7, invert 0.6; shear_x 0.6 5, equalize 1.0; color 0.4 0, equalize 0.6; equalize 0.4, solarize 0.2 4;
        solarize 0.6 5, autocontrast 0.6; invert 0.6, equalize 1.0; color 0.6 4, contrast 1.0 8; equalize 0.8, equalize 0.6
    """,
    "cifar10": """
        invert 0.1, contrast 0.2 6; rotate 0.7 2, translate_x 0.3 9; sharpness 0.8 1, sharpness 0.9 3;
        shear_y 0.5 8, translate_y 0.7 9; autocontrast 0.5, equalize 0.9; shear_y 0.2 7, posterize 0.3 7;
        color 0.4 3, brightness 0.6 7; sharpness 0.3 9, brightness 0.7 9; equalize 0.6, equalize 0.5;
        contrast 0.6 7, sharpness 0.6 5; color 0.7 7, translate_x 0.5 8; equalize 0.3, autocontrast 0.4;
        translate_y 0.4 3, sharpness 0.2 6; brightness 0.9 6, color 0.2 8; solarize 0.5 2, invert 0.0;
        equalize 0.2, autocontrast 0.6; equalize 0.2, equalize 0.6; color 0.9 9, equalize 0.6;
        autocontrast 0.8, solarize 0.2 8; brightness 0.1 3, color 0.7 0; solarize 0.4 5, autocontrast 0.9;
        translate_y 0.9 9, translate_y 0.7 9; autocontrast 0.9, solarize 0.8 3; equalize 0.8, invert 0.1;
        translate_y 0.7 9, autocontrast 0.9
    """,
    "svhn": """
        shear_x 0.9 4, invert 0.2; shear_y 0.9 8, invert 0.7; equalize 0.6, solarize 0.6 6; invert 0.9, equalize 0.6;
        equalize 0.6, rotate 0.9 3; shear_x 0.9 4, autocontrast 0.8; shear_y 0.9 8, invert 0.4;
        shear_y 0.9 5, solarize 0.2 6; invert 0.9, autocontrast 0.8; equalize 0.6, rotate 0.9 3;
        shear_x 0.9 4, solarize 0.3 3; shear_y 0.8 8, invert 0.7; equalize 0.9, translate_y 0.6 6; invert 0.9, equalize 0.6;
        contrast 0.3 3, rotate 0.8 4; invert 0.8, translate_y 0.0 2; shear_y 0.7 6, solarize 0.4 8; invert 0.6, rotate 0.8 4;
        shear_y 0.3 7, translate_x 0.9 3; shear_x 0.1 6, invert 0.6; solarize 0.7 2, translate_y 0.6 7;
        shear_y 0.8 4, invert 0.8; shear_x 0.7 9, translate_y 0.8 3; shear_y 0.8 5, autocontrast 0.7;
        shear_x 0.7 2, invert 0.1
    """,
}


def _steps(table: str) -> tuple[tuple[_Step, ...], ...]:
    pairs = ([step.split() for step in pair.split(",")] for pair in table.split(";"))
    return tuple(tuple(_Step(name, float(share), int(*position)) for name, share, *position in pair) for pair in pairs)


_POLICIES = {name: _steps(table) for name, table in _TABLES.items()}


@dataclass(frozen=True)
class AutoAugment(OperationsAugmentation):
    """Apply one of 25 pairs of operations that a search found for a data set, as in torchvision (Cubuk et al., CVPR 2019).

    Args:
        policy: Data set of the search: "imagenet", "cifar10" or "svhn".
        interpolation: Interpolation of sheared, shifted and rotated images: "nearest" or "bilinear".
    """

    policy: Literal["imagenet", "cifar10", "svhn"] = "imagenet"
    interpolation: Literal["nearest", "bilinear"] = "nearest"

    name: ClassVar[str] = "autoaugment"
    draws: ClassVar[int] = 5

    def choices(self, size: tuple[int, int], u: np.ndarray) -> list[tuple[str, float]]:
        pairs, (which, *others) = _POLICIES[self.policy], u.tolist()
        chosen = []
        for step, drawn, sign in zip(pairs[int(which * len(pairs))], others[:2], others[2:], strict=True):
            if drawn <= step.probability:
                magnitude = RANGES.magnitude(step.operation, step.position, _BINS, size)
                chosen.append((step.operation, -magnitude if step.operation in SIGNED and sign < 0.5 else magnitude))
        return chosen
