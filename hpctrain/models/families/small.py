"""A small convolutional network for small images, used by the quickstart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.core.errors import OptionError
from hpctrain.models.parts import Norm, check_dropout, scaled
from hpctrain.nn.layers import AdaptiveAveragePool, BatchNorm, Conv2d, Dropout, Flatten, Layer, Linear, MaxPool, ReLU, Sequential

IMAGE_SHAPE = (28, 28, 1)

VARIANTS: Mapping[str, Mapping[str, object]] = {}


def build(
    *,
    classes: int = 10,
    channels_in: int = 1,
    channels: Sequence[int] = (16, 32),
    hidden: int = 128,
    grid: int = 7,
    batch_norm: bool = True,
    dropout: float = 0.0,
    width: float = 1.0,
    epsilon: float = 1e-5,
    momentum: float = 0.1,
    synchronised: bool = False,
    seed: int = 0,
) -> Layer:
    """Build stages of convolution, batch norm, ReLU and a 2x2 max pool, then a classifier.

    Args:
        channels: Output channels of each stage; the length of the list is the number of stages.
        hidden: Number of features of the classifier's hidden layer; 0 omits that layer.
        grid: Rows and columns to which the last feature map is averaged before the classifier; 1 is global pooling, and 7 changes
            nothing for 28 px and two stages.
        batch_norm: Whether batch norm follows each convolution.
        dropout: Probability of dropping an input feature of each linear layer, in [0, 1); 0 switches dropout off.
        width: Factor on all channels and hidden features.

    Raises:
        OptionError: there are no stages, the width is not positive, or the dropout is outside [0, 1).
    """
    if not channels:
        raise OptionError("channels is empty, but a small network needs at least one stage; the default is [16, 32].", "channels")
    check_dropout(dropout)
    norm = Norm(epsilon, momentum, synchronised) if batch_norm else None
    layers: dict[str, Layer] = {}
    for stage, published in enumerate(channels):
        channels_out = scaled(published, width)
        layers[f"stage{stage + 1}"] = _stage(channels_in, channels_out, norm)
        channels_in = channels_out
    features = scaled(hidden, width, "hidden") if hidden else 0
    layers |= {"avgpool": AdaptiveAveragePool(grid), "flatten": Flatten()}
    layers["classifier"] = _classifier((grid, grid, channels_in), features, classes, dropout, seed)
    return Sequential(layers)


def _stage(channels_in: int, channels: int, norm: Norm | None) -> Layer:
    bn: dict[str, BatchNorm] = {} if norm is None else {"bn": norm.layer(channels)}
    conv = Conv2d(channels_in, channels, 3, padding=1, bias=norm is None)
    return Sequential({"conv": conv, **bn, "relu": ReLU(), "pool": MaxPool(2)})


def _classifier(image_shape: tuple[int, int, int], hidden: int, classes: int, dropout: float, seed: int) -> Layer:
    rows, columns, channels = image_shape
    features = rows * columns * channels
    drop1, drop2 = ({name: Dropout(dropout, seed)} if dropout else {} for name in ("dropout1", "dropout2"))
    if not hidden:
        return Sequential({**drop1, "fc": Linear(features, classes, image_shape=image_shape)})
    return Sequential(
        {
            **drop1,
            "fc1": Linear(features, hidden, image_shape=image_shape),
            "relu": ReLU(),
            **drop2,
            "fc2": Linear(hidden, classes),
        }
    )
