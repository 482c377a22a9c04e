"""Layers: gradients against central differences, shapes and costs, first values, exported weights, names, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend.graph import GraphBuilder
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import StepContext
from hpctrain.backend.specs import AddSpec, TensorSpec
from hpctrain.core.errors import ShapeError
from hpctrain.nn import initialise
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
    PadChannels,
    ReLU,
    Residual,
    Sequential,
    StochasticDepth,
    edges,
    pair,
    window,
)
from hpctrain.nn.network import Network
from hpctrain.testing.layers import check_gradients, head_network

IMAGE = (7, 9, 3)


def body(channels: int = 3, stride: int = 1) -> dict[str, Layer]:
    return {
        "conv1": Conv2d(3, channels, 3, stride, padding=1, bias=False),
        "bn1": BatchNorm(channels),
        "relu1": ReLU(),
        "conv2": Conv2d(channels, channels, 3, padding=1, bias=False),
        "bn2": BatchNorm(channels),
    }


def droppable(rate: float) -> Residual:
    return Residual({"conv": Conv2d(3, 3, 3, padding=1), "depth": StochasticDepth(rate, seed=3)})


BLOCKS = {
    "identity": Residual(body(), activation=ReLU()),
    "identity without activation": Residual(body()),
    "projection": Residual(body(5, 2), Sequential([Conv2d(3, 5, 1, 2, bias=False), BatchNorm(5)]), activation=ReLU()),
    "empty body doubles": Residual({}),
    "nested": Residual({"inner": Residual({"conv": Conv2d(3, 3, 3, padding=1)}, activation=ReLU())}, activation=ReLU()),
    "body that works in place": Residual({"relu": ReLU(), "conv": Conv2d(3, 3, 1)}),
    "shortcut that works in place": Residual({"conv": Conv2d(3, 3, 1)}, ReLU(), activation=ReLU()),
}
WINDOWS = [(1, (7, 9)), (7, (7, 7)), ((3, 2), (7, 9)), (7, (2, 1)), ((4, 5), (9, 3)), (2, (225, 3))]
#: layer, image, and the batch where it is not the usual one
CASES: dict[str, tuple[Any, ...]] = {
    "conv 3x3": (Conv2d(4, 5, 3, padding=1), (7, 9, 4)),
    "conv 1x1": (Conv2d(4, 5, 1), (5, 7, 4)),
    "conv 1x1 stride 2": (Conv2d(4, 5, 1, 2, bias=False), (7, 9, 4)),
    "conv 7x7 stride 2": (Conv2d(3, 4, 7, 2, padding=3, bias=False), (15, 11, 3)),
    "conv 2x3": (Conv2d(3, 4, (2, 3), (2, 1), padding=(1, 0)), (9, 7, 3)),
    "conv of four edges": (Conv2d(3, 4, (3, 2), (1, 2), padding=(2, 0, 1, 3)), (5, 7, 3)),
    "conv dilated": (Conv2d(3, 4, (3, 2), 1, padding=2, dilation=(2, 3)), (9, 7, 3)),
    "conv of two groups": (Conv2d(4, 6, 3, 2, padding=1, groups=2), (7, 9, 4)),
    "conv depthwise": (Conv2d(5, 10, 3, padding=1, groups=5), (7, 5, 5)),
    "conv of all": (Conv2d(4, 6, (3, 2), (2, 1), (1, 0, 2, 1), (1, 2), 2), (9, 7, 4)),
    "conv with rows unread at the end": (Conv2d(2, 3, 2, 3), (7, 9, 2)),
    "conv of one sample": (Conv2d(3, 4, 3, 2, padding=1), IMAGE, 1),
    "max 2x2": (MaxPool(2), (8, 6, 3)),
    "max with a row left over": (MaxPool(2), IMAGE),
    "max overlapping": (MaxPool(3, 2, padding=1), (9, 7, 3)),
    "max in ceil mode with padding": (MaxPool((3, 2), (2, 3), (1, 1), ceil_mode=True), (9, 7, 2)),
    "max dilated": (MaxPool(2, 1, dilation=(2, 3)), (7, 9, 2)),
    "max with a stride beyond its kernel": (MaxPool(2, 3), (7, 9, 2)),
    "max of four edges": (MaxPool(3, 2, (1, 0, 0, 1)), (7, 9, 2)),
    "max of the whole image": (MaxPool((7, 9)), IMAGE),
    "average, padding counted": (AveragePool(3, 2, 1), (9, 7, 3)),
    "average, padding left out": (AveragePool(3, 2, 1, count_include_pad=False), (9, 7, 3)),
    "average in ceil mode": (AveragePool((3, 2), 2, ceil_mode=True), (8, 7, 3)),
    "average in ceil mode, padding left out": (AveragePool(3, 2, 1, ceil_mode=True, count_include_pad=False), (8, 6, 2)),
    "average of one pixel of two": (AveragePool(1, 2), IMAGE),
    "average with a stride beyond its kernel": (AveragePool(2, 3), (7, 9, 2)),
    "batch norm": (BatchNorm(4, epsilon=0.01), (7, 9, 4), 5),
    "batch norm of one pixel": (BatchNorm(3, epsilon=0.01), (1, 1, 3), 5),
    "batch norm of one channel": (BatchNorm(1, epsilon=0.01), (225, 1, 1), 5),
    "batch norm synchronised alone": (BatchNorm(4, synchronised=True), (5, 7, 4)),
    "dropouts": (Sequential([Dropout(0.3, seed=3), Dropout(0.5)]), IMAGE),
    "blocks that may be dropped": (Sequential([droppable(0.5), droppable(0.3)]), IMAGE, 5),
    "flatten": (Sequential([Conv2d(3, 2, 1), Flatten()]), IMAGE),
    "linear": (Sequential([Flatten(), Linear(30, 7)]), (3, 5, 2), 5),
    "linear without a bias, of one sample": (Sequential([Flatten(), Linear(30, 7, False)]), (3, 5, 2), 1),
    "relu": (ReLU(), IMAGE),
    "relu in place": (Sequential([Conv2d(3, 4, 3), ReLU(), Conv2d(4, 3, 3), ReLU()]), IMAGE),
    "sequence in a sequence": (Sequential([Conv2d(3, 4, 3), ReLU(), Sequential({"pool": AveragePool(2)})]), IMAGE),
    **{f"adaptive {size} of {image}": (AdaptiveAveragePool(size), (*image, 3)) for size, image in WINDOWS},
    **{f"pad {before} {after}": (PadChannels(before, after), IMAGE) for before, after in ((2, 2), (0, 3), (1, 0), (0, 0))},
    "pad next to a body": (
        Sequential([Conv2d(3, 3, 1), Residual({"conv": Conv2d(3, 8, 3, padding=1)}, PadChannels(2, 3))]),
        (5, 7, 3),
    ),
    **{f"residual: {name}": (block, (7, 5, 3)) for name, block in BLOCKS.items()},
    **{f"after a layer: {name}": (Sequential([Conv2d(2, 3, 1), block]), (7, 5, 2)) for name, block in BLOCKS.items()},
}


def run(layer: Layer, x: np.ndarray, *, training: bool = False, ids: np.ndarray | None = None, step: int = 0) -> np.ndarray:
    """The layer's flattened output, in float64."""
    network = Network(Sequential({"layer": layer, "flatten": Flatten()}), x.shape[1:], NumpyKernelSet(), dtype="float64")
    return run_on(network, x, training=training, ids=ids, step=step)


def run_on(network: Network, x: np.ndarray, *, training: bool, ids: np.ndarray | None = None, step: int = 0) -> np.ndarray:
    program = network.program(len(x), training=training)
    program.x[...] = x
    ids = np.arange(len(x)) if ids is None else ids
    context = StepContext(training=training, step=step, sample_ids=ids)
    return np.array(program.forward(context))


def lowered(layer: Layer, shape: tuple[int, ...], name: str) -> Any:
    builder = GraphBuilder(TensorSpec(shape))
    return builder.build(layer.lower(builder, 0, name))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    layer, image, *batch = CASES[name]
    check_gradients(layer, image, **({"batch": batch[0]} if batch else {}))


@given(
    height=st.integers(1, 40), kernel=st.integers(1, 7), stride=st.integers(1, 4),
    before=st.integers(0, 5), after=st.integers(0, 5), dilation=st.integers(1, 3),
)  # fmt: skip
def test_output_counts_the_windows_that_fit(
    height: int, kernel: int, stride: int, before: int, after: int, dilation: int
) -> None:
    layer = Conv2d(1, 2, (kernel, 1), (stride, 1), (before, after, 0, 0), (dilation, 1))
    reach = dilation * (kernel - 1)
    starts = [row for row in range(0, before + height + after, stride) if row + reach < before + height + after]
    x = TensorSpec((3, height, 5, 1))
    if not starts:
        with pytest.raises(ShapeError, match=f"the smallest height that fits is {reach + 1 - before - after}"):
            layer.output(x)
    else:
        assert layer.output(x).shape == (3, len(starts), 5, 2)


@pytest.mark.parametrize("size", [7, 8, 9, 225])
def test_ceil_mode_counts_windows_that_start_inside(size: int) -> None:
    for kernel, stride, padding in ((2, 2, 0), (3, 2, 1), (3, 3, 1), (2, 3, 1)):
        starts = np.arange(0, size + padding, stride)
        reached = starts - stride + kernel < size + 2 * padding  # the window before ends inside, so this one has work left
        expected = int(np.count_nonzero(reached | (starts == 0)))
        shape = MaxPool(kernel, stride, padding, ceil_mode=True).output(TensorSpec((1, size, size, 1))).shape
        assert shape == (1, expected, expected, 1), (kernel, stride, padding)
    with pytest.raises(ShapeError, match="the smallest height that fits is 2"):
        MaxPool(3, 2, ceil_mode=True).output(TensorSpec((1, 1, size, 1)))
    assert MaxPool(3, 2, ceil_mode=True).output(TensorSpec((1, 2, size, 1))).shape[1] == 1


def test_shapes_and_costs() -> None:
    layer = Conv2d(4, 6, (3, 2), 2, padding=1, groups=2)
    x = TensorSpec((5, 9, 7, 4))
    assert layer.flops(x) == 2 * math.prod(layer.output(x).shape) * 3 * 2 * (4 // 2)  # each multiply-add twice
    assert [Flatten().output(TensorSpec((n, 7, 9, 2))).shape for n in (3, 0)] == [(3, 126), (0, 126)]
    assert Flatten().flops(x) == Sequential([]).flops(x) == 0
    assert Sequential([]).output(x) == x
    assert PadChannels(1, 2).output(TensorSpec((0, 5, 7, 4))).shape == (0, 5, 7, 7)
    assert AveragePool((2, 3)).output(TensorSpec((1, 7, 9, 4))).shape == (1, 3, 3, 4)  # the stride defaults to the kernel
    first, second, image = Conv2d(3, 4, 3), Conv2d(4, 2, 1), TensorSpec((2, 7, 9, 3))
    assert Sequential([first, second]).flops(image) == first.flops(image) + second.flops(first.output(image))


def test_short_forms_of_windows_mean_what_torch_means() -> None:
    assert pair(3, "kernel") == pair((3, 3), "kernel") == pair([3, 3], "kernel") == (3, 3)  # type: ignore[arg-type]
    assert edges(1) == edges((1, 1)) == edges((1, 1, 1, 1)) == (1, 1, 1, 1)
    assert edges((1, 2)) == edges([1, 2]) == (1, 1, 2, 2)  # type: ignore[arg-type]
    made = window((3, 5), 2, (1, 2, 3, 4), (2, 1))
    assert (made.kernel, made.stride, made.padding, made.dilation) == ((3, 5), (2, 2), (1, 2, 3, 4), (2, 1))
    assert made.extent == (5, 5)
    split = AveragePool(3, 2, (1, 0, 1, 0)).window
    assert split is not None
    assert (split.kernel, split.stride, split.padding) == ((3, 3), (2, 2), (1, 0, 1, 0))


def test_batch_norm_normalises_and_evaluates_with_blended_statistics() -> None:
    x = 2.0 + 3.0 * np.random.default_rng(0).standard_normal((5, 7, 9, 3))
    y = run(BatchNorm(3, epsilon=1e-12), x, training=True).reshape(x.shape)
    np.testing.assert_allclose(y.mean((0, 1, 2)), 0.0, atol=1e-12)
    np.testing.assert_allclose(y.var((0, 1, 2)), 1.0, rtol=1e-10)
    model = Sequential({"bn": BatchNorm(3, epsilon=0.01, momentum=0.3), "flatten": Flatten()})
    network = Network(model, (7, 9, 3), NumpyKernelSet(), dtype="float64")
    run_on(network, x, training=True)
    network.statistics.blend(5 * network.statistics.batch, 5)
    mean, variance = 0.3 * x.mean((0, 1, 2)), 0.7 + 0.3 * x.var((0, 1, 2), ddof=1)
    np.testing.assert_allclose(network.statistics.views["bn.running_mean"], mean, rtol=1e-12)
    np.testing.assert_allclose(network.statistics.views["bn.running_var"], variance, rtol=1e-12)
    evaluated = run_on(network, x, training=False).reshape(x.shape)
    np.testing.assert_allclose(evaluated, (x - mean) / np.sqrt(variance + 0.01), rtol=1e-10)


def test_a_dropped_sample_is_its_shortcut_and_the_others_are_scaled() -> None:
    x = np.random.default_rng(0).standard_normal((16, *IMAGE))
    trained, evaluated = (run(droppable(0.75), x, training=training) - x.reshape(16, -1) for training in (True, False))
    dropped = ~trained.any(axis=1)
    assert 0 < dropped.sum() < 16
    np.testing.assert_allclose(trained[~dropped], 4 * evaluated[~dropped], rtol=1e-9, atol=1e-12)


def test_zeros_stand_around_the_input() -> None:
    network = Network(Sequential([PadChannels(1, 2), Flatten()]), (2, 3, 2), NumpyKernelSet(), dtype="float64")
    x = np.random.default_rng(0).standard_normal((3, 2, 3, 2))
    for _ in range(2):  # memory that the first run has left must not show in the second
        y = run_on(network, x, training=False).reshape(3, 2, 3, 5)
        np.testing.assert_array_equal(y, np.pad(x, ((0, 0), (0, 0), (0, 0), (1, 2))))
        network.program(3, training=False).logits[...] = np.nan


def test_exported_weights_act_on_channels_first() -> None:
    """x flattened as (H, W, C) times our weight = x flattened as (C, H, W) times the exported one; KRSC becomes KCRS."""
    random = np.random.default_rng(0)
    layers = (Linear(30, 7, image_shape=(3, 5, 2)), Linear(5, 3), Conv2d(4, 6, (3, 2), groups=2))
    specs = [layer.parameters()["weight"] for layer in layers]
    weights = [random.standard_normal(spec.shape) for spec in specs]
    first, second, third = (spec.interchange.export(weight) for spec, weight in zip(specs, weights, strict=True))
    x = random.standard_normal((4, 3, 5, 2))
    np.testing.assert_allclose(x.transpose(0, 3, 1, 2).reshape(4, -1) @ first.T, x.reshape(4, -1) @ weights[0], rtol=1e-12)
    np.testing.assert_array_equal(second, weights[1].T)
    np.testing.assert_array_equal(third, weights[2].transpose(0, 3, 1, 2))
    assert (first.shape, specs[2].shape) == ((7, 30), (6, 3, 2, 2))
    for spec, weight, exported in zip(specs, weights, (first, second, third), strict=True):
        np.testing.assert_array_equal(spec.interchange.restore(exported, spec.shape), weight)


def test_first_values_and_what_decays() -> None:
    network = head_network(Conv2d(32, 64, (5, 3)), (7, 7, 32))
    weight = network.parameters["layer.weight"].data
    assert weight.std() == pytest.approx(math.sqrt(2 / (64 * 15)), rel=0.03)  # He's, over the fan out
    assert abs(weight.mean()) < 1e-3
    assert not network.parameters["layer.bias"].data.any()
    bound = 1 / math.sqrt(400)
    for role, spec in Linear(400, 300).parameters().items():
        values = initialise.first_value(spec, role, 0)
        assert 0.95 * bound < np.abs(values).max() <= bound
        assert values.std() == pytest.approx(bound / math.sqrt(3), rel=0.1)
    for ones, layer in ((True, BatchNorm(5)), (False, BatchNorm(5, weight=0.0))):
        first = {role: spec.initialise(np.random.default_rng(0), (5,)) for role, spec in layer.parameters().items()}
        assert (first["weight"] == ones).all()
        assert not first["bias"].any()
    assert {role: spec.decay for role, spec in Conv2d(1, 2, 3).parameters().items()} == {"weight": True, "bias": False}
    assert list(Conv2d(1, 2, 3, bias=False).parameters()) == ["weight"]
    assert not any(spec.decay for spec in BatchNorm(5).parameters().values())
    statistics = {role: (spec.fill, spec.momentum) for role, spec in BatchNorm(5, momentum=0.2).statistics().items()}
    assert statistics == {"running_mean": (0.0, 0.2), "running_var": (1.0, 0.2)}


def test_names_nest_with_dots_and_count_from_zero() -> None:
    model = Sequential({"features": Sequential([Conv2d(3, 4, 3), ReLU()]), "top": Conv2d(4, 2, 1)})
    assert [name for name, _ in model.walk()] == ["", "features", "features.0", "features.1", "top"]
    graph = lowered(model, (2, 7, 9, 3), "")
    assert [node.name for node in graph.nodes] == ["features.0", "features.1", "top"]
    assert graph.nodes[2].parameters == {"weight": "top.weight", "bias": "top.bias"}


def test_names_and_order_of_a_residual_block() -> None:
    shortcut = Sequential([Conv2d(3, 5, 1, 2), BatchNorm(5)])
    block = Residual(body(5, 2), shortcut, activation=ReLU(), activation_name="relu2")
    graph = lowered(block, (2, 7, 9, 3), "layer1.0")
    expected = ["conv1", "bn1", "relu1", "conv2", "bn2", "downsample.0", "downsample.1", "add", "relu2"]
    assert [node.name for node in graph.nodes] == [f"layer1.0.{name}" for name in expected]
    total = graph.nodes[-2]
    assert total.spec == AddSpec()
    assert total.inputs == (graph.nodes[4].output, graph.nodes[6].output)
    assert [name for name, _ in block.walk()] == ["", *expected[:5], "downsample", *expected[5:7], "relu2"]
