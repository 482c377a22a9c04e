"""Batches of stored pixels, which are converted to a network's input as late as possible, and resizing of images.

A `PixelBatch` holds stored pixels and the operations that turn them into a network's input. A kernel set may execute these
operations in its own memory (`PixelInput`), since pixels take a quarter of the bytes of float32. `np.asarray` computes exactly
the same numbers on the host.

Images are resized in integer arithmetic, bit-equal to Pillow and OpenCV. Rows and columns are resampled separately, by weighted
sums of neighbouring pixels:

- *filtered* dimensions, which shrink or keep their length, use Pillow's triangle filter, scaled to the size of an output pixel.
  Weights have 22 bits. Results are rounded to uint8 after each dimension, of which the columns come first;
- *interpolated* dimensions, which grow, use OpenCV's INTER_LINEAR_EXACT: two weights of 8 bits, rounded once after both
  dimensions.

A dimension that grows while interpolation is off is filtered too. The filter then has the size of a stored pixel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

FILTER_BITS, INTERPOLATION_BITS = 22, 8


@dataclass(frozen=True)
class Resampling:
    """The resizing of a batch's images (h, w), before their windows are read.

    Attributes:
        boxes: (N, 4) int32: top, left, height and width of the part of each image that is resized.
        size: (H, W) of the results.
        interpolates: whether dimensions that grow are interpolated; otherwise they are filtered too.
    """

    boxes: np.ndarray
    size: tuple[int, int]
    interpolates: bool

    def of(self, samples: slice | np.ndarray) -> Resampling:
        """Return the resampling of some of the images."""
        return replace(self, boxes=self.boxes[samples])

    def resized(self, image: np.ndarray, number: int) -> np.ndarray:
        """Return image `number` of the batch, (h, w, C) uint8, resized to (H, W, C) uint8."""
        top, left, height, width = self.boxes[number].tolist()
        return resized(image[top : top + height, left : left + width], self.size, interpolates=self.interpolates)


@dataclass(frozen=True)
class Taps:
    """The stored pixels and weights from which each pixel of a resampled dimension is computed.

    Attributes:
        interpolated: whether the dimension is interpolated; otherwise it is filtered.
        first: (n,) int64: index of the first stored pixel of each output pixel.
        weights: (n, k) int64: weights of the first pixel and its successors, in 2**-INTERPOLATION_BITS or 2**-FILTER_BITS.
    """

    interpolated: bool
    first: np.ndarray
    weights: np.ndarray

    def applied(self, pixels: np.ndarray) -> np.ndarray:
        """Return the weighted sums (n, ...) int64 of pixels (h, ...) along the first dim."""
        neighbours = np.minimum(self.first[:, np.newaxis] + np.arange(self.weights.shape[1]), len(pixels) - 1)
        sums: np.ndarray = np.einsum("nk...,nk->n...", pixels.astype(np.int64)[neighbours], self.weights)
        return sums


def most_taps(size: int, made: int) -> int:
    """Return an upper bound on the number of stored pixels per output pixel if at most `size` pixels are resampled to `made`."""
    return 2 * math.ceil(max(1.0, size / made)) + 1


@lru_cache(maxsize=1024)
def taps(size: int, made: int, *, interpolates: bool) -> Taps:
    """Return the taps of `made` pixels computed from `size` stored pixels."""
    return _interpolation(size, made) if interpolates and made > size else _filter(size, made)


def _filter(size: int, made: int) -> Taps:
    """Return the taps of Pillow's triangle filter, by the same operations as `precompute_coeffs` and `normalize_coeffs_8bpc`."""
    scale = size / made
    support = max(scale, 1.0)
    centre = (np.arange(made) + 0.5) * scale
    first = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    count = np.minimum((centre + support + 0.5).astype(np.int64), size) - first
    weights = np.zeros((made, most_taps(size, made)))
    total = np.zeros(made)
    for k in range(weights.shape[1]):
        distance = np.abs(((first + k) - centre + 0.5) * (1.0 / support))
        weights[:, k] = np.where((k < count) & (distance < 1.0), 1.0 - distance, 0.0)
        total += weights[:, k]
    shares = weights / total[:, np.newaxis]
    return Taps(False, first, (0.5 + shares * (1 << FILTER_BITS)).astype(np.int64))


def _interpolation(size: int, made: int) -> Taps:
    """Return the taps of OpenCV's `interpolationLinear` with fixed-point weights. Beyond an edge, its pixel is repeated."""
    scale = 1.0 / (made / size)
    place = scale * (np.arange(made) + 0.5) - 0.5
    before = np.floor(place).astype(np.int64)
    inside = (before >= 0) & (before < size - 1)
    second = np.where(inside, np.rint((place - before) * (1 << INTERPOLATION_BITS)).astype(np.int64), 0)
    return Taps(True, np.clip(before, 0, size - 1), np.stack([(1 << INTERPOLATION_BITS) - second, second], axis=1))


def resized(image: np.ndarray, size: tuple[int, int], *, interpolates: bool) -> np.ndarray:
    """Return an image (h, w, C) uint8 resized to (*size, C)."""
    down, across = (taps(length, made, interpolates=interpolates) for length, made in zip(image.shape, size, strict=False))
    pixels = image.astype(np.int64)
    if not across.interpolated:
        pixels = _rounded(_across(across, pixels), FILTER_BITS)
    if not down.interpolated:
        pixels = _rounded(down.applied(pixels), FILTER_BITS)
    if across.interpolated:
        pixels = _across(across, pixels)
    if down.interpolated:
        pixels = down.applied(pixels)
    bits = INTERPOLATION_BITS * (across.interpolated + down.interpolated)
    return (_rounded(pixels, bits) if bits else pixels).astype(np.uint8)


def _across(across: Taps, pixels: np.ndarray) -> np.ndarray:
    return across.applied(pixels.swapaxes(0, 1)).swapaxes(0, 1)


def _rounded(sums: np.ndarray, bits: int) -> np.ndarray:
    values: np.ndarray = np.minimum((sums + (1 << bits - 1)) >> bits, 255)
    return values


#: Crop, reflection and erasure of one image. The result's pixel at (y, x) is the image's pixel at (top + y, left + x * step),
#: with step 1 or -1; outside the box `shown` it is black. After normalisation, `fill` overwrites the box `filled`.
WINDOW = np.dtype(
    [("top", np.int32), ("left", np.int32), ("step", np.int32), ("shown", np.int32, (2, 2)), ("filled", np.int32, (2, 2))]
)


@dataclass(frozen=True)
class PixelBatch:
    """Images (N, H, W, C) as stored pixels: an element of channel c is p * scale[c] + shift[c], rounded after both operations.

    Indexing by a slice or an array of indices returns a batch of the selected images.

    Attributes:
        pixels: stored pixels, uint8 (N, h, w, C).
        windows: (N,) of dtype `WINDOW`: crop, reflection and erasure of each image, which determine the positions of its pixels
            p.
        size: (H, W) of the images.
        scale, shift: (C,), in the dtype of the images.
        fill: value of the elements in `filled` boxes.
        resampling: resizing of the images before their windows are read; None: windows are read from the stored images.
    """

    pixels: np.ndarray
    windows: np.ndarray
    size: tuple[int, int]
    scale: np.ndarray
    shift: np.ndarray
    fill: float = 0.0
    resampling: Resampling | None = None

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, samples: slice | np.ndarray) -> PixelBatch:
        resampling = None if self.resampling is None else self.resampling.of(samples)
        return replace(self, pixels=self.pixels[samples], windows=self.windows[samples], resampling=resampling)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape (N, H, W, C) of the images."""
        return len(self.pixels), *self.size, self.pixels.shape[3]

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the images."""
        return self.scale.dtype

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("Cannot convert stored pixels to images without a copy; leave `copy` at None.")
        out = np.empty(self.shape, self.dtype)
        for number, (image, window, target) in enumerate(zip(self.pixels, self.windows, out, strict=True)):
            self._make(image if self.resampling is None else self.resampling.resized(image, number), window, target)
        return out if dtype is None else out.astype(dtype, copy=False)

    def _make(self, image: np.ndarray, window: np.void, out: np.ndarray) -> None:
        shown = np.zeros(out.shape, np.uint8)
        (above, below), (before, after) = window["shown"].tolist()
        rows = int(window["top"]) + np.arange(above, below)
        columns = int(window["left"]) + int(window["step"]) * np.arange(before, after)
        shown[above:below, before:after] = image[rows[:, np.newaxis], columns]
        np.multiply(shown, self.scale, out=out)
        np.add(out, self.shift, out=out)
        (above, below), (before, after) = window["filled"].tolist()
        out[above:below, before:after] = self.fill
