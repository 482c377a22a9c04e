"""Operations of OpenCV on one image, in the calling thread.

Importing this module loads OpenCV, so it is imported only when one of its operations is used. OpenCV's own threads are off:
`data.threads` sets the number of threads that make a batch, and each of these calls releases the GIL.
"""

from __future__ import annotations

import cv2
import numpy as np

_MOST_CHANNELS = 4

cv2.setNumThreads(0)


def enlarge(image: np.ndarray, out: np.ndarray) -> None:
    """Resize an image (h, w, C) uint8 bilinearly to `out` (H, W, C), with H >= h and W >= w.

    Each pixel is computed from its neighbours in integer arithmetic and rounded once, so the result is bitwise equal on every
    processor.
    """
    if 1 < image.shape[2] <= _MOST_CHANNELS:
        size = out.shape[1], out.shape[0]
        _keep(cv2.resize(image, size, dst=_target(out), interpolation=cv2.INTER_LINEAR_EXACT), out)
        return
    for channel in range(image.shape[2]):
        plane = np.ascontiguousarray(image[..., channel])
        out[..., channel] = cv2.resize(plane, (out.shape[1], out.shape[0]), interpolation=cv2.INTER_LINEAR_EXACT)


def mirror(image: np.ndarray, out: np.ndarray) -> None:
    """Write an image (H, W, C) uint8 with left and right exchanged to `out`, which must not overlap it."""
    _keep(cv2.flip(image, 1, dst=_target(out)), out)


def look_up(image: np.ndarray, table: np.ndarray, out: np.ndarray) -> None:
    """Write `table[0, value, channel]` of each element of an image (H, W, C) uint8 to `out`.

    Args:
        table: (1, 256, C), with the dtype of `out`: float32 or float64.
    """
    _keep(cv2.LUT(image, table, dst=_target(out)), out)


def _target(out: np.ndarray) -> np.ndarray | None:
    """Return `out` if OpenCV can write to it; None if OpenCV must return a new array, because it drops a last dim of 1."""
    return out if out.flags.c_contiguous and out.shape[-1] > 1 else None


def _keep(result: np.ndarray, out: np.ndarray) -> None:
    if result is not out:
        out[...] = result.reshape(out.shape)
