"""Pre-activation ResNets for 32 px: ResNet-18 (He et al. 2016b) and wide ResNets (Zagoruyko and Komodakis 2016, table 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.core.errors import OptionError
from hpctrain.models.parts import Norm, check_dropout, preactivation_block, scaled, stochastic_depths
from hpctrain.nn.layers import AdaptiveAveragePool, Conv2d, Dropout, Flatten, Layer, Linear, ReLU, Sequential

IMAGE_SHAPE = (32, 32, 3)

# WRN-d-k has three stages of (d - 4) / 6 blocks, with 16 k, 32 k and 64 k channels.
VARIANTS: Mapping[str, Mapping[str, object]] = {
    "preact_resnet18": {"stem": 64, "channels": [64, 128, 256, 512], "blocks": [2, 2, 2, 2]},
    **{
        f"wrn_{depth}_{factor}": {
            "stem": 16,
            "channels": [published * factor for published in (16, 32, 64)],
            "blocks": [(depth - 4) // 6] * 3,
        }
        for depth, factor in ((16, 8), (28, 10))
    },
}


def build(
    *,
    stem: int = 64,
    channels: Sequence[int] = (64, 128, 256, 512),
    blocks: Sequence[int] = (2, 2, 2, 2),
    classes: int = 10,
    channels_in: int = 3,
    width: float = 1.0,
    dropout: float = 0.0,
    stochastic_depth: float = 0.0,
    epsilon: float = 1e-5,
    momentum: float = 0.1,
    synchronised: bool = False,
    seed: int = 0,
) -> Layer:
    """Build a pre-activation ResNet or wide ResNet of blocks of two convolutions, designed for 32 px, for images of any size.

    Args:
        stem: Output channels of the first convolution.
        channels: Output channels of each stage; each stage after the first halves the image.
        blocks: Number of residual blocks of each stage.
        width: Factor on all channels; 1 is the published network.
        dropout: Probability of dropping an input element of the second convolution of each block, in [0, 1).
        stochastic_depth: Probability of dropping the body of the last residual block for a sample, in [0, 1); it rises linearly
            from 0 at the first block.

    Raises:
        OptionError: a stage lacks channels or blocks, the width is not positive, or a probability is outside [0, 1).
    """
    _check_blocks(channels, blocks)
    check_dropout(dropout)
    norm = Norm(epsilon, momentum, synchronised)
    inside = scaled(stem, width, "stem")
    layers: dict[str, Layer] = {"conv1": Conv2d(channels_in, inside, 3, padding=1, bias=False)}
    ends = stochastic_depths(stochastic_depth, sum(blocks), seed)
    for stage, (count, published) in enumerate(zip(blocks, channels, strict=True)):
        outside = scaled(published, width)
        stack: list[Layer] = []
        for block in range(count):
            dropped: Mapping[str, Layer] = {"dropout": Dropout(dropout, seed)} if dropout else {}
            stride = 2 if stage and not block else 1
            first = not stage and not block
            stack.append(preactivation_block((inside, outside), stride, norm, dropped, next(ends), first=first))
            inside = outside
        layers[f"layer{stage + 1}"] = Sequential(stack)
    layers |= {"bn": norm.layer(inside), "relu": ReLU()}  # the last block ends with its sum
    layers |= {"avgpool": AdaptiveAveragePool(1), "flatten": Flatten(), "fc": Linear(inside, classes)}
    return Sequential(layers)


def _check_blocks(channels: Sequence[int], blocks: Sequence[int]) -> None:
    """Raise an OptionError unless there is at least one stage, and each has a number of channels and at least one block."""
    if not channels:
        raise OptionError("channels is empty, but a pre-activation ResNet has at least one stage; [64] is one.", "channels")
    if len(blocks) != len(channels):
        raise OptionError(
            f"blocks has {len(blocks)} numbers, but must have one for each of the {len(channels)} stages in channels.", "blocks"
        )
    if min(blocks) < 1:
        raise OptionError(f"blocks is {list(blocks)}, but each stage must have at least 1 block.", "blocks")
