"""Small networks that hold every kind of layer, for tests that compare ways of running them."""

from __future__ import annotations

from hpctrain.nn.layers import (
    AdaptiveAveragePool,
    AveragePool,
    BatchNorm,
    Conv2d,
    Dropout,
    Flatten,
    Layer,
    Linear,
    MaxPool,
    ReLU,
    Residual,
    Sequential,
    StochasticDepth,
)


def plain(classes: int = 5, *, dropout: float = 0.0, hidden: int = 11) -> Layer:
    """No batch norm: two convolutions, both kinds of pooling, two linear layers. For 9 x 7 x 3 images."""
    return Sequential(
        {
            "conv1": Conv2d(3, 6, 3, padding=1),
            "relu1": ReLU(),
            "pool1": MaxPool(3, 2, padding=1),
            "conv2": Conv2d(6, 8, (3, 2), padding=1, groups=2),
            "relu2": ReLU(),
            "pool2": AveragePool(2, 2, ceil_mode=True),
            "flatten": Flatten(),
            "fc1": Linear(8 * 3 * 3, hidden),
            "relu3": ReLU(),
            "drop": Dropout(dropout),
            "fc2": Linear(hidden, classes),
        }
    )


def narrow(classes: int = 2) -> Layer:
    """Two features in each layer: a split group of three leaves one rank without any. For images of 3 channels."""
    return Sequential(
        {
            "conv": Conv2d(3, 2, 3, padding=1),
            "relu1": ReLU(),
            "avgpool": AdaptiveAveragePool((1, 1)),
            "flatten": Flatten(),
            "fc1": Linear(2, 2),
            "relu2": ReLU(),
            "fc2": Linear(2, classes),
        }
    )


def residual(classes: int = 5, *, synchronised: bool = True, stochastic_depth: float = 0.0) -> Layer:
    """Batch norm and two residual blocks, one with a projection, whose bodies may be dropped. For images of 3 channels."""

    def norm(channels: int) -> Layer:
        return BatchNorm(channels, synchronised=synchronised)

    def block(c: int, k: int, stride: int) -> Layer:
        body: dict[str, Layer] = {
            "conv1": Conv2d(c, k, 3, stride=stride, padding=1, bias=False),
            "bn1": norm(k),
            "relu1": ReLU(),
            "conv2": Conv2d(k, k, 3, padding=1, bias=False),
            "bn2": norm(k),
            **({"drop": StochasticDepth(stochastic_depth, seed=5)} if stochastic_depth else {}),
        }
        same = c == k and stride == 1
        shortcut = None if same else Sequential([Conv2d(c, k, 1, stride=stride, bias=False), norm(k)])
        return Residual(body, shortcut, activation=ReLU())

    return Sequential(
        {
            "conv1": Conv2d(3, 8, 3, padding=1, bias=False),
            "bn1": norm(8),
            "relu": ReLU(),
            "layer1": block(8, 8, 1),
            "layer2": block(8, 12, 2),
            "avgpool": AdaptiveAveragePool((1, 1)),
            "flatten": Flatten(),
            "fc": Linear(12, classes),
        }
    )
