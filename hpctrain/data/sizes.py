"""The sizes of images by epoch: a training may begin with small images and end with large ones."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from hpctrain.data.pipeline import Pipeline
from hpctrain.core.errors import ConfigError, ShapeError


@dataclass(frozen=True)
class ImageSizes:
    """The shorter sides of images by epoch.

    Args:
        steps: (epoch, side in pixels): from which epoch on images have which side. Epochs count from 0, and rise from it.

    Raises:
        ConfigError: epochs that do not begin at 0 or do not rise, or a side that is not positive.
    """

    steps: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not self.steps:
            raise ConfigError("There are no sizes of images; give at least one, such as (0, 32).")
        fault = first_fault(self.steps)
        if fault is not None:
            raise ConfigError(f"Size {fault[0]} of images, {self.steps[fault[0]]}, {fault[1]}.")

    def at(self, epoch: int) -> int:
        """The side in an epoch, counted from 0."""
        return self.steps[bisect_right([first for first, _ in self.steps], epoch) - 1][1]

    def changes_at(self, epoch: int) -> bool:
        """Whether an epoch, counted from 0, has another size than the one before; True for the first."""
        return epoch == 0 or self.at(epoch) != self.at(epoch - 1)

    def largest(self, epochs: int) -> int:
        """The largest side that a training of so many epochs comes to."""
        return max(side for first, side in self.steps if first < max(1, epochs))

    def shapes(
        self, pipeline: Pipeline, stored: tuple[int, int, int], epochs: int | None = None
    ) -> tuple[tuple[int, int, int], ...]:
        """(H, W, C) of each size that a pipeline makes of images as they are stored, the largest first.

        epochs: of the training; None: it comes to all sizes.

        Raises:
            ShapeError: stored images that are too small for one of them.
        """
        sides = {side for first, side in self.steps if epochs is None or first < max(1, epochs)}
        return tuple(_shape(pipeline, stored, side) for side in sorted(sides, reverse=True))

    def __str__(self) -> str:
        return ", ".join(f"{side} px from epoch {first + 1}" for first, side in self.steps)


def _shape(pipeline: Pipeline, stored: tuple[int, int, int], side: int) -> tuple[int, int, int]:
    try:
        return pipeline.resized(side).output_shape(*stored)
    except ShapeError as error:
        raise ShapeError(f"There cannot be images of {side} px: {error}") from None


def first_fault(steps: tuple[tuple[int, int], ...]) -> tuple[int, str] | None:
    """(number of a step, its fault as the second half of a sentence) of the first step at fault; None: there is none."""
    for number, (before, (epoch, side)) in enumerate(pairwise(((-1, 1), *steps))):
        if number == 0 and epoch != 0:
            return number, f"begins at epoch {epoch}, but images need a size from the first epoch on, which is 0"
        if epoch <= before[0]:
            least = before[0] + 1
            return number, f"begins at epoch {epoch}, but the size before at epoch {before[0]}; the smallest value is {least}"
        if side < 1:
            return number, f"has images of {side} px; the smallest side is 1"
    return None
