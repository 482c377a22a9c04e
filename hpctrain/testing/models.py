"""The declarations of a model, without the memory that a network of it would take."""

from __future__ import annotations

import math

from hpctrain.models.interchange import exported_shape
from hpctrain.nn.layers import Layer, join


def parameter_count(model: Layer) -> int:
    """Trained numbers of the model."""
    return sum(math.prod(spec.shape) for _, layer in model.walk() for spec in layer.parameters().values())


def exported_shapes(model: Layer) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter and running statistic in torchvision's layout, in the order of a state dictionary."""
    shapes: dict[str, tuple[int, ...]] = {}
    for prefix, layer in model.walk():
        shapes |= {join(prefix, role): exported_shape(spec) for role, spec in layer.parameters().items()}
        shapes |= {join(prefix, role): spec.shape for role, spec in layer.statistics().items()}
    return shapes
