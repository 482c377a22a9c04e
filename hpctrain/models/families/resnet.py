"""ResNet-18/34/50/101/152 for 224 px (He et al. 2016, table 1; version 1.5), as torchvision names them."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.models.parts import Norm, basic_block, bottleneck_block, check_depth, projection, scaled
from hpctrain.nn.layer import Layer
from hpctrain.nn.layers.adaptive_average_pool import AdaptiveAveragePool
from hpctrain.nn.layers.conv2d import Conv2d
from hpctrain.nn.layers.flatten import Flatten
from hpctrain.nn.layers.linear import Linear
from hpctrain.nn.layers.max_pool import MaxPool
from hpctrain.nn.layers.relu import ReLU
from hpctrain.nn.layers.sequential import Sequential

IMAGE_SHAPE = (224, 224, 3)

VARIANTS: Mapping[str, Mapping[str, object]] = {f"resnet{depth}": {"depth": depth} for depth in (18, 34, 50, 101, 152)}

_CHANNELS = (64, 128, 256, 512)
_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}  # per stage
_FIRST_BOTTLENECK = 50  # from this depth on
_EXPANSION = 4  # channels out of a bottleneck over those inside


def build(
    *,
    depth: int = 50,
    classes: int = 1000,
    channels_in: int = 3,
    width: float = 1.0,
    zero_init_residual: bool = False,
    epsilon: float = 1e-5,
    momentum: float = 0.1,
    synchronised: bool = False,
) -> Layer:
    """ResNet with 18, 34, 50, 101 or 152 layers, made for 224 px, for images of any size.

    Args:
        depth: Number of layers with weights: 18, 34, 50, 101 or 152.
        width: Factor on all channels; 1 is the published network.
        zero_init_residual: Each residual block starts as its shortcut: its last batch norm starts at 0 (Goyal et al. 2017,
            section 5.1).

    Raises:
        OptionError: a depth that does not exist, or a width that is not positive.
    """
    check_depth("ResNet", depth, _BLOCKS)
    norm = Norm(epsilon, momentum, synchronised, zero_init_residual)
    channels = scaled(_CHANNELS[0], width)
    layers: dict[str, Layer] = {
        "conv1": Conv2d(channels_in, channels, 7, 2, padding=3, bias=False),
        "bn1": norm.layer(channels),
        "relu": ReLU(),
        "maxpool": MaxPool(3, 2, padding=1),
    }
    for stage, (count, published) in enumerate(zip(_BLOCKS[depth], _CHANNELS, strict=True)):
        blocks, channels = _stage(depth, count, channels, scaled(published, width), 1 if stage == 0 else 2, norm)
        layers[f"layer{stage + 1}"] = blocks
    layers |= {"avgpool": AdaptiveAveragePool(1), "flatten": Flatten(), "fc": Linear(channels, classes)}
    return Sequential(layers)


def _stage(depth: int, count: int, channels_in: int, channels: int, stride: int, norm: Norm) -> tuple[Layer, int]:
    """`count` blocks, the first with the stride, and their channels out."""
    bottleneck = depth >= _FIRST_BOTTLENECK
    channels_out = channels * _EXPANSION if bottleneck else channels
    blocks: list[Layer] = []
    for _ in range(count):
        shortcut = projection(channels_in, channels_out, stride, norm)
        if bottleneck:
            blocks.append(bottleneck_block(channels_in, channels, channels_out, stride, norm, shortcut))
        else:
            blocks.append(basic_block(channels_in, channels, stride, norm, shortcut))
        channels_in, stride = channels_out, 1
    return Sequential(blocks), channels_out
