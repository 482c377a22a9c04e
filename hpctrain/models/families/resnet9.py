"""ResNet-9 for 32 px (Page 2018, "How to train your ResNet", part 4): a few wide layers that train in few epochs."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.models.parts import Norm, scaled
from hpctrain.nn.layers import AdaptiveAveragePool, Conv2d, Flatten, Layer, Linear, MaxPool, ReLU, Residual, Sequential

IMAGE_SHAPE = (32, 32, 3)

VARIANTS: Mapping[str, Mapping[str, object]] = {}

_CHANNELS = (64, 128, 256, 512)
_WITH_BLOCK = (1, 3)  # stages that end with a residual block


def build(
    *,
    classes: int = 10,
    channels_in: int = 3,
    width: float = 1.0,
    zero_init_residual: bool = False,
    epsilon: float = 1e-5,
    momentum: float = 0.1,
    synchronised: bool = False,
) -> Layer:
    """Build ResNet-9: a convolution, then three stages that halve the image. The first and the last stage have a residual block.

    The global pooling uses the mean, as in other residual networks. The original uses the maximum and scales the logits.

    Args:
        width: Factor on all channels; 1 is the published network.
        zero_init_residual: Whether each residual block starts as its shortcut, because its last batch norm starts at 0.

    Raises:
        OptionError: the width is not positive.
    """
    norm = Norm(epsilon, momentum, synchronised, zero_init_residual)
    layers: dict[str, Layer] = {}
    for stage, published in enumerate(_CHANNELS):
        channels = scaled(published, width)
        layers[f"layer{stage}"] = _stage(channels_in, channels, norm, halved=stage > 0, block=stage in _WITH_BLOCK)
        channels_in = channels
    layers |= {"avgpool": AdaptiveAveragePool(1), "flatten": Flatten(), "fc": Linear(channels_in, classes)}
    return Sequential(layers)


def _stage(channels_in: int, channels: int, norm: Norm, *, halved: bool, block: bool) -> Layer:
    """Return a convolution, followed by a 2x2 max pool if `halved` and by a residual block if `block`."""
    layers = _convolution(channels_in, channels, norm)
    if halved:
        layers["pool"] = MaxPool(2)
    if block:
        layers["block"] = _residual(channels, norm)
    return Sequential(layers)


def _convolution(channels_in: int, channels: int, norm: Norm) -> dict[str, Layer]:
    return {"conv": Conv2d(channels_in, channels, 3, padding=1, bias=False), "bn": norm.layer(channels), "relu": ReLU()}


def _residual(channels: int, norm: Norm) -> Residual:
    """Return a residual block of two convolutions, each with batch norm and ReLU, without an activation after the sum."""
    body: dict[str, Layer] = {
        "conv1": Conv2d(channels, channels, 3, padding=1, bias=False),
        "bn1": norm.layer(channels),
        "relu1": ReLU(),
        "conv2": Conv2d(channels, channels, 3, padding=1, bias=False),
        "bn2": norm.layer(channels, last=True),
        "relu2": ReLU(),
    }
    return Residual(body, None)
