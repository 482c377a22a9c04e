"""The last steps of a pipeline as a kernel set can do them to stored pixels: a resize, windows, normalisation, one filled box."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from hpctrain.backend.pixel_batch import WINDOW
from hpctrain.backend.pixels import Resampling
from hpctrain.core.intervals import Box
from hpctrain.data.augmentations.base import (
    Augmentation,
    FillingAugmentation,
    NormalisedAugmentation,
    ResamplingAugmentation,
    WindowAugmentation,
)


def first_deferred(steps: Sequence[Augmentation]) -> int:
    """The number of the first step that may be left: windows are all that follow it, and it resizes images or is one itself."""
    made = [number for number, step in enumerate(steps, 1) if not isinstance(step, WindowAugmentation)]
    if not made:
        return 0
    return made[-1] - 1 if isinstance(steps[made[-1] - 1], ResamplingAugmentation) else made[-1]


def leaves_resize(steps: Sequence[Augmentation]) -> bool:
    """Whether the first of the steps that may be left resizes images."""
    first = first_deferred(steps)
    return first < len(steps) and isinstance(steps[first], ResamplingAugmentation)


def resampled(step: Augmentation, size: tuple[int, int], u: np.ndarray) -> Resampling | None:
    """The resize of images of `size` (H, W) that a step is, by the numbers u (count, draws); None: it is none."""
    if not isinstance(step, ResamplingAugmentation):
        return None
    height, width, _ = step.output_shape(*size, 0)
    return Resampling(step.source_boxes(size, u).astype(np.int32), (height, width), step.interpolates)


def can_defer(normalised: Sequence[NormalisedAugmentation]) -> bool:
    """Whether steps behind normalisation are at most one rectangle of one number."""
    return not normalised or (len(normalised) == 1 and filling(normalised) is not None)


def filling(normalised: Sequence[NormalisedAugmentation]) -> FillingAugmentation | None:
    """The step that fills a rectangle with one number, where it is the first one."""
    first = normalised[0] if normalised else None
    return first if isinstance(first, FillingAugmentation) and first.fill is not None else None


def composed(
    count: int, size: tuple[int, int], steps: Iterable[tuple[Augmentation, np.ndarray]]
) -> tuple[np.ndarray, tuple[int, int]]:
    """Windows (count,) of `WINDOW` that show what all steps together show of images of `size` (H, W), and the size of results.

    Args:
        steps: windows, with the numbers (count, draws) that were drawn for them.
    """
    windows = np.zeros(count, WINDOW)
    windows["step"] = 1
    windows["shown"] = [(0, size[0]), (0, size[1])]
    for step, u in steps:
        assert isinstance(step, WindowAugmentation), f"{step} is no window"
        top, left, direction = step.windows(size, u).T
        height, width, _ = step.output_shape(*size, 0)
        size = height, width
        _show(windows, top, left, direction, size)
    return windows, size


def _show(windows: np.ndarray, top: np.ndarray, left: np.ndarray, direction: np.ndarray, size: tuple[int, int]) -> None:
    """Put a window of `size` in front of others: its pixel (y, x) is theirs at (top + y, left + direction * x)."""
    before, behind = windows["shown"][:, 1].T.astype(np.int64)
    mirrored = direction < 0
    across = np.where(mirrored, left - behind + 1, before - left), np.where(mirrored, left - before + 1, behind - left)
    windows["shown"][:, 0] = np.clip(windows["shown"][:, 0] - top[:, np.newaxis], 0, size[0])
    windows["shown"][:, 1] = np.clip(np.stack(across, axis=1), 0, size[1])
    windows["top"] += top.astype(np.int32)
    windows["left"] += (windows["step"] * left).astype(np.int32)
    windows["step"] *= direction.astype(np.int32)


def mirrored_box(box: Box, width: int) -> Box:
    """A box of an image (H, W) so wide, in its mirror image."""
    rows, (left, right) = box
    return rows, (width - right, width - left)
