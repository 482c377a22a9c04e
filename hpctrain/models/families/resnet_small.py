"""ResNet-20/32/44/56/110 for 32 px (He et al. 2016, section 4.2)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

from hpctrain.models.parts import Norm, basic_stage, check_depth, projection, scaled, stochastic_depths
from hpctrain.nn.layers import AdaptiveAveragePool, AveragePool, Conv2d, Flatten, Layer, Linear, PadChannels, ReLU, Sequential

IMAGE_SHAPE = (32, 32, 3)

VARIANTS: Mapping[str, Mapping[str, object]] = {f"resnet{depth}": {"depth": depth} for depth in (20, 32, 44, 56, 110)}

_CHANNELS = (16, 32, 64)


def build(
    *,
    depth: int = 20,
    classes: int = 10,
    channels_in: int = 3,
    width: float = 1.0,
    shortcut: Literal["padding", "projection"] = "padding",
    zero_init_residual: bool = False,
    stochastic_depth: float = 0.0,
    epsilon: float = 1e-5,
    momentum: float = 0.1,
    synchronised: bool = False,
    seed: int = 0,
) -> Layer:
    """Build a ResNet with 20, 32, 44, 56 or 110 layers, designed for 32 px: three stages of (depth - 2) / 6 basic blocks.

    Args:
        depth: Number of layers with weights: 20, 32, 44, 56 or 110.
        width: Factor on all channels; 1 is the published network.
        shortcut: Shortcut of blocks that change the shape: "padding" uses every second pixel and adds channels of zeros (the
            paper's option A, no parameters), "projection" is a 1x1 convolution with batch norm (option B).
        zero_init_residual: Whether each residual block starts as its shortcut, because its last batch norm starts at 0.
        stochastic_depth: Probability of dropping the body of the last residual block for a sample, in [0, 1); it rises linearly
            from 0 at the first block.

    Raises:
        OptionError: the depth does not exist, the width is not positive, or the stochastic depth is outside [0, 1).
    """
    check_depth("small ResNet", depth, (20, 32, 44, 56, 110))
    norm = Norm(epsilon, momentum, synchronised, zero_init_residual)
    channels = scaled(_CHANNELS[0], width)
    layers: dict[str, Layer] = {
        "conv1": Conv2d(channels_in, channels, 3, padding=1, bias=False),
        "bn1": norm.layer(channels),
        "relu": ReLU(),
    }
    branch = partial(projection, norm=norm) if shortcut == "projection" else _padding
    count = (depth - 2) // 6
    ends = stochastic_depths(stochastic_depth, count * len(_CHANNELS), seed)
    for stage, published in enumerate(_CHANNELS):
        channels_out = scaled(published, width)
        layers[f"layer{stage + 1}"] = basic_stage(count, (channels, channels_out), 1 if stage == 0 else 2, norm, branch, ends)
        channels = channels_out
    layers |= {"avgpool": AdaptiveAveragePool(1), "flatten": Flatten(), "fc": Linear(channels, classes)}
    return Sequential(layers)


def _padding(channels_in: int, channels: int, stride: int) -> Layer | None:
    """Return the shortcut of option A, or None if the shape stays the same.

    A 1x1 pool keeps every `stride`-th pixel, and half of the new channels are added on each side.
    """
    layers: dict[str, Layer] = {}
    if stride > 1:
        layers["subsample"] = AveragePool(1, stride)
    if channels > channels_in:
        before = (channels - channels_in) // 2
        layers["pad"] = PadChannels(before, channels - channels_in - before)
    return Sequential(layers) if layers else None
