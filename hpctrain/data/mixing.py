"""Mixup and cutmix: images of a step mixed with those of the same step in the opposite order, as timm does it by batch.

Draws are functions of (seed, epoch, place of the step's first sample in the epoch) alone, and a sample's partner follows from
its place in the step over all ranks: any number of ranks mixes the same images, whichever part of them each reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hpctrain.backend import counter_random
from hpctrain.core.intervals import Box, relative, size_of
from hpctrain.core.errors import ConfigError

#: above it a Beta distribution would take too many tries to draw from, and mixes nearly by halves
MOST_ALPHA = 4.0

_UNIFORMS_AT_ONCE = 64


@dataclass(frozen=True)
class Mix:
    """The mixing of one step.

    weight: share of a sample's own label, in [0, 1], and with mixup of its image. box: with cutmix, the vertical and the
    horizontal interval that are cut from the partner's image; None: mixup.
    """

    weight: float
    box: Box | None = None

    def apply(self, images: np.ndarray, partners: np.ndarray, region: Box) -> None:
        """Mix `partners`, which is overwritten, into `images`: both hold `region` of each image, (N, h, w, C)."""
        if self.box is None:
            images *= images.dtype.type(self.weight)
            partners *= images.dtype.type(1.0 - self.weight)
            images += partners
            return
        bounds = [(max(a, start), min(b, stop)) for (a, b), (start, stop) in zip(self.box, region, strict=True)]
        if all(start < stop for start, stop in bounds):
            inside = tuple(bounds)
            rows, columns = relative(inside, region)
            images[:, rows, columns] = partners[:, rows, columns]


@dataclass(frozen=True)
class Mixing:
    """How images of a step are mixed.

    mixup: w ~ Beta(mixup, mixup); images and labels are w of their own and 1 - w of the partner's (Zhang et al., ICLR 2018).
    cutmix: w ~ Beta(cutmix, cutmix); a box of 1 - w of the area, clipped at the borders, is cut from the partner's image; labels
    follow from the area that is really cut (Yun et al., ICCV 2019). 0 switches either off; with both one of them is drawn.

    Args:
        mixup, cutmix: the alphas, in [0, MOST_ALPHA]. probability: share of steps that are mixed. switch: of these, share that
            takes cutmix where both are on. seed: of what is drawn.

    Raises:
        ConfigError: a value outside its range.
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    probability: float = 1.0
    switch: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("mixup", "cutmix", "probability", "switch"):
            value, most = getattr(self, name), MOST_ALPHA if name in ("mixup", "cutmix") else 1.0
            if not 0.0 <= value <= most:
                legal = 0.0 if not value >= 0.0 else most
                raise ConfigError(f"mixing.{name} {value} is outside [0, {most:g}]; the nearest legal value is {legal:g}.")

    @property
    def mixes(self) -> bool:
        """True where any step may be mixed."""
        return (self.mixup > 0 or self.cutmix > 0) and self.probability > 0

    def draw(self, epoch: int, first: int, height: int, width: int) -> Mix | None:
        """The mixing of the step that begins with the epoch's sample `first`; None: it is not mixed.

        Args:
            height, width: of the images that come out of the pipeline.
        """
        uniforms = _uniforms(counter_random.key("mixing", self.seed, epoch), first)
        if next(uniforms) >= self.probability or not (self.mixup or self.cutmix):
            return None
        takes_cutmix = next(uniforms) < (self.switch if self.mixup and self.cutmix else float(not self.mixup))
        place = next(uniforms), next(uniforms)
        weight = _beta(self.cutmix if takes_cutmix else self.mixup, uniforms)
        if not takes_cutmix:
            return Mix(weight)
        box = _box(weight, place, (height, width))
        return Mix(1.0 - size_of(box) / (height * width), box)


def _box(weight: float, place: tuple[float, float], size: tuple[int, int]) -> Box:
    """A box of 1 - weight of the area around a place that is uniform over the image, clipped; timm's rand_bbox."""
    ratio = (1.0 - weight) ** 0.5
    intervals = []
    for u, length in zip(place, size, strict=True):
        cut, centre = int(length * ratio), int(u * length)
        intervals.append((max(0, centre - cut // 2), min(length, centre + cut // 2)))
    return tuple(intervals)


def _beta(alpha: float, uniforms: Iterator[float]) -> float:
    """A draw from Beta(alpha, alpha), by the method of Joehnk (1964)."""
    while True:
        x, y = next(uniforms) ** (1.0 / alpha), next(uniforms) ** (1.0 / alpha)
        if 0.0 < x + y <= 1.0:
            return float(x / (x + y))


def _uniforms(stream: counter_random.Key, sample: int) -> Iterator[float]:
    """Numbers in [0, 1), without end."""
    begin = 0
    while True:
        indices = range(begin, begin + _UNIFORMS_AT_ONCE)
        yield from counter_random.uniform(stream, np.array([sample]), indices)[0].tolist()
        begin += _UNIFORMS_AT_ONCE
