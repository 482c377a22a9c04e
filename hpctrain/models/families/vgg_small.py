"""VGG for 32 px (Jordan 2024, airbench): filters that whiten patches, then a few wide stages that train in few epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.core.errors import OptionError
from hpctrain.models.parts import Norm, scaled
from hpctrain.nn import initialise
from hpctrain.nn.layers import AdaptiveAveragePool, Conv2d, Flatten, Layer, Linear, MaxPool, ReLU, Sequential

IMAGE_SHAPE = (32, 32, 3)

VARIANTS: Mapping[str, Mapping[str, object]] = {}


def build(
    *,
    classes: int = 10,
    channels_in: int = 3,
    channels: Sequence[int] = (64, 256, 256),
    convolutions: int = 2,
    width: float = 1.0,
    epsilon: float = 1e-5,
    momentum: float = 0.1,
    synchronised: bool = False,
) -> Layer:
    """Build a small VGG for 32 px: a 2x2 convolution, then stages that halve the image before their first batch norm.

    The 3x3 convolutions start as the identity on the channels of their input, and with random filters for further channels. The
    first layer, `whiten`, has two filters per value of a patch, for `init.whiten`. The original has GELU instead of ReLU, trains
    no weights of batch norms, pools the last image by the maximum and scales the logits.

    Args:
        channels: Output channels of each stage; the length of the list is the number of stages.
        convolutions: Number of convolutions of each stage, at least 1.
        width: Factor on all channels; 1 is the published network.

    Raises:
        OptionError: there are no stages or no convolutions, or the width is not positive.
    """
    if not channels:
        raise OptionError("channels is empty, but a network needs at least one stage; the default is [64, 256, 256].", "channels")
    if convolutions < 1:
        raise OptionError(f"convolutions is {convolutions}, but must be at least 1.", "convolutions")
    norm = Norm(epsilon, momentum, synchronised)
    filters = 2 * 2 * 2 * channels_in
    whiten = Conv2d(channels_in, filters, 2, padding=(0, 1, 0, 1), bias=False)
    layers: dict[str, Layer] = {"whiten": whiten, "relu": ReLU()}
    before = filters
    for number, published in enumerate(channels, 1):
        after = scaled(published, width)
        layers[f"layer{number}"] = _stage(before, after, convolutions, norm)
        before = after
    layers |= {"avgpool": AdaptiveAveragePool(1), "flatten": Flatten(), "fc": Linear(before, classes)}
    return Sequential(layers)


def _stage(channels_in: int, channels: int, convolutions: int, norm: Norm) -> Layer:
    """Return `convolutions` 3x3 convolutions, each with batch norm and ReLU, and a 2x2 max pool after the first convolution."""
    layers: dict[str, Layer] = {}
    for number in range(1, convolutions + 1):
        values = initialise.identity(initialise.kaiming_normal(9 * channels))
        layers[f"conv{number}"] = Conv2d(channels_in, channels, 3, padding=1, bias=False, weight_values=values)
        if number == 1:
            layers["pool"] = MaxPool(2)  # batch norm and ReLU then process a quarter of the values
        layers |= {f"bn{number}": norm.layer(channels), f"relu{number}": ReLU()}
        channels_in = channels
    return Sequential(layers)
