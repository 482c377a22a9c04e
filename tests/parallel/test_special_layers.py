"""Layers that other systems refuse to split, or split wrongly, over ranks of every use against one rank."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from hpctrain.backend.kernels.base import Array, StepContext
from hpctrain.backend.kernels.specs import Shape, Window
from hpctrain.nn.custom import ArrayLayer
from hpctrain.nn.initialise import constant
from hpctrain.nn.layer import Layer
from hpctrain.nn.layers.adaptive_average_pool import AdaptiveAveragePool
from hpctrain.nn.layers.average_pool import AveragePool
from hpctrain.nn.layers.batch_norm import BatchNorm
from hpctrain.nn.layers.conv2d import Conv2d
from hpctrain.nn.layers.dropout import Dropout
from hpctrain.nn.layers.flatten import Flatten
from hpctrain.nn.layers.linear import Linear
from hpctrain.nn.layers.max_pool import MaxPool
from hpctrain.nn.layers.pad_channels import PadChannels
from hpctrain.nn.layers.relu import ReLU
from hpctrain.nn.layers.residual import Residual
from hpctrain.nn.layers.sequential import Sequential
from hpctrain.nn.parameter import ParameterSpec
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.partition_graph import partition_graph
from hpctrain.parallel.transfer import moved
from tests.support.distributed import Double, Trial, alone, largest_difference, on_virtual_ranks


def _check(ranks: int, trials: list[Trial], tolerance: float = 1e-12) -> None:
    for number, (trial, found) in enumerate(zip(trials, on_virtual_ranks(ranks, trials), strict=True)):
        assert largest_difference(found, alone(trial)) < tolerance, f"trial {number}: {trial.plan}"


def _counts(samples: int, ranks: int) -> tuple[int, ...]:
    """All but one on the last rank, one on the first."""
    return (min(1, samples), *(0,) * (ranks - 2), max(0, samples - 1))


def _all_uses(
    model: Layer, shape: tuple[int, int, int], ranks: int, tiles: tuple[int, int] | None = None, samples: int = 3
) -> list[Trial]:
    plans = [ParallelPlan(ranks, 1, use) for use in Parallelism]
    plans += [ParallelPlan(ranks, 1, Parallelism.DOMAIN, overlapped=frozenset(name for name, _ in model.walk()))]
    plans += [] if tiles is None else [ParallelPlan(ranks, 1, Parallelism.DOMAIN, tiles=tiles)]
    return [Trial(model, shape, _counts(samples, ranks), plan) for plan in plans]


@pytest.mark.slow
def test_the_stem_of_a_residual_network_on_odd_images_over_three_ranks() -> None:
    """7x7/2 padding 3, then 3x3/2 pooling padding 1, on 225 x 225."""
    stem: dict[str, Layer] = {
        "conv1": Conv2d(3, 4, 7, 2, padding=3, bias=False),
        "bn1": BatchNorm(4, synchronised=True),
        "relu": ReLU(),
        "maxpool": MaxPool(3, 2, padding=1),
        "next": Conv2d(4, 4, 1),
    }
    for model in (Sequential(stem), Sequential({"double": Double(), **stem})):
        _check(3, _all_uses(model, (225, 225, 3), 3, (1, 3), samples=1), 1e-11)


def test_the_first_layers_of_alexnet() -> None:
    """11x11/4 padding 2, 3x3/2 pooling without padding, 5x5 padding 2 in two groups."""
    layers: dict[str, Layer] = {
        "double": Double(),
        "conv1": Conv2d(3, 4, 11, 4, padding=2),
        "relu1": ReLU(),
        "pool1": MaxPool(3, 2),
        "conv2": Conv2d(4, 6, 5, padding=2, groups=2),
        "relu2": ReLU(),
        "pool2": MaxPool(3, 2),
    }
    for ranks, tiles in ((2, (1, 2)), (3, None), (4, (2, 2))):
        _check(ranks, _all_uses(Sequential(layers), (119, 119, 3), ranks, tiles, samples=1))


class Blur(ArrayLayer):
    """y[o] = gain * sum of x over k rows and 1 column, padding p of zeros: a layer that says no more than its window."""

    def __init__(self, kernel: int, stride: int, padding: int) -> None:
        self.window = Window((kernel, 1), (stride, 1), (padding, padding, 0, 0))

    def parameters(self) -> Mapping[str, ParameterSpec]:
        return {"gain": ParameterSpec((), constant(1.5))}

    def output_shape(self, shape: Shape) -> Shape:
        assert self.window is not None
        return (shape[0], *self.window.output_size((shape[1], shape[2])), shape[3])

    def _rows(self, shape: Shape) -> list[slice]:
        assert self.window is not None
        stride, (top, *_) = self.window.stride[0], self.window.padding
        starts = [o * stride - top for o in range(self.output_shape(shape)[1])]
        return [slice(max(0, start), max(0, start + self.window.kernel[0])) for start in starts]

    def forward(self, x: Array, parameters: Mapping[str, Array], context: StepContext, saved: dict[str, Any]) -> Array:
        y = np.zeros(self.output_shape(x.shape), x.dtype)
        for o, rows in enumerate(self._rows(x.shape)):
            y[:, o] = x[:, rows].sum(axis=1)
        saved["y"] = y
        return parameters["gain"] * y

    def backward(
        self, x: Array, dy: Array, parameters: Mapping[str, Array], saved: dict[str, Any]
    ) -> tuple[Array, Mapping[str, Array]]:
        dx = np.zeros_like(x)
        for o, rows in enumerate(self._rows(x.shape)):
            dx[:, rows] += parameters["gain"] * dy[:, o : o + 1]
        return dx, {"gain": (dy * saved["y"]).sum()}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_layer_of_ones_own_is_split_by_its_window_alone(ranks: int) -> None:
    for kernel, stride, padding in ((3, 1, 1), (4, 3, 2), (5, 2, 0), (2, 3, 4)):
        model = Sequential({"double": Double(), "mine": Blur(kernel, stride, padding), "conv": Conv2d(2, 2, 3, padding=1)})
        _check(ranks, _all_uses(model, (13, 3, 2), ranks))


def test_its_halo_is_what_the_window_needs() -> None:
    trial = Trial(
        Sequential({"double": Double(), "mine": Blur(3, 1, 1)}), (12, 5, 2), (2, 0, 0), ParallelPlan(3, 1, Parallelism.DOMAIN)
    )
    graph = partition_graph(trial.graph(2), trial.plan, trial.counts)
    (halo,) = [step.move for step in graph.steps if step.name == "mine.halo"]
    assert moved(*halo) == (20, 40, 20)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_adaptive_pools_flatten_and_narrow_shortcuts(ranks: int) -> None:
    conv = Conv2d(2, 5, 3, padding=1)
    models: list[Layer] = [
        Sequential({"conv": conv, "pool": AdaptiveAveragePool((1, 1)), "flatten": Flatten(), "fc": Linear(5, 7)}),
        Sequential({"conv": conv, "pool": AdaptiveAveragePool((3, 2)), "flatten": Flatten(), "fc": Linear(30, 4)}),
        Sequential({"conv": conv, "pool": AdaptiveAveragePool((7, 9)), "flatten": Flatten(), "fc": Linear(315, 4)}),
        Sequential({"conv": conv, "flatten": Flatten(), "relu": ReLU(), "drop": Dropout(0.4), "fc": Linear(175, 4)}),
        Sequential({"conv": conv, "flatten": Flatten(), "relu": ReLU(), "fc": Linear(175, 4)}),
        Sequential({"conv": conv, "pad": PadChannels(2, 3), "pool": AveragePool(2, 2)}),
        Residual(
            {"conv1": Conv2d(2, 6, 3, 2, padding=1), "bn": BatchNorm(6, synchronised=True)},
            Sequential({"pool": MaxPool(1, 2), "pad": PadChannels(2, 2)}),
            activation=ReLU(),
        ),
    ]
    for model in models:
        _check(ranks, _all_uses(model, (7, 5, 2), ranks, (1, ranks)))


@pytest.mark.parametrize("ranks", [3, 8])
def test_more_ranks_than_channels_rows_and_features(ranks: int) -> None:
    model = Sequential(
        {
            "conv1": Conv2d(2, 2, 3, padding=1),
            "bn1": BatchNorm(2, synchronised=True),
            "relu1": ReLU(),
            "drop": Dropout(0.5),
            "pool": MaxPool(2, 2),
            "conv2": Conv2d(2, 1, (2, 1)),
            "flatten": Flatten(),
            "fc1": Linear(2, 2),
            "fc2": Linear(2, 3),
        }
    )
    _check(ranks, _all_uses(model, (4, 4, 2), ranks))
    mixed = ParallelPlan(
        ranks, 1, Parallelism.DOMAIN, {"pool": Parallelism.MODEL, "fc1": Parallelism.MODEL, "bn1": Parallelism.MODEL}
    )
    _check(ranks, [Trial(model, (4, 4, 2), _counts(samples, ranks), mixed) for samples in (0, 1, 2)])


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_depthwise_grouped_and_dilated_convolutions(ranks: int) -> None:
    model = Sequential(
        {
            "wide": Conv2d(3, 12, 3, padding=2, dilation=2),
            "depthwise": Conv2d(12, 12, (5, 4), padding=2, groups=12),
            "doubled": Conv2d(12, 24, 3, padding=1, groups=12, stride=2),
            "grouped": Conv2d(24, 8, 3, padding=3, dilation=3, groups=4),
            "narrow": Conv2d(8, 4, 1, groups=2),
        }
    )
    plans = [
        ParallelPlan(ranks, 1, Parallelism.DOMAIN, {"doubled": Parallelism.MODEL}),
        ParallelPlan(ranks, 1, Parallelism.MODEL, {"depthwise": Parallelism.DOMAIN, "narrow": Parallelism.BATCH}),
    ]
    _check(ranks, _all_uses(model, (11, 6, 3), ranks) + [Trial(model, (11, 6, 3), _counts(2, ranks), plan) for plan in plans])


@pytest.mark.parametrize("synchronised", [False, True])
def test_batch_norm_of_images_that_are_split(synchronised: bool) -> None:
    """Statistics of whole images even where batch norm is not synchronised: all samples lie on one rank, or on all of them."""
    model = Sequential({"double": Double(), "bn": BatchNorm(3, synchronised=synchronised), "conv": Conv2d(3, 2, 3, padding=1)})
    for use in (Parallelism.DOMAIN, Parallelism.MODEL):
        _check(3, [Trial(model, (5, 4, 3), counts, ParallelPlan(3, 1, use)) for counts in ((4, 0, 0), (1, 2, 1), (0, 0, 1))])
