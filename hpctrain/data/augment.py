"""Augmentation as pure functions of (seed, epoch, sample id): independent of how samples are grouped into batches.

Each augmentation is a frozen description with its options as fields; it draws `draws` uniform numbers per sample and works on
uint8 images. `hpctrain.data.pipeline` runs a list of them and normalises last.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hpctrain.boxes import Box, Interval, clip, hull, moved, relative, size_of, whole
from hpctrain.errors import ConfigError, ShapeError

_RESIZE_TRIES = 10
_MOST_PIXELS = 1 << 15


class Augmentation(ABC):
    """One map of images (N, H, W, C) uint8 to (N, *output_shape) uint8.

    Attributes:
        name: as the configuration calls it. draws: uniform numbers per sample.
    """

    name: ClassVar[str]
    draws: ClassVar[int] = 0

    def output_shape(self, h: int, w: int, c: int) -> tuple[int, int, int]:
        """(H, W, C) after it, for (h, w, c) before.

        Raises:
            ShapeError: the images are too small.
        """
        return h, w, c

    @abstractmethod
    def apply(self, images: np.ndarray, u: np.ndarray, out: np.ndarray) -> None:
        """Write the augmented images to `out`; u: (N, draws) float64 in [0, 1)."""

    @abstractmethod
    def source(self, size: tuple[int, int], u: np.ndarray | None, region: Box) -> Box:
        """What of an image of `size` (H, W) is needed for a region of its result.

        Args:
            u: (draws,), the sample's; None: whatever is drawn.
        """

    @abstractmethod
    def apply_region(
        self, part: np.ndarray, source: Box, size: tuple[int, int], u: np.ndarray, region: Box, out: np.ndarray
    ) -> None:
        """Write a region, which is not empty, of one image's result to `out`, the same pixels as `apply` makes.

        Args:
            part: the region `source`, as `source` gives it, of an image of `size` (H, W). out: zeros.
        """


@dataclass(frozen=True)
class PadCrop(Augmentation):
    """Black edges, then a random window of the images' own size (He et al., CVPR 2016, section 4.2).

    Args:
        padding: Width of the black edge on each side, in pixels.
    """

    padding: int = 4

    name: ClassVar[str] = "pad_crop"
    draws: ClassVar[int] = 2

    def __post_init__(self) -> None:
        _require(self.padding >= 0, "pad_crop", "padding", self.padding, "is negative; the smallest is 0, the usual one 4")
        _require(self.padding <= _MOST_PIXELS, "pad_crop", "padding", self.padding, f"is too large; at most {_MOST_PIXELS}")

    def apply(self, images: np.ndarray, u: np.ndarray, out: np.ndarray) -> None:
        height, width = images.shape[1:3]
        shifts = (u * (2 * self.padding + 1)).astype(np.int64) - self.padding
        out[...] = 0
        for image, target, (dy, dx) in zip(images, out, shifts.tolist(), strict=True):
            rows, to_rows = _overlap(dy, height)
            columns, to_columns = _overlap(dx, width)
            target[to_rows, to_columns] = image[rows, columns]

    def source(self, size: tuple[int, int], u: np.ndarray | None, region: Box) -> Box:
        if u is not None:
            return clip(moved(region, self._shift(u)), size)
        (top, bottom), (left, right) = region
        return clip(((top - self.padding, bottom + self.padding), (left - self.padding, right + self.padding)), size)

    def apply_region(
        self, part: np.ndarray, source: Box, size: tuple[int, int], u: np.ndarray, region: Box, out: np.ndarray
    ) -> None:
        out[relative(source, moved(region, self._shift(u)))] = part

    def _shift(self, u: np.ndarray) -> tuple[int, int]:
        dy, dx = ((u * (2 * self.padding + 1)).astype(np.int64) - self.padding).tolist()
        return dy, dx


@dataclass(frozen=True)
class RandomResizedCrop(Augmentation):
    """A window of random area and aspect, resized to a square (Szegedy et al., CVPR 2015).

    Ten tries at a window that fits, then the largest central one within `ratio`. Bilinear, with the triangle filter
    widened where it shrinks.

    Args:
        size: Side of the result, in pixels.
        scale: Least and most share of the image's area that the window has, within (0, 1].
        ratio: Least and most width over height of the window.
    """

    size: int
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (0.75, 4 / 3)

    name: ClassVar[str] = "random_resized_crop"
    draws: ClassVar[int] = 2 * _RESIZE_TRIES + 2

    def __post_init__(self) -> None:
        _require(self.size >= 1, self.name, "size", self.size, "is not positive; the smallest is 1, the usual one 224")
        low, high = self.scale
        _require(0 < low <= high <= 1, self.name, "scale", self.scale, "must be low <= high within (0, 1], such as [0.08, 1.0]")
        _require(self.size <= _MOST_PIXELS, self.name, "size", self.size, f"is too large; at most {_MOST_PIXELS}")
        low, high = self.ratio
        legal = 1e-3 <= low <= high <= 1e3
        _require(legal, self.name, "ratio", self.ratio, "must be low <= high within [0.001, 1000], such as [0.75, 1.333]")

    def output_shape(self, h: int, w: int, c: int) -> tuple[int, int, int]:
        return self.size, self.size, c

    def apply(self, images: np.ndarray, u: np.ndarray, out: np.ndarray) -> None:
        boxes = self.boxes(images.shape[1], images.shape[2], u)
        for image, target, (top, left, height, width) in zip(images, out, boxes.tolist(), strict=True):
            target[...] = _resized(image[top : top + height, left : left + width], self.size, self.size)

    def source(self, size: tuple[int, int], u: np.ndarray | None, region: Box) -> Box:
        if u is None:
            return whole(size)
        if not size_of(region):
            return region
        top, left, height, width = self._box(size, u)
        rows, columns = _filtered(region[0], height, self.size), _filtered(region[1], width, self.size)
        return moved((rows, columns), (top, left))

    def apply_region(
        self, part: np.ndarray, source: Box, size: tuple[int, int], u: np.ndarray, region: Box, out: np.ndarray
    ) -> None:
        """The two passes of `_resized`, each over its whole length for the same weights; zeros where they do not reach."""
        top, left, height, width = self._box(size, u)
        rows, columns = relative(source, ((top, 0), (left, 0)))
        (above, below), across = region[0], slice(*region[1])
        wide = np.zeros((part.shape[0], width, part.shape[2]), np.uint8)
        wide[:, columns] = part
        high = np.zeros((height, out.shape[1], part.shape[2]), np.uint8)
        high[rows] = _resized(wide, part.shape[0], self.size)[:, across]
        out[...] = _resized(high, self.size, out.shape[1])[above:below]

    def _box(self, size: tuple[int, int], u: np.ndarray) -> tuple[int, int, int, int]:
        top, left, height, width = self.boxes(*size, u[None])[0].tolist()
        return top, left, height, width

    def boxes(self, height: int, width: int, u: np.ndarray) -> NDArray[np.int64]:
        """Windows (N, 4) int64: top, left, height, width, inside (height, width)."""
        area = height * width * (self.scale[0] + (self.scale[1] - self.scale[0]) * u[:, 0 : 2 * _RESIZE_TRIES : 2])
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        aspect = np.exp(low + (high - low) * u[:, 1 : 2 * _RESIZE_TRIES : 2])
        w = np.rint(np.sqrt(area * aspect)).astype(np.int64)
        h = np.rint(np.sqrt(area / aspect)).astype(np.int64)
        fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
        first, rows = fits.argmax(axis=1), np.arange(len(u))
        w, h = w[rows, first], h[rows, first]
        top = (u[:, -2] * (height - h + 1)).astype(np.int64)
        left = (u[:, -1] * (width - w + 1)).astype(np.int64)
        boxes = np.stack([top, left, h, w], axis=1)
        boxes[~fits.any(axis=1)] = self._central(height, width)
        return boxes

    def _central(self, height: int, width: int) -> tuple[int, int, int, int]:
        aspect = min(max(width / height, self.ratio[0]), self.ratio[1])
        h = max(1, min(height, round(width / aspect)))
        w = max(1, min(width, round(height * aspect)))
        return (height - h) // 2, (width - w) // 2, h, w


@dataclass(frozen=True)
class CenterCrop(Augmentation):
    """The central square window.

    Args:
        size: Side of the window, in pixels; at most the images' shorter side.
    """

    size: int

    name: ClassVar[str] = "center_crop"

    def __post_init__(self) -> None:
        _require(self.size >= 1, self.name, "size", self.size, "is not positive; the smallest is 1, the usual one 224")

    def output_shape(self, h: int, w: int, c: int) -> tuple[int, int, int]:
        if min(h, w) < self.size:
            raise ShapeError(f"center_crop.size {self.size} is larger than the images of {h}x{w}; at most {min(h, w)} fits.")
        return self.size, self.size, c

    def apply(self, images: np.ndarray, u: np.ndarray, out: np.ndarray) -> None:
        top, left = (images.shape[1] - self.size) // 2, (images.shape[2] - self.size) // 2
        out[...] = images[:, top : top + self.size, left : left + self.size]

    def source(self, size: tuple[int, int], u: np.ndarray | None, region: Box) -> Box:
        return moved(region, ((size[0] - self.size) // 2, (size[1] - self.size) // 2))

    def apply_region(
        self, part: np.ndarray, source: Box, size: tuple[int, int], u: np.ndarray, region: Box, out: np.ndarray
    ) -> None:
        out[...] = part


@dataclass(frozen=True)
class Flip(Augmentation):
    """Left and right exchanged at random.

    Args:
        probability: Share of the images that are mirrored, in [0, 1].
    """

    probability: float = 0.5

    name: ClassVar[str] = "flip"
    draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        legal = 0 <= self.probability <= 1
        _require(legal, self.name, "probability", self.probability, "is outside [0, 1]; the usual one is 0.5")

    def apply(self, images: np.ndarray, u: np.ndarray, out: np.ndarray) -> None:
        for image, target, flipped in zip(images, out, (u[:, 0] < self.probability).tolist(), strict=True):
            target[...] = image[:, ::-1] if flipped else image

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


AUGMENTATIONS: Mapping[str, type[Augmentation]] = {kind.name: kind for kind in (PadCrop, RandomResizedCrop, CenterCrop, Flip)}


def find(name: str) -> type[Augmentation]:
    """The augmentation of that name.

    Raises:
        ConfigError: there is none; the sentence names the nearest.
    """
    if name not in AUGMENTATIONS:
        raise ConfigError(f"There is no augmentation {name!r}; {_nearest(name, AUGMENTATIONS)}.")
    return AUGMENTATIONS[name]


def check(name: str, options: Mapping[str, Any]) -> Augmentation:
    """The augmentation that a configuration describes.

    Raises:
        ConfigError: an unknown name or option (with the nearest known one), a missing option, a value of a wrong type or range.
    """
    kind = find(name)
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for option in options:
        if option not in fields:
            hint = _nearest(option, fields) if fields else "it has none"
            raise ConfigError(f"The augmentation {name} has no option {option!r}; {hint}.")
    for field in fields.values():
        if field.default is dataclasses.MISSING and field.name not in options:
            raise ConfigError(f"The augmentation {name} needs the option {field.name!r}, such as {field.name}: 224.")
    return kind(**{option: _typed(name, option, str(fields[option].type), value) for option, value in options.items()})


def _overlap(shift: int, size: int) -> tuple[slice, slice]:
    """Source and target slices of a window moved by `shift` over an image of `size` (empty where they do not meet)."""
    length = max(0, size - abs(shift))
    source, target = (shift, 0) if shift >= 0 else (0, -shift)
    return slice(source, source + length), slice(target, target + length)


def _resized(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bilinear resize of (h, w, C) uint8 to (height, width, C): the columns, then the rows, rounded to uint8 after each.

    Two calls, because one call for both leaves the order to Pillow, which takes the rows first where that is less work. The order
    shows in the rounding, and a region of an image must get the pixels of the whole image.
    """
    if image.shape[2] == 3:
        return _in_two_passes(image, height, width)
    target = np.empty((height, width, image.shape[2]), np.uint8)
    for channel in range(image.shape[2]):
        target[..., channel] = _in_two_passes(image[..., channel], height, width)
    return target


def _in_two_passes(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """The same for (h, w, 3), or one channel (h, w)."""
    stored = Image.fromarray(np.ascontiguousarray(image))
    narrowed = stored.resize((width, stored.height), Image.Resampling.BILINEAR)
    return np.asarray(narrowed.resize((width, height), Image.Resampling.BILINEAR))


def _filtered(interval: Interval, size: int, resized: int) -> Interval:
    """Elements that the triangle filter may reach for `interval` of `resized` ones made of `size`; at most some too many."""
    scale = size / resized
    reach = max(scale, 1.0) + 1.5
    start, stop = (interval[0] + 0.5) * scale - reach, (interval[1] - 0.5) * scale + reach
    return max(0, math.floor(start)), min(size, math.ceil(stop))


def _require(legal: bool, name: str, option: str, value: object, rule: str) -> None:
    if not legal:
        shown = list(value) if isinstance(value, tuple) else value
        raise ConfigError(f"The option {name}.{option} = {shown} {rule}.")


def _nearest(word: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(word, known, 1, 0.5)
    return f"the nearest is {close[0]!r}" if close else f"known are {', '.join(sorted(known))}"


def _typed(name: str, option: str, kind: str, value: Any) -> Any:
    """The value as its field's type ("int", "float" or a pair of floats).

    Raises:
        ConfigError: another type. YAML gives lists for pairs, integers for whole floats.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind == "int" and isinstance(value, int) and number:
        return value
    if kind == "float" and number:
        return float(value)
    if kind.startswith("tuple") and isinstance(value, (list, tuple)) and len(value) == 2:
        return tuple(_typed(name, option, "float", part) for part in value)
    wanted = {"int": "a whole number", "float": "a number"}.get(kind, "two numbers [low, high]")
    raise ConfigError(f"The option {name}.{option} = {value!r} must be {wanted}.")
