"""VGG-11/13/16/19, with and without batch norm (Simonyan and Zisserman 2015, table 1), with torchvision's names."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hpctrain.models.parts import Norm, check_depth, check_dropout, normal_linear, scaled
from hpctrain.nn.layers import AdaptiveAveragePool, Conv2d, Dropout, Flatten, Layer, MaxPool, ReLU, Sequential

IMAGE_SHAPE = (224, 224, 3)

VARIANTS: Mapping[str, Mapping[str, object]] = {
    f"vgg{depth}{'_bn' if batch_norm else ''}": {"depth": depth, "batch_norm": batch_norm}
    for depth in (11, 13, 16, 19)
    for batch_norm in (False, True)
}

_CHANNELS = (64, 128, 256, 512, 512)
_CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}  # convolutions of each stage
_HIDDEN = 4096
_GRID = 7


def build(
    *,
    depth: int = 16,
    batch_norm: bool = False,
    classes: int = 1000,
    channels_in: int = 3,
    width: float = 1.0,
    dropout: float = 0.5,
    epsilon: float = 1e-5,
    momentum: float = 0.1,
    synchronised: bool = False,
    seed: int = 0,
) -> Layer:
    """Build a VGG with 11, 13, 16 or 19 layers, with or without batch norm, for images of at least 32 px.

    Args:
        depth: Number of layers with weights: 11, 13, 16 or 19.
        batch_norm: Whether batch norm follows each convolution.
        width: Factor on all channels and hidden features; 1 is the published network.
        dropout: Probability of dropping an input feature of each of the last two linear layers, in [0, 1).

    Raises:
        OptionError: the depth does not exist, the width is not positive, or the dropout is outside [0, 1).
    """
    check_depth("VGG", depth, _CONVOLUTIONS)
    check_dropout(dropout)
    norm = Norm(epsilon, momentum, synchronised) if batch_norm else None
    channels = scaled(_CHANNELS[-1], width)
    return Sequential(
        {
            "features": _features(depth, channels_in, width, norm),
            "avgpool": AdaptiveAveragePool(_GRID),
            "flatten": Flatten(),
            "classifier": _classifier((_GRID, _GRID, channels), scaled(_HIDDEN, width), classes, dropout, seed),
        }
    )


def _features(depth: int, channels_in: int, width: float, norm: Norm | None) -> Layer:
    layers: list[Layer] = []
    for count, published in zip(_CONVOLUTIONS[depth], _CHANNELS, strict=True):
        channels = scaled(published, width)
        for _ in range(count):
            layers.append(Conv2d(channels_in, channels, 3, padding=1))
            if norm is not None:
                layers.append(norm.layer(channels))
            layers.append(ReLU())
            channels_in = channels
        layers.append(MaxPool(2))
    return Sequential(layers)


def _classifier(image_shape: tuple[int, int, int], hidden: int, classes: int, dropout: float, seed: int) -> Layer:
    return Sequential(
        [
            normal_linear(math.prod(image_shape), hidden, image_shape),
            ReLU(),
            Dropout(dropout, seed),
            normal_linear(hidden, hidden),
            ReLU(),
            Dropout(dropout, seed),
            normal_linear(hidden, classes),
        ]
    )
