"""Images of a batch before their last steps: stored pixels, and what is left to do until a network can read them.

A kernel set may do the rest where its arrays lie (`PixelInput`): pixels are a quarter of the bytes of float32. NumPy takes such a
batch for an array, and gets the very numbers, made on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hpctrain.backend.pixels import Resampling

#: What is left to do to one image. The pixel of the result at (y, x) is that of the image at (top + y, left + x * step), where
#: step is 1 or -1; outside of the box `shown` it is black. Behind normalisation one number takes the place of the box `filled`.
WINDOW = np.dtype(
    [
        ("top", np.int32),
        ("left", np.int32),
        ("step", np.int32),
        ("shown", np.int32, (2, 2)),
        ("filled", np.int32, (2, 2)),
    ]
)


@dataclass(frozen=True)
class PixelBatch:
    """Images (N, H, W, C) as what they are made of: an element of channel c is p * scale[c] + shift[c], rounded after both.

    Indexing by a slice or an array of numbers gives the batch of these images.

    Args:
        pixels: uint8 (N, h, w, C). windows: (N,) of `WINDOW`: where p is read. size: (H, W).
        scale, shift: (C,), of the dtype of the images. fill: the number that `filled` boxes are replaced by.
        resampling: windows are those of images that are resized first; None: of the images themselves.
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
        """(N, H, W, C)."""
        return len(self.pixels), *self.size, self.pixels.shape[3]

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the images."""
        return self.scale.dtype

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("Images are made of stored pixels, which is not possible without a copy.")
        out = np.empty(self.shape, self.dtype)
        for number, (image, window, target) in enumerate(zip(self.pixels, self.windows, out, strict=True)):
            self._make(image if self.resampling is None else self.resampling.resized(image, number), window, target)
        return out if dtype is None else out.astype(dtype, copy=False)

    def _make(self, image: np.ndarray, window: np.void, out: np.ndarray) -> None:
        shown = np.zeros(out.shape, np.uint8)
        (above, below), (before, behind) = window["shown"].tolist()
        rows = int(window["top"]) + np.arange(above, below)
        columns = int(window["left"]) + int(window["step"]) * np.arange(before, behind)
        shown[above:below, before:behind] = image[rows[:, np.newaxis], columns]
        np.multiply(shown, self.scale, out=out)
        np.add(out, self.shift, out=out)
        (above, below), (before, behind) = window["filled"].tolist()
        out[above:below, before:behind] = self.fill
