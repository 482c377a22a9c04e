"""Networks that benchmarks train on made-up images. The sizes are such that computing and sending take about equally long."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hpctrain.data.loader import ArrayLoader, Batch, LoaderRank
from hpctrain.data.sampler import Sampler


@dataclass(frozen=True)
class Shape:
    """A network, its images and how many of them a rank takes in a step.

    family, depth, width, classes: as in the catalogue of models. pixels: height and width of an image. batch: images per rank.
    """

    family: str
    depth: int
    width: float
    classes: int
    pixels: int
    batch: int

    @property
    def options(self) -> dict[str, Any]:
        """Options of the family's builder."""
        return {"depth": self.depth, "width": self.width, "classes": self.classes}

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def made_up_batch(shape: Shape, place: LoaderRank) -> Batch:
    """One rank's share of a step on made-up images, the same ones on every rank."""
    samples, random = shape.batch * place["ranks"], np.random.default_rng(0)
    images = random.standard_normal((samples, shape.pixels, shape.pixels, 3), np.float32)
    labels = random.integers(0, shape.classes, samples)
    return next(ArrayLoader(images, labels, Sampler(samples, samples, shuffle=False), **place).epoch(0))


# vgg16 has 3/8 of the published channels and hidden features: the same layers, nearly the same shares of parameters (nine
# tenths in the classifier) and of multiply-adds, about a seventh of both, so that a step takes a second, not seven. vgg16-full
# is the published network.
SHAPES = {
    "vgg16": Shape("vgg", 16, 0.375, 1000, 64, 32),
    "vgg16-full": Shape("vgg", 16, 1.0, 1000, 64, 32),
    "resnet18": Shape("resnet", 18, 1.0, 1000, 64, 24),
    "resnet34": Shape("resnet", 34, 1.0, 1000, 48, 16),
    "resnet50": Shape("resnet", 50, 1.0, 1000, 64, 16),
    "vgg13": Shape("vgg", 13, 0.375, 1000, 48, 16),
    "vgg11": Shape("vgg", 11, 0.5, 200, 56, 16),
}
