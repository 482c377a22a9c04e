"""Augmentation as pure functions of (seed, epoch, sample id): independent of how samples are grouped into batches.

Each augmentation is a frozen description with its options as fields; it draws `draws` uniform numbers per sample and works on
uint8 images. `hpctrain.data.pipeline` runs a list of them and then normalises; those that are `NormalisedAugmentation` come last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.errors import OptionError
from hpctrain.core.intervals import Box, whole

MOST_PIXELS = 1 << 15
#: images of fewer bytes gain nothing from OpenCV that would be worth loading it
LEAST_FOR_OPENCV = 1 << 14

#: returns the first `count` uniform 32-bit words of a sample, always the same ones
Words = Callable[[int], NDArray[np.uint32]]


class Augmentation(ABC):
    """One map of images (N, H, W, C) uint8 to (N, *output_shape) uint8.

    An augmentation that defines `apply` alone is computed for whole images where ranks need regions of them; `source` and
    `apply_region` save that work.

    Attributes:
        name: the random numbers follow from it; the class's name where it does not say another one.
        draws: uniform numbers per sample.
    """

    name: ClassVar[str]
    draws: ClassVar[int] = 0

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def output_shape(self, h: int, w: int, c: int) -> tuple[int, int, int]:
        """Return the shape (H, W, C) of the results for images of (h, w, c).

        Raises:
            ShapeError: the images are too small.
        """
        return h, w, c

    def resized(self, side: int) -> Augmentation | None:
        """Return the same augmentation with results of side x side pixels; None if its results are as large as its images."""
        return None

    @abstractmethod
    def apply(self, images: np.ndarray, u: np.ndarray, out: np.ndarray) -> None:
        """Write the augmented images to `out`; u: (N, draws) float64 in [0, 1)."""

    def source(self, size: tuple[int, int], u: np.ndarray | None, region: Box) -> Box:
        """Return the part of an image of `size` (H, W) that is needed for a region of its result.

        Args:
            u: (draws,), the sample's; None: whatever is drawn.
        """
        return whole(size)

    def apply_region(
        self, part: np.ndarray, source: Box, size: tuple[int, int], u: np.ndarray, region: Box, out: np.ndarray
    ) -> None:
        """Write a region, which is not empty, of one image's result to `out`, the same pixels as `apply` makes.

        Args:
            part: the region `source`, as `source` returns it, of an image of `size` (H, W). out: zeros.
        """
        result = np.zeros((1, *self.output_shape(*part.shape)), np.uint8)
        self.apply(part[np.newaxis], u[np.newaxis], result)
        out[...] = result[0][slice(*region[0]), slice(*region[1])]

    def require(self, legal: bool, option: str, rule: str) -> None:
        """Raise unless the value of an option is legal.

        Raises:
            OptionError: it is not; the sentence has the value and `rule`.
        """
        if not legal:
            value = getattr(self, option)
            shown = list(value) if isinstance(value, tuple) else value
            raise OptionError(f"The option {self.name}.{option} = {shown} {rule}.", option)


class WindowAugmentation(Augmentation):
    """An augmentation that makes no pixels of its own: results are windows of images, black beyond them, and maybe mirrored."""

    @abstractmethod
    def windows(self, size: tuple[int, int], u: np.ndarray) -> NDArray[np.int64]:
        """Return where results begin in images of `size` (H, W), from the numbers u (N, draws): (N, 3).

        Of each: the place of its pixel (0, 0), top and left, and 1, or -1 where the next pixel on the right is one on the left.
        """


class ResamplingAugmentation(Augmentation):
    """An augmentation that resizes a part of each image: results are what `hpctrain.backend.pixels` makes of it.

    Attributes:
        interpolates: ways that grow are interpolated; else they are filtered, too.
    """

    interpolates: ClassVar[bool]

    @abstractmethod
    def source_boxes(self, size: tuple[int, int], u: np.ndarray) -> NDArray[np.int64]:
        """Return the parts of images of `size` (H, W) from the numbers u (N, draws): (N, 4), each top, left, height and width."""


class NormalisedAugmentation(Augmentation):
    """An augmentation of normalised pixels, after all others: it changes some pixels of an image and moves none."""

    def apply(self, images: np.ndarray, u: np.ndarray, out: np.ndarray) -> None:
        out[...] = images

    def source(self, size: tuple[int, int], u: np.ndarray | None, region: Box) -> Box:
        return region

    @abstractmethod
    def change(self, pixels: np.ndarray, size: tuple[int, int], u: np.ndarray, words: Words, region: Box) -> None:
        """Change a region (h, w, C) of one normalised image of `size` (H, W), in place.

        Args:
            u: (draws,) float64 in [0, 1), the sample's.
        """


class FillingAugmentation(NormalisedAugmentation):
    """One that may do no more than replace all of a rectangle by one number."""

    @property
    @abstractmethod
    def fill(self) -> float | None:
        """The number; None: it does something else."""

    @abstractmethod
    def box(self, size: tuple[int, int], u: np.ndarray) -> Box | None:
        """Return the rectangle in an image of `size` (H, W) from the sample's numbers u (draws,); None if nothing is replaced."""
