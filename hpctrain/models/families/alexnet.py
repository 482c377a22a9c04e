"""AlexNet (Krizhevsky, Sutskever and Hinton, NIPS 2012) as one tower, and its narrower form of 2014, as in torchvision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.core.errors import OptionError
from hpctrain.models.parts import check_dropout, normal_linear, scaled
from hpctrain.nn import initialise
from hpctrain.nn.layers import AdaptiveAveragePool, Conv2d, Dropout, Flatten, Layer, MaxPool, ReLU, Sequential

IMAGE_SHAPE = (227, 227, 3)

VARIANTS: Mapping[str, Mapping[str, object]] = {
    # Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014: torchvision's `alexnet`
    "alexnet2014": {"channels": (64, 192, 384, 256, 256), "padding": 2},
}

_KERNELS = (11, 5, 3, 3, 3)
_PADDINGS = (0, 2, 1, 1, 1)  # paddings of the convolutions; the first one is an option
_FIRST_BIASES = (0.0, 1.0, 0.0, 1.0, 1.0)
_POOLED = (0, 1, 4)  # convolutions followed by a max pool
_STRIDE = 4
_GRID = 6
_HIDDEN = 4096
_DEVIATION = 0.01


def build(
    *,
    classes: int = 1000,
    channels_in: int = 3,
    channels: Sequence[int] = (96, 256, 384, 384, 256),
    padding: int = 0,
    width: float = 1.0,
    dropout: float = 0.5,
    seed: int = 0,
) -> Layer:
    """Build AlexNet as one tower, without local response normalisation, for images of 227 px. Images of at least 67 px also work.

    Args:
        channels: Output channels of each of the five convolutions.
        padding: Width of the zero padding of the images, in pixels.
        width: Factor on all channels and hidden features; 1 is the published network.
        dropout: Probability of dropping an input feature of each of the first two linear layers, in [0, 1).

    Raises:
        OptionError: the number of channels is not five, the padding is negative, the width is not positive, or the dropout is
            outside [0, 1).
    """
    check_dropout(dropout)
    if len(channels) != len(_KERNELS):
        raise OptionError(f"channels has {len(channels)} numbers, but must have five, one for each convolution.", "channels")
    if padding < 0:
        raise OptionError(f"padding is {padding}, but must be at least 0.", "padding")
    outside = [scaled(published, width, "channels") for published in channels]
    hidden = scaled(_HIDDEN, width)
    return Sequential(
        {
            "features": _features(channels_in, outside, padding),
            "avgpool": AdaptiveAveragePool(_GRID),
            "flatten": Flatten(),
            "classifier": _classifier((_GRID, _GRID, outside[-1]), hidden, classes, dropout, seed),
        }
    )


def _features(channels_in: int, channels: Sequence[int], padding: int) -> Layer:
    layers: list[Layer] = []
    for number, (channels_out, kernel) in enumerate(zip(channels, _KERNELS, strict=True)):
        layers.append(
            Conv2d(
                channels_in,
                channels_out,
                kernel,
                1 if number else _STRIDE,
                padding=_PADDINGS[number] if number else padding,
                weight_values=initialise.normal(_DEVIATION),
                bias_values=initialise.constant(_FIRST_BIASES[number]),
            )
        )
        layers.append(ReLU())
        if number in _POOLED:
            layers.append(MaxPool(3, 2))
        channels_in = channels_out
    return Sequential(layers)


def _classifier(image_shape: tuple[int, int, int], hidden: int, classes: int, dropout: float, seed: int) -> Layer:
    rows, columns, channels = image_shape
    return Sequential(
        [
            Dropout(dropout, seed),
            normal_linear(rows * columns * channels, hidden, image_shape, bias=1.0),
            ReLU(),
            Dropout(dropout, seed),
            normal_linear(hidden, hidden, bias=1.0),
            ReLU(),
            normal_linear(hidden, classes),
        ]
    )
