"""Picture operations with a strength, computed by Pillow: torchvision's list of operations, with its pixels.

Each operation equals the one in `torchvision.transforms.autoaugment` for PIL images.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from hpctrain.core.errors import ShapeError
from hpctrain.data.augmentations.base import Augmentation

Resampling = Image.Resampling

#: Pillow's filter, by the name of an interpolation
RESAMPLING: Mapping[str, Resampling] = {"nearest": Resampling.NEAREST, "bilinear": Resampling.BILINEAR}

_Operation = Callable[[Image.Image, float, Resampling], Image.Image]
_MOST_POSTERIZED_BITS = 8


@dataclass(frozen=True)
class OperationRanges:
    """Maximum strength of each operation.

    Attributes:
        shear: shift per pixel, in pixels.
        rotation: angle in degrees.
        enhancement: change of brightness, colour, contrast and sharpness, added to or subtracted from 1.
        posterized_bits: number of bits removed from each 8-bit value.
        translation: shift in pixels; None: 150 / 331 of the image's width or height.
    """

    shear: float
    rotation: float
    enhancement: float
    posterized_bits: int
    translation: float | None

    def magnitude(self, name: str, position: int, bins: int, size: tuple[int, int]) -> float:
        """Return the magnitude of an operation at a position in 0 .. bins - 1, for images of `size` (H, W)."""
        if name == "posterize":
            return float(_MOST_POSTERIZED_BITS - round(position / ((bins - 1) / self.posterized_bits)))
        if name == "solarize":
            return _between(255.0, 0.0, position, bins)
        return _between(0.0, self._greatest(name, size), position, bins)

    def _greatest(self, name: str, size: tuple[int, int]) -> float:
        if name.startswith("shear"):
            return self.shear
        if name.startswith("translate"):
            length = size[1] if name.endswith("x") else size[0]
            return 150.0 / 331.0 * length if self.translation is None else self.translation
        if name == "rotate":
            return self.rotation
        return self.enhancement if name in ENHANCEMENTS else 0.0


def _between(start: float, stop: float, position: int, bins: int) -> float:
    """Return element `position` of `bins` from start to stop in single precision, rounded like torch.linspace.

    The last bit matters, because torchvision truncates shifts to whole pixels: the middle of 31 steps up to 32 is 15.999999,
    which becomes 15. The product is not rounded, because processors use fused multiply-add.
    """
    first, last = np.float32(start), np.float32(stop)
    step = float((last - first) / np.float32(bins - 1))
    if position < bins // 2:
        return float(np.float32(float(first) + step * position))
    return float(np.float32(float(last) - step * (bins - 1 - position)))


def _sheared(picture: Image.Image, magnitude: float, resample: Resampling, *, rows: bool) -> Image.Image:
    # Via the angle, like torchvision, because the last bit of the matrix may decide which pixel is nearest.
    angle = math.radians(math.degrees(math.atan(magnitude)))
    if rows:
        return _affine(picture, (1.0, math.tan(angle), 0.0, 0.0, 1.0, 0.0), resample)
    return _affine(picture, (1.0, 0.0, 0.0, math.sin(angle) / math.cos(angle), 1.0, 0.0), resample)


def _translated(picture: Image.Image, right: float, down: float, resample: Resampling) -> Image.Image:
    return _affine(picture, (1.0, 0.0, -float(int(right)), 0.0, 1.0, -float(int(down))), resample)


def _affine(picture: Image.Image, matrix: tuple[float, ...], resample: Resampling) -> Image.Image:
    return picture.transform(picture.size, Image.Transform.AFFINE, matrix, resample)


def _with_hue(picture: Image.Image, magnitude: float) -> Image.Image:
    """Return the picture with its hue turned by a fraction of the colour circle, in [-0.5, 0.5]. Grey pictures stay unchanged."""
    if picture.mode == "L":
        return picture
    hue, saturation, value = picture.convert("HSV").split()
    turned = np.asarray(hue) + np.int32(magnitude * 255).astype(np.uint8)  # modulo 256
    return Image.merge("HSV", (Image.fromarray(turned), saturation, value)).convert("RGB")


_Enhancement = Callable[[Image.Image], ImageEnhance._Enhance]

#: operations that are an enhancement by 1 + magnitude
ENHANCEMENTS: Mapping[str, _Enhancement] = {
    "brightness": ImageEnhance.Brightness,
    "color": ImageEnhance.Color,
    "contrast": ImageEnhance.Contrast,
    "sharpness": ImageEnhance.Sharpness,
}

_OTHERS: Mapping[str, _Operation] = {
    "identity": lambda picture, magnitude, resample: picture,
    "shear_x": lambda picture, magnitude, resample: _sheared(picture, magnitude, resample, rows=True),
    "shear_y": lambda picture, magnitude, resample: _sheared(picture, magnitude, resample, rows=False),
    "translate_x": lambda picture, magnitude, resample: _translated(picture, magnitude, 0.0, resample),
    "translate_y": lambda picture, magnitude, resample: _translated(picture, 0.0, magnitude, resample),
    "rotate": lambda picture, magnitude, resample: picture.rotate(magnitude, resample),
    "posterize": lambda picture, magnitude, resample: ImageOps.posterize(picture, int(magnitude)),
    "solarize": lambda picture, magnitude, resample: ImageOps.solarize(picture, magnitude),  # type: ignore[arg-type]
    "invert": lambda picture, magnitude, resample: ImageOps.invert(picture),
    "hue": lambda picture, magnitude, resample: _with_hue(picture, magnitude),
    "autocontrast": lambda picture, magnitude, resample: ImageOps.autocontrast(picture),
    "equalize": lambda picture, magnitude, resample: ImageOps.equalize(picture),
}

#: operations of `randaugment` and `trivial_augment_wide`, in torchvision's order
NAMES = (
    *("identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate"),
    *("brightness", "color", "contrast", "sharpness"),
    *("posterize", "solarize", "autocontrast", "equalize"),
)

#: operations whose magnitude may be negative
SIGNED = frozenset((*NAMES[1:6], *ENHANCEMENTS))


def changed(image: np.ndarray, choices: Iterable[tuple[str, float]], interpolation: str, neutral: float = 1.0) -> np.ndarray:
    """Return an image (H, W, C) uint8, C being 1 or 3, after the named operations. It may be the same array.

    Args:
        choices: (operation, magnitude) pairs, in order.
        interpolation: one of `RESAMPLING`.
        neutral: number that is added to the magnitude of an enhancement; 0 if magnitudes are factors.
    """
    resample = RESAMPLING[interpolation]
    picture = Image.fromarray(np.ascontiguousarray(image if image.shape[2] == 3 else image[:, :, 0]))
    for name, magnitude in choices:
        if name in ENHANCEMENTS:
            picture = ENHANCEMENTS[name](picture).enhance(neutral + magnitude)
        else:
            picture = _OTHERS[name](picture, magnitude, resample)
    return np.asarray(picture).reshape(image.shape)


class OperationsAugmentation(Augmentation):
    """Augmentation that applies picture operations to grey (1) or RGB (3) images.

    Attributes:
        interpolation: see `changed`.
        neutral: see `changed`.
    """

    interpolation: str = "nearest"
    neutral: ClassVar[float] = 1.0

    @abstractmethod
    def choices(self, size: tuple[int, int], u: np.ndarray) -> list[tuple[str, float]]:
        """Return (operation, magnitude) in order, for random numbers u (draws,) and an image of `size` (H, W)."""

    def output_shape(self, h: int, w: int, c: int) -> tuple[int, int, int]:
        if c not in (1, 3):
            raise ShapeError(f"{self.name} requires images of 1 (grey) or 3 (RGB) channels, not {c}.")
        return h, w, c

    def apply(self, images: np.ndarray, u: np.ndarray, out: np.ndarray) -> None:
        size = images.shape[1], images.shape[2]
        for image, target, drawn in zip(images, out, u, strict=True):
            target[...] = changed(image, self.choices(size, drawn), self.interpolation, self.neutral)
