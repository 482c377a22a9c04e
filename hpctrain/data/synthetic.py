"""Images that are made up, for timing a model, or trying one out, without any data file.

Every pixel is a pure function of the split, the sample and the shape: noise, which is a window of one pool of random bytes, and
stripes, whose brightness follows from the class, so that a network can learn to tell the classes. Making an image costs little
more than a copy of it, and nothing but the pool is kept in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from hpctrain.backend.counter_random import key, words
from hpctrain.config.data_section import SYNTHETIC
from hpctrain.data.image_file import ImageFile
from hpctrain.data.format import names_digest

Split = Literal["train", "test"]
_WINDOWS = 1 << 20  # places in the pool where an image may begin
_STRIPES = 8  # of one brightness: wider than shifts of augmentations
_MEASURED = 64  # images of which mean and deviation are taken


class SyntheticImages:
    """Images that are made when they are read; it is indexed as an array (N, H, W, C) of uint8 is.

    Args:
        split: test images are others than training images. labels: (N,), the class of each. shape: (H, W, C). classes: of all.
    """

    def __init__(self, split: Split, labels: np.ndarray, shape: tuple[int, int, int], classes: int) -> None:
        self.shape = (len(labels), *shape)
        self._labels = labels
        self._begins = (words(key("synthetic windows", split), np.arange(len(labels)), range(1))[:, 0] % _WINDOWS).astype(
            np.int64
        )
        self._size = shape[0] * shape[1] * shape[2]
        pool = words(key("synthetic noise"), [0], range(-(-(_WINDOWS + self._size) // 4)))
        self._pool = np.right_shift(pool.reshape(-1).view(np.uint8), 1)
        stripe = np.arange(shape[0]) * _STRIPES // shape[0]
        brightness = words(key("synthetic stripes"), np.arange(classes), range(_STRIPES)) >> np.uint32(25)
        self._stripes = brightness.astype(np.uint8)[:, stripe]

    def __getitem__(self, index: int | slice | tuple[int | slice, slice, slice]) -> np.ndarray:
        """Pixels of one sample (h, w, C) or of several (n, h, w, C): whole, or a region of them."""
        samples, *region = index if isinstance(index, tuple) else (index,)
        rows, columns = region or (slice(None), slice(None))
        if isinstance(samples, slice):
            numbers = range(self.shape[0])[samples]
            out = np.empty((len(numbers), *self._pixels(0)[rows, columns].shape), np.uint8)
            for number, target in zip(numbers, out, strict=True):
                self._write(number, rows, columns, target)
            return out
        out = np.empty(self._pixels(0)[rows, columns].shape, np.uint8)
        self._write(samples, rows, columns, out)
        return out

    def take(self, samples: Sequence[int] | np.ndarray, out: np.ndarray) -> np.ndarray:
        """Whole images of samples, written to `out` (n, H, W, C), which is returned."""
        for sample, target in zip(samples, out, strict=True):
            self._write(int(sample), slice(None), slice(None), target)
        return out

    def _pixels(self, sample: int) -> np.ndarray:
        """View of the noise of an image."""
        begin = self._begins[sample]
        return self._pool[begin : begin + self._size].reshape(self.shape[1:])

    def _write(self, sample: int, rows: slice, columns: slice, out: np.ndarray) -> None:
        stripes = self._stripes[self._labels[sample], rows]
        np.add(self._pixels(sample)[rows, columns], stripes[:, None, None], out=out)


def synthetic_file(split: Split, samples: int, shape: tuple[int, int, int], classes: int) -> ImageFile:
    """Made-up images as if they were in a data file; no file is read.

    Args:
        samples: images, of which sample n is of class n modulo `classes`. shape: (H, W, C).
    """
    labels = np.arange(samples, dtype=np.int64) % classes
    names = tuple(f"class {number}" for number in range(classes))
    images = SyntheticImages(split, labels, shape, classes)
    some = images[:_MEASURED].reshape(-1, shape[2]) / 255
    description = f"synthetic {split} images 1: {samples} of {shape} and {classes} classes"
    manifest = {"images": hashlib.sha256(description.encode()).hexdigest(), "class_names": names_digest(names)}
    return ImageFile(Path(SYNTHETIC), images, labels, names, (some.mean(axis=0), some.std(axis=0)), manifest)
