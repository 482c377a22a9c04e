"""Interfaces of augmentations, which are pure functions of (seed, epoch, sample id) and do not depend on batches.

Each augmentation is a frozen dataclass with its options as fields. It draws `draws` uniform numbers per sample and works on uint8
images. `hpctrain.data.pipeline` runs a list of augmentations and then normalises; instances of `NormalisedAugmentation` come
last.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.errors import OptionError
from hpctrain.core.intervals import Box, whole
from hpctrain.core.registry import Checked

MOST_PIXELS = 1 << 15
#: size in bytes below which OpenCV gains too little to be loaded
LEAST_FOR_OPENCV = 1 << 14

#: function (count) -> the first `count` uniform 32-bit words of a sample, the same in every call
Words = Callable[[int], NDArray[np.uint32]]


class Augmentation(Checked):
    """Map of images (N, H, W, C) uint8 to (N, *output_shape) uint8.

    A subclass that defines only `apply` computes whole images even for ranks that need a region. Overriding `source` and
    `apply_region` avoids this work.

    Attributes:
        name: name from which random numbers are derived; default: the class's name.
        draws: number of uniform numbers per sample.
    """

    name: ClassVar[str]
    draws: ClassVar[int] = 0

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in vars(cls):
            cls.name = cls.__name__

    @property
    def alternates(self) -> bool:
        """Whether all even epochs use the same random numbers, and odd epochs these numbers plus 1/2, modulo 1."""
        return False

    def output_shape(self, h: int, w: int, c: int) -> tuple[int, int, int]:
        """Return the shape (H, W, C) of the results for images of (h, w, c).

        Raises:
            ShapeError: the images are too small.
        """
        return h, w, c

    def resized(self, side: int) -> Augmentation | None:
        """Return the augmentation with results of side x side pixels; None if it does not change the size of images."""
        return None

    @abstractmethod
    def apply(self, images: np.ndarray, u: np.ndarray, out: np.ndarray) -> None:
        """Write the augmented images to `out`, from random numbers u (N, draws) float64 in [0, 1)."""

    def source(self, size: tuple[int, int], u: np.ndarray | None, region: Box) -> Box:
        """Return the part of an image of `size` (H, W) that is needed for a region of its result.

        Args:
            u: (draws,) random numbers of the sample; None: return the part for any random numbers.
        """
        return whole(size)

    def apply_region(
        self, part: np.ndarray, source: Box, size: tuple[int, int], u: np.ndarray, region: Box, out: np.ndarray
    ) -> None:
        """Write a non-empty region of one image's result to `out`, with the same pixels as `apply`.

        Args:
            part: pixels of the region `source` of an image of `size` (H, W).
            source: part of the image, as returned by `source`.
            out: output, initially zero.
        """
        result = np.zeros((1, *self.output_shape(*part.shape)), np.uint8)
        self.apply(part[np.newaxis], u[np.newaxis], result)
        out[...] = result[0][slice(*region[0]), slice(*region[1])]

    def require(self, legal: bool, option: str, rule: str) -> None:
        """Raise an error unless the value of an option is legal.

        Raises:
            OptionError: the value is illegal. The message contains the value and `rule`.
        """
        if not legal:
            value = getattr(self, option)
            shown = list(value) if isinstance(value, tuple) else value
            raise OptionError(f"The option {self.name}.{option} = {shown} {rule}.", option)


class WindowAugmentation(Augmentation):
    """Augmentation whose results are windows of the images, possibly mirrored. Pixels outside the images are black."""

    @abstractmethod
    def windows(self, size: tuple[int, int], u: np.ndarray) -> NDArray[np.int64]:
        """Return the windows in images of `size` (H, W) for the random numbers u (N, draws): (N, 3).

        Each row has the place (top, left) of the window's pixel (0, 0) in the image, and the horizontal direction: 1, or -1 if
        mirrored.
        """


class ResamplingAugmentation(Augmentation):
    """Augmentation that resizes a part of each image, as defined by `hpctrain.backend.pixels`.

    Attributes:
        interpolates: whether enlarged axes are interpolated; otherwise they are filtered, like reduced axes.
    """

    interpolates: ClassVar[bool]

    @abstractmethod
    def source_boxes(self, size: tuple[int, int], u: np.ndarray) -> NDArray[np.int64]:
        """Return the parts (N, 4) of images of `size` (H, W) for u (N, draws): top, left, height and width of each."""


class NormalisedAugmentation(Augmentation):
    """Augmentation of normalised pixels, applied after all others. It changes pixels of an image without moving any."""

    def apply(self, images: np.ndarray, u: np.ndarray, out: np.ndarray) -> None:
        out[...] = images

    def source(self, size: tuple[int, int], u: np.ndarray | None, region: Box) -> Box:
        return region

    @abstractmethod
    def change(self, pixels: np.ndarray, size: tuple[int, int], u: np.ndarray, words: Words, region: Box) -> None:
        """Change a region (h, w, C) of one normalised image of `size` (H, W), in place.

        Args:
            u: (draws,) float64 in [0, 1), random numbers of the sample.
            words: function that returns further random words of the sample.
        """


class FillingAugmentation(NormalisedAugmentation):
    """Augmentation of normalised pixels that may fill a rectangle with one number."""

    @property
    @abstractmethod
    def fill(self) -> float | None:
        """Number that the rectangle is filled with; None if the augmentation does not fill it with one number."""

    @abstractmethod
    def box(self, size: tuple[int, int], u: np.ndarray) -> Box | None:
        """Return the rectangle in an image of `size` (H, W) for the random numbers u (draws,); None if nothing is filled."""
