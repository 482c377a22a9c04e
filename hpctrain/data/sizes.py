"""The sizes of images by epoch: a training may begin with small images and end with large ones."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from hpctrain.errors import ConfigError


@dataclass(frozen=True)
class ImageSizes:
    """The sides of square images by epoch.

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

    @property
    def sides(self) -> tuple[int, ...]:
        """All sides, each once, in the order in which they come."""
        return tuple(dict.fromkeys(side for _, side in self.steps))

    def sides_within(self, epochs: int) -> tuple[int, ...]:
        """The sides that a training of so many epochs comes to, each once, in order; at least the first one."""
        return tuple(dict.fromkeys(side for first, side in self.steps if first < max(1, epochs)))

    def main(self, epochs: int) -> int:
        """The side that takes most time in a training of so many epochs: most pixels in all, the larger one of two alike."""
        stops = [*(first for first, _ in self.steps[1:]), max(epochs, self.steps[-1][0] + 1)]
        pixels: dict[int, int] = dict.fromkeys(self.sides_within(epochs), 0)
        for (first, side), stop in zip(self.steps, stops, strict=True):
            if side in pixels:
                pixels[side] += max(0, min(stop, epochs) - first) * side * side
        return max(pixels, key=lambda side: (pixels[side], side))

    def __str__(self) -> str:
        return ", ".join(f"{side} px from epoch {first + 1}" for first, side in self.steps)


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
