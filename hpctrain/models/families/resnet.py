"""ResNet-18/34/50/101/152 for 224 px (He et al. 2016, table 1; version 1.5), with torchvision's names.

The module also has the wide forms (Zagoruyko and Komodakis 2016) and ResNeXt (Xie et al. 2017).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from hpctrain.core.errors import OptionError
from hpctrain.models.parts import (
    MOST_CHANNELS,
    Norm,
    basic_stage,
    bottleneck_block,
    check_depth,
    projection,
    scaled,
    stochastic_depths,
)
from hpctrain.nn.layers import AdaptiveAveragePool, Conv2d, Flatten, Layer, Linear, MaxPool, ReLU, Sequential

IMAGE_SHAPE = (224, 224, 3)

VARIANTS: Mapping[str, Mapping[str, object]] = {
    **{f"resnet{depth}": {"depth": depth} for depth in (18, 34, 50, 101, 152)},
    **{f"wide_resnet{depth}_2": {"depth": depth, "width_per_group": 128} for depth in (50, 101)},
    "resnext50_32x4d": {"depth": 50, "groups": 32, "width_per_group": 4},
    "resnext101_32x8d": {"depth": 101, "groups": 32, "width_per_group": 8},
    "resnext101_64x4d": {"depth": 101, "groups": 64, "width_per_group": 4},
}

_CHANNELS = (64, 128, 256, 512)
_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}  # blocks of each stage
_FIRST_BOTTLENECK = 50  # smallest depth with bottlenecks
_EXPANSION = 4  # output channels of a bottleneck, divided by the published inner ones
_PUBLISHED_WIDTH = 64  # total channels of the groups in the first stage


def build(
    *,
    depth: int = 50,
    classes: int = 1000,
    channels_in: int = 3,
    width: float = 1.0,
    groups: int = 1,
    width_per_group: int = _PUBLISHED_WIDTH,
    zero_init_residual: bool = False,
    stochastic_depth: float = 0.0,
    epsilon: float = 1e-5,
    momentum: float = 0.1,
    synchronised: bool = False,
    seed: int = 0,
) -> Layer:
    """Build a ResNet with 18, 34, 50, 101 or 152 layers, designed for 224 px, for images of any size.

    Args:
        depth: Number of layers with weights: 18, 34, 50, 101 or 152.
        width: Factor on all channels; 1 is the published network.
        groups: Number of groups of each 3x3 convolution, for depth 50 and more; 32 is ResNeXt.
        width_per_group: Number of channels per group in the first stage, for depth 50 and more; 128 in one group is a wide
            network.
        zero_init_residual: Whether each residual block starts as its shortcut, because its last batch norm starts at 0 (Goyal et
            al. 2017, section 5.1).
        stochastic_depth: Probability of dropping the body of the last residual block for a sample, in [0, 1); it rises linearly
            from 0 at the first block.

    Raises:
        OptionError: the depth does not exist, the width is not positive, the groups are not possible, or the stochastic depth is
            outside [0, 1).
    """
    check_depth("ResNet", depth, _BLOCKS)
    _check_groups(depth, groups, width_per_group)
    norm = Norm(epsilon, momentum, synchronised, zero_init_residual)
    channels = scaled(_CHANNELS[0], width)
    layers: dict[str, Layer] = {
        "conv1": Conv2d(channels_in, channels, 7, 2, padding=3, bias=False),
        "bn1": norm.layer(channels),
        "relu": ReLU(),
        "maxpool": MaxPool(3, 2, padding=1),
    }
    branch = partial(projection, norm=norm)
    ends = stochastic_depths(stochastic_depth, sum(_BLOCKS[depth]), seed)
    for stage, (count, published) in enumerate(zip(_BLOCKS[depth], _CHANNELS, strict=True)):
        stride, basic = 1 if stage == 0 else 2, scaled(published, width)
        if depth < _FIRST_BOTTLENECK:
            layers[f"layer{stage + 1}"] = basic_stage(count, (channels, basic), stride, norm, branch, ends)
            channels = basic
        else:
            inside = max(1, basic * width_per_group // _PUBLISHED_WIDTH) * groups
            sizes = channels, inside, basic * _EXPANSION
            layers[f"layer{stage + 1}"] = _bottleneck_stage(count, sizes, stride, groups, norm, ends)
            channels = basic * _EXPANSION
    layers |= {"avgpool": AdaptiveAveragePool(1), "flatten": Flatten(), "fc": Linear(channels, classes)}
    return Sequential(layers)


def _check_groups(depth: int, groups: int, width_per_group: int) -> None:
    """Raise unless both numbers are at least 1 and, for a network without bottlenecks, those of the published network.

    Raises:
        OptionError: a number is below 1, differs from the published network's for a depth without bottlenecks, or leads to a
            layer with too many channels.
    """
    for option, value, published in (("groups", groups, 1), ("width_per_group", width_per_group, _PUBLISHED_WIDTH)):
        if value < 1:
            raise OptionError(f"{option} is {value}, but must be at least 1; {published} is the published network's.", option)
        if depth < _FIRST_BOTTLENECK and value != published:
            raise OptionError(
                f"{option} is {value}, but a ResNet of depth {depth} has no bottlenecks, so it must be {published}; the smallest "
                f"depth with bottlenecks is {_FIRST_BOTTLENECK}.",
                option,
            )
    most = MOST_CHANNELS // (max(_CHANNELS) // _PUBLISHED_WIDTH)
    if groups * width_per_group > most:
        raise OptionError(
            f"{groups} groups of {width_per_group} channels need a layer of more than {MOST_CHANNELS:,} channels, the maximum; "
            f"the largest width_per_group is {max(1, most // groups)}.",
            "width_per_group" if groups <= most else "groups",
        )


def _bottleneck_stage(
    count: int, channels: tuple[int, int, int], stride: int, groups: int, norm: Norm, ends: Iterator[Mapping[str, Layer]]
) -> Layer:
    """Return `count` bottleneck blocks. The first block has the stride.

    Args:
        channels: channels of the first block, see `bottleneck_block`.
        ends: result of `stochastic_depths`.
    """
    channels_in, inside, channels_out = channels
    blocks: list[Layer] = []
    for _ in range(count):
        shortcut = projection(channels_in, channels_out, stride, norm)
        sizes = channels_in, inside, channels_out
        blocks.append(bottleneck_block(sizes, stride, groups, norm, shortcut, next(ends)))
        channels_in, stride = channels_out, 1
    return Sequential(blocks)
