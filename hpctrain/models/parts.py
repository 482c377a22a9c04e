"""Building blocks that the model families share: scaled widths, batch norm with one set of options, residual blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from hpctrain.core.errors import OptionError
from hpctrain.nn import initialise
from hpctrain.nn.layers import BatchNorm, Conv2d, Layer, Linear, ReLU, Residual, Sequential, StochasticDepth

MOST_CHANNELS = 1_000_000  # far more than any network has; a larger number is a typing error


@dataclass(frozen=True)
class Norm:
    """Factory of the batch norms of one model, all with the same options."""

    epsilon: float = 1e-5
    momentum: float = 0.1
    synchronised: bool = False
    zero_last: bool = False  # last batch norms of residual blocks start at 0, so blocks start as their shortcuts

    def layer(self, channels: int, *, last: bool = False) -> BatchNorm:
        """Return a batch norm over `channels`; `last` is whether it is the last one before a residual sum."""
        weight = 0.0 if last and self.zero_last else 1.0
        return BatchNorm(channels, self.epsilon, self.momentum, self.synchronised, weight=weight)


def scaled(channels: int, width: float, option: str = "channels") -> int:
    """Return `channels` times `width`, rounded, at least 1.

    Args:
        option: name of the option that `channels` comes from, for the error.

    Raises:
        OptionError: channels is below 1, width is not positive, or the layer would have more than a million channels.
    """
    if channels < 1:
        raise OptionError(f"A layer cannot have {channels} channels; it must have at least 1.", option)
    if not width > 0.0:
        sentence = f"A width of {width} leaves no channels; it must be above 0, and 1.0 is the published network."
        raise OptionError(sentence, "width")
    largest = MOST_CHANNELS / channels
    if width > largest:
        raise OptionError(
            f"A width of {width:g} turns {channels} channels into more than {MOST_CHANNELS:,}, the maximum of a layer; "
            f"the largest width for this layer is {largest:g}.",
            "width",
        )
    return max(1, round(channels * width))


def check_depth(family: str, depth: int, known: Iterable[int]) -> None:
    """Raise an OptionError unless `depth` is one of the `known` depths of the family."""
    depths = sorted(known)
    if depth not in depths:
        nearest = min(depths, key=lambda other: abs(other - depth))
        raise OptionError(f"There is no {family} of depth {depth}; known depths are {depths}, the nearest is {nearest}.", "depth")


def check_dropout(dropout: float) -> None:
    """Raise an OptionError unless the option `dropout` is in [0, 1)."""
    if not 0.0 <= dropout < 1.0:
        raise OptionError(f"A dropout rate of {dropout} is outside [0, 1); 0 switches dropout off.", "dropout")


def stochastic_depths(last: float, blocks: int, seed: int) -> Iterator[Mapping[str, Layer]]:
    """Return the layers at the end of each residual block's body by name, in block order; empty if the block is never dropped.

    The probability rises linearly from 0 for the first block to `last` for the last one: block i of n has last * i / (n - 1), as
    in timm.

    Raises:
        OptionError: `last` is outside [0, 1).
    """
    if not 0.0 <= last < 1.0:
        sentence = f"A stochastic depth of {last} is outside [0, 1); 0 switches it off, and 0.2 is usual for deep networks."
        raise OptionError(sentence, "stochastic_depth")
    rates = (last * block / max(1, blocks - 1) for block in range(blocks))
    return iter([{"stochastic_depth": StochasticDepth(rate, seed)} if rate else {} for rate in rates])


def basic_block(
    channels_in: int, channels: int, stride: int, norm: Norm, shortcut: Layer | None, end: Mapping[str, Layer]
) -> Residual:
    """Return a block of two 3x3 convolutions (He et al. 2016, figure 5 left). The first one has the stride.

    Args:
        channels_in, channels: channels of the input and of the output.
        norm: factory of its batch norms.
        shortcut: layer of the shortcut; None: the identity.
        end: further layers at the end of the body.
    """
    body: Mapping[str, Layer] = {
        "conv1": Conv2d(channels_in, channels, 3, stride, padding=1, bias=False),
        "bn1": norm.layer(channels),
        "relu1": ReLU(),
        "conv2": Conv2d(channels, channels, 3, padding=1, bias=False),
        "bn2": norm.layer(channels, last=True),
        **end,
    }
    return Residual(body, shortcut, activation=ReLU(), activation_name="relu2")


def bottleneck_block(
    channels: tuple[int, int, int], stride: int, groups: int, norm: Norm, shortcut: Layer | None, end: Mapping[str, Layer]
) -> Residual:
    """Return a block of 1x1, 3x3, 1x1 convolutions (He et al. 2016, figure 5 right).

    The 3x3 convolution has the stride (version 1.5).

    Args:
        channels: channels of the input, of the 3x3 convolution and of the output.
        groups: number of groups of the 3x3 convolution (Xie et al. 2017).
        norm, shortcut, end: see `basic_block`.
    """
    channels_in, inside, channels_out = channels
    body: Mapping[str, Layer] = {
        "conv1": Conv2d(channels_in, inside, 1, bias=False),
        "bn1": norm.layer(inside),
        "relu1": ReLU(),
        "conv2": Conv2d(inside, inside, 3, stride, padding=1, groups=groups, bias=False),
        "bn2": norm.layer(inside),
        "relu2": ReLU(),
        "conv3": Conv2d(inside, channels_out, 1, bias=False),
        "bn3": norm.layer(channels_out, last=True),
        **end,
    }
    return Residual(body, shortcut, activation=ReLU(), activation_name="relu3")


def preactivation_block(
    channels: tuple[int, int], stride: int, norm: Norm, dropout: Mapping[str, Layer], end: Mapping[str, Layer], *, first: bool
) -> Residual:
    """Return a block of two 3x3 convolutions, each after its batch norm and ReLU (He et al. 2016b, figure 1b).

    The first convolution has the stride. If the shape changes, the shortcut is a 1x1 convolution without batch norm, and both
    paths read the first activation.

    Args:
        channels: channels of the input and of the output.
        norm, end: see `basic_block`.
        dropout: further layers before the second convolution.
        first: whether it is the network's first block, whose paths also share the activation (He et al. 2016b, section 4.1).
    """
    channels_in, channels_out = channels
    activation: Mapping[str, Layer] = {"bn1": norm.layer(channels_in), "relu1": ReLU()}
    body: Mapping[str, Layer] = {
        "conv1": Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False),
        "bn2": norm.layer(channels_out),
        "relu2": ReLU(),
        **dropout,
        "conv2": Conv2d(channels_out, channels_out, 3, padding=1, bias=False),
        **end,
    }
    changes = stride > 1 or channels_in != channels_out
    shortcut = Conv2d(channels_in, channels_out, 1, stride, bias=False) if changes else None
    if first or changes:
        return Residual(body, shortcut, before=activation)
    return Residual({**activation, **body})


def projection(channels_in: int, channels_out: int, stride: int, norm: Norm) -> Layer | None:
    """Return the shortcut of a block: a 1x1 convolution with batch norm (option B), or None if the shape stays the same."""
    if stride == 1 and channels_in == channels_out:
        return None
    return Sequential([Conv2d(channels_in, channels_out, 1, stride, bias=False), norm.layer(channels_out)])


def basic_stage(
    count: int,
    channels: tuple[int, int],
    stride: int,
    norm: Norm,
    shortcut: Callable[[int, int, int], Layer | None],
    ends: Iterator[Mapping[str, Layer]],
) -> Layer:
    """Return `count` blocks of two convolutions. The first block has the stride.

    Args:
        channels: channels of the input and of the output.
        shortcut: function that returns a block's shortcut for (channels in, channels out, stride).
        ends: result of `stochastic_depths`.
    """
    channels_in, channels_out = channels
    blocks: list[Layer] = []
    for _ in range(count):
        branch = shortcut(channels_in, channels_out, stride)
        blocks.append(basic_block(channels_in, channels_out, stride, norm, branch, next(ends)))
        channels_in, stride = channels_out, 1
    return Sequential(blocks)


def normal_linear(
    features_in: int, features_out: int, image_shape: tuple[int, int, int] | None = None, *, bias: float = 0.0
) -> Linear:
    """Return a linear layer of AlexNet or VGG, with weights from N(0, 0.01^2) and all biases equal to `bias`.

    Args:
        features_in, features_out, image_shape: see `Linear`.
        bias: initial value of all biases.
    """
    weight, biases = initialise.normal(0.01), initialise.constant(bias)
    return Linear(features_in, features_out, image_shape=image_shape, weight_values=weight, bias_values=biases)
