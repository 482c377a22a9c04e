"""Operators equal the float64 reference, fused or not, in every layout; which of them make a number of NaN."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hpctrain.backend.onednn import linear
from hpctrain.backend.onednn.kernel_set import OnednnKernelSet
from hpctrain.backend.onednn.operator import in_layout
from hpctrain.backend.onednn.pool import plain_pool
from hpctrain.backend.operators import Accumulating, JointBackward, KernelSet
from hpctrain.backend.specs import (
    AdaptiveAveragePoolSpec,
    AddSpec,
    BatchNormSpec,
    Conv2dSpec,
    LinearSpec,
    PoolSpec,
    ReluSpec,
    Spec,
    TensorSpec,
    Window,
    WithRelu,
)
from tests.support.kernel_pairs import Result, assert_close, difference, run


def conv(channels_in, channels_out, kernel, *, stride=(1, 1), padding=(0, 0, 0, 0), dilation=(1, 1), groups=1, bias=True):
    return Conv2dSpec(channels_in, channels_out, Window(kernel, stride, padding, dilation), groups, bias)


SAME = (1, 1, 1, 1)

CASES = {
    "first layer of one channel": conv(1, 20, (5, 5), padding=(2, 2, 2, 2)),
    "first layer of three channels": conv(3, 16, (3, 3), padding=SAME),
    "imagenet's first layer": conv(3, 64, (7, 7), stride=(2, 2), padding=(3, 3, 3, 3), bias=False),
    "odd channels": conv(5, 7, (3, 3), stride=(2, 2), padding=SAME),
    "few to many": conv(7, 48, (3, 3), padding=SAME),
    "many to one": conv(16, 1, (3, 3), padding=SAME),
    "one to one": conv(1, 1, (3, 3), padding=SAME),
    "1x1": conv(16, 20, (1, 1)),
    "1x1 without bias": conv(20, 64, (1, 1), bias=False),
    "1x1 strided": conv(16, 24, (1, 1), stride=(2, 2), bias=False),
    "3x3": conv(20, 16, (3, 3), padding=SAME, bias=False),
    "asymmetric padding": conv(16, 20, (3, 3), padding=(0, 1, 2, 1)),
    "no padding": conv(16, 16, (3, 3)),
    "unequal strides and kernel": conv(8, 16, (3, 2), stride=(2, 1), padding=(1, 0, 1, 0)),
    "dilated": conv(16, 16, (3, 3), padding=(2, 2, 2, 2), dilation=(2, 2)),
    "dilated and strided": conv(16, 16, (3, 3), stride=(2, 2), padding=(2, 2, 2, 2), dilation=(2, 2)),
    "two groups": conv(16, 32, (3, 3), padding=SAME, groups=2),
    "five groups": conv(20, 20, (3, 3), padding=SAME, groups=5),
    "depthwise": conv(16, 16, (3, 3), padding=SAME, groups=16),
    "wide": conv(64, 72, (3, 3), padding=SAME),
}  # fmt: skip


def arrays(spec: Conv2dSpec, shape: tuple[int, ...], seed: int = 0):
    random = np.random.default_rng(seed)
    x = random.standard_normal(shape)
    fan_in = np.prod(spec.weight_shape[1:])
    parameters = {"weight": random.standard_normal(spec.weight_shape) / np.sqrt(fan_in)}
    if spec.bias:
        parameters["bias"] = random.standard_normal(spec.channels_out)
    dy = random.standard_normal(spec.output(TensorSpec(shape)).shape)
    return x, parameters, dy


@pytest.mark.parametrize("spec", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("size", [(9, 7), (15, 16)])
def test_equals_the_reference(onednn: KernelSet, reference: KernelSet, spec: Conv2dSpec, size: tuple[int, int]) -> None:
    x, parameters, dy = arrays(spec, (3, *size, spec.channels_in))
    ours = run(onednn, spec, [x], parameters=parameters, output_grad=dy)
    assert_close(ours, run(reference, spec, [x], parameters=parameters, output_grad=dy, dtype="float64"))
    evaluated = run(onednn, spec, [x], parameters=parameters)
    assert difference(evaluated.output, ours.output) <= 1e-6


def test_random_grouped_convolutions_equal_the_reference(onednn: KernelSet, reference: KernelSet) -> None:
    """No weight or gradient comes from another group if a block of channels holds several groups or a part of one."""
    chance = random.Random(0)
    for _ in range(40):
        groups, inside, outside = chance.choice([2, 3, 8, 32]), chance.choice([1, 2, 4, 8, 16]), chance.choice([1, 2, 4, 8, 16])
        size, stride = chance.choice([1, 3, 5]), chance.randint(1, 2)
        spec = conv(
            groups * inside, groups * outside, (size, size), stride=(stride, stride), padding=(size // 2,) * 4, groups=groups
        )
        x, parameters, dy = arrays(spec, (2, chance.randint(2, 9), chance.randint(2, 9), spec.channels_in))
        ours = run(onednn, spec, [x], parameters=parameters, output_grad=dy)
        assert_close(ours, run(reference, spec, [x], parameters=parameters, output_grad=dy, dtype="float64"))


@pytest.mark.parametrize("spec", CASES.values(), ids=CASES.keys())
def test_adds_to_the_gradient_where_it_says_so(onednn: KernelSet, reference: KernelSet, spec: Conv2dSpec) -> None:
    shape = (2, 9, 7, spec.channels_in)
    if not isinstance(onednn.make(spec, (TensorSpec(shape),), training=True), Accumulating):
        assert spec not in [CASES[name] for name in ("1x1", "1x1 without bias", "3x3", "asymmetric padding", "wide")]
        return
    x, parameters, dy = arrays(spec, shape)
    before = np.random.default_rng(1).standard_normal(shape)
    ours = run(onednn, spec, [x], parameters=parameters, output_grad=dy, accumulate=[before])
    wanted = run(reference, spec, [x], parameters=parameters, output_grad=dy, dtype="float64").input_grads[0] + before
    assert difference(ours.input_grads[0], wanted) <= 1e-5


BEFORE_RELU = {name: (CASES[name], (3, 9, 7)) for name in ("3x3", "1x1", "few to many", "five groups")}


@pytest.mark.parametrize("input_first", [False, True])
@pytest.mark.parametrize(("spec", "shape"), [*BEFORE_RELU.values(), (LinearSpec(225, 20), (7,))], ids=[*BEFORE_RELU, "linear"])
def test_relu_after_a_convolution_or_linear_layer(
    onednn: KernelSet, reference: KernelSet, spec: Conv2dSpec | LinearSpec, shape: tuple[int, ...], input_first: bool
) -> None:
    if isinstance(spec, LinearSpec):
        x, parameters, dy = linear_arrays(spec, *shape)
    else:
        x, parameters, dy = arrays(spec, (*shape, spec.channels_in))
    ours = run(onednn, WithRelu(spec), [x], parameters=parameters, output_grad=dy, input_first=input_first)
    assert_close(ours, rectified(reference, spec, x, parameters, dy))


def rectified(
    reference: KernelSet, spec: Conv2dSpec | LinearSpec, x: np.ndarray, parameters: dict[str, np.ndarray], dy: np.ndarray
) -> Result:
    """Run the operation with a ReLU after it, in float64."""
    before = run(reference, spec, [x], parameters=parameters, output_grad=dy, dtype="float64").output
    wanted = run(reference, spec, [x], parameters=parameters, output_grad=dy * (before > 0), dtype="float64")
    wanted.output = np.maximum(before, 0)
    return wanted


def test_bitwise_the_same_every_time(onednn: KernelSet) -> None:
    spec = CASES["wide"]
    x, parameters, dy = arrays(spec, (5, 15, 9, 64))
    first, second = (run(onednn, spec, [x], parameters=parameters, output_grad=dy, steps=steps) for steps in (1, 2))
    for name, array in first.arrays().items():
        np.testing.assert_array_equal(array, second.arrays()[name])


FEW_PIXELS = {
    "3x3": conv(176, 176, (3, 3), padding=SAME, bias=False),
    "strided": conv(128, 256, (3, 3), stride=(2, 2), padding=SAME),
    "larger than the image": conv(128, 128, (5, 5), padding=(2, 2, 2, 2)),
}


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("name", FEW_PIXELS)
def test_few_pixels_and_many_weights_are_products(onednn: KernelSet, reference: KernelSet, name: str, relu: bool) -> None:
    inner = FEW_PIXELS[name]
    spec, shape = WithRelu(inner) if relu else inner, (5, 3, 2, inner.channels_in)
    assert onednn.make(spec, (TensorSpec(shape),), training=True).fallback_reason == "it has few pixels and many weights"
    assert not onednn.make(spec, (TensorSpec(shape),), training=False).fallback_reason, "evaluation copies weights once"
    x, parameters, dy = arrays(inner, shape)
    ours = run(onednn, spec, [x], parameters=parameters, output_grad=dy)
    wanted = run(reference, inner, [x], parameters=parameters, output_grad=dy, dtype="float64")
    assert_close(ours, rectified(reference, inner, x, parameters, dy) if relu else wanted)


@pytest.mark.parametrize(
    ("spec", "images"),
    [
        (FEW_PIXELS["3x3"], 129),
        (conv(512, 512, (1, 1)), 5),
        (conv(512, 512, (3, 3), padding=SAME, groups=2), 5),
        (conv(64, 64, (3, 3), padding=SAME), 5),
    ],
    ids=["many pixels", "1x1", "groups", "few weights"],
)
def test_other_convolutions_are_the_librarys(onednn: KernelSet, spec: Conv2dSpec, images: int) -> None:
    operator = onednn.make(spec, (TensorSpec((images, 1, 1, spec.channels_in)),), training=True)
    assert not operator.fallback_reason


def linear_arrays(spec: LinearSpec, batch: int):
    random = np.random.default_rng(0)
    parameters = {"weight": random.standard_normal(spec.weight_shape) / np.sqrt(spec.features_in)}
    if spec.bias:
        parameters["bias"] = random.standard_normal(spec.features_out)
    return random.standard_normal((batch, spec.features_in)), parameters, random.standard_normal((batch, spec.features_out))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(1, 1), (225, 10), (20, 7), (512, 1000), (64, 64)])
@pytest.mark.parametrize("batch", [1, 5, 33])
@pytest.mark.parametrize("product", [True, False])
def test_linear_layers_equal_the_reference(
    onednn: KernelSet,
    reference: KernelSet,
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, int],
    batch: int,
    bias: bool,
    product: bool,
) -> None:
    monkeypatch.setattr(linear, "_PRODUCT_WEIGHTS", 1 if product else 1 << 30)
    spec = LinearSpec(*sizes, bias)
    x, parameters, dy = linear_arrays(spec, batch)
    ours = run(onednn, spec, [x], parameters=parameters, output_grad=dy)
    assert_close(ours, run(reference, spec, [x], parameters=parameters, output_grad=dy, dtype="float64"))
    np.testing.assert_allclose(run(onednn, spec, [x], parameters=parameters).output, ours.output, rtol=1e-5, atol=1e-5)


FUSED = {"alone": {}, "relu": {"relu": True}, "add and relu": {"relu": True, "add": True}}


def norm_arrays(spec: BatchNormSpec, shape: tuple[int, ...]):
    random = np.random.default_rng(0)
    inputs = [3.0 + random.standard_normal(shape) for _ in range(2 if spec.add else 1)]
    if spec.add:
        inputs[1] -= 3.0
    c = spec.channels
    parameters = {"weight": random.standard_normal(c), "bias": random.standard_normal(c)}
    statistics = {"running_mean": random.standard_normal(c), "running_var": random.uniform(0.5, 2, c)}
    return inputs, parameters, statistics | {"batch_mean": np.zeros(c), "batch_var": np.zeros(c)}, random.standard_normal(shape)


@pytest.mark.parametrize("fused", FUSED.values(), ids=FUSED.keys())
@pytest.mark.parametrize("channels", [1, 3, 5, 16, 20])
@pytest.mark.parametrize("layout", ["NHWC", "nChw8c", "nChw16c"])
def test_batch_norm_in_training(
    onednn: KernelSet, reference: KernelSet, channels: int, fused: dict[str, bool], layout: str
) -> None:
    spec = BatchNormSpec(channels, **fused)
    shape = (3, 9, 7, channels)
    inputs, parameters, statistics, dy = norm_arrays(spec, shape)
    common = {"parameters": parameters, "statistics": statistics, "output_grad": dy}
    layouts = [in_layout(TensorSpec(shape), layout)] * len(inputs)
    wanted = run(reference, spec, inputs, dtype="float64", **common)
    # NumPy stands in where a machine's oneDNN has only plain loops for a layout, and has its parameters first.
    joint = isinstance(onednn.make(spec, tuple(layouts), training=True), JointBackward)
    assert joint or layout == "nChw16c"
    if spec.add:
        first = run(onednn, spec, inputs, layouts=layouts, wants=[True, False], **common)
        assert_close(first, run(reference, spec, inputs, dtype="float64", wants=[True, False], **common))
    for in_place in (False, True):
        for input_first in (False, True) if joint else (False,):
            ours = run(onednn, spec, inputs, layouts=layouts, in_place=in_place, input_first=input_first, **common)
            assert_close(ours, wanted)


@pytest.mark.parametrize("fused", FUSED.values(), ids=FUSED.keys())
@pytest.mark.parametrize("channels", [1, 5, 16])
def test_batch_norm_in_evaluation(onednn: KernelSet, reference: KernelSet, channels: int, fused: dict[str, bool]) -> None:
    spec = BatchNormSpec(channels, **fused)
    inputs, parameters, statistics, _ = norm_arrays(spec, (3, 9, 7, channels))
    common = {"parameters": parameters, "statistics": statistics}
    assert_close(run(onednn, spec, inputs, **common), run(reference, spec, inputs, dtype="float64", **common))


def test_synchronised_statistics_are_left_to_numpy(onednn: KernelSet) -> None:
    x = TensorSpec((3, 9, 7, 16), layout="nChw8c", padded_size=3 * 9 * 7 * 16)
    operator = onednn.make(BatchNormSpec(16, synchronised=True), (x,), training=True)
    assert operator.inputs == (x.plain(),)


WINDOWS = {
    "2x2": Window((2, 2), (2, 2), (0, 0, 0, 0)),
    "3x3 strided and padded": Window((3, 3), (2, 2), (1, 1, 1, 1)),
    "overlapping": Window((3, 3), (1, 1), (1, 1, 1, 1)),
    "asymmetric": Window((3, 2), (2, 1), (1, 0, 0, 1)),
    "dilated": Window((2, 2), (1, 1), (0, 0, 0, 0), (2, 2)),
}


@pytest.mark.parametrize("layout", ["NHWC", "nChw8c"])
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS.keys())
@pytest.mark.parametrize("kind", ["max", "include padding", "exclude padding"])
@pytest.mark.parametrize("channels", [1, 16, 20])
def test_pools_equal_the_reference(
    onednn: KernelSet, reference: KernelSet, kind: str, window: Window, ceil_mode: bool, channels: int, layout: str
) -> None:
    spec = PoolSpec("max" if kind == "max" else "average", window, ceil_mode, count_include_pad=kind == "include padding")
    if spec.kind == "average" and window.dilation != (1, 1):
        return
    random = np.random.default_rng(0)
    shape = (3, 10, 7, channels)
    x = random.standard_normal(shape)
    dy = random.standard_normal(spec.output(TensorSpec(shape)).shape)
    ours = run(onednn, spec, [x], output_grad=dy, layouts=[in_layout(TensorSpec(shape), layout)])
    assert_close(ours, run(reference, spec, [x], output_grad=dy, dtype="float64"))
    assert_close(run(onednn, spec, [x]), run(reference, spec, [x], dtype="float64"))


@pytest.mark.parametrize("size", [(1, 1), (2, 7), (5, 1), (3, 2), (10, 7)])
@pytest.mark.parametrize("channels", [1, 16, 20])
def test_adaptive_pools(onednn: KernelSet, reference: KernelSet, size: tuple[int, int], channels: int) -> None:
    spec = AdaptiveAveragePoolSpec(size)
    random = np.random.default_rng(0)
    x = random.standard_normal((3, 10, 7, channels))
    dy = random.standard_normal((3, *size, channels))
    wanted = run(reference, spec, [x], output_grad=dy, dtype="float64")
    for layout in ("NHWC", "nChw8c"):
        ours = run(onednn, spec, [x], output_grad=dy, layouts=[in_layout(TensorSpec(x.shape), layout)])
        if size == (10, 7):
            np.testing.assert_array_equal(ours.output, x.astype(np.float32))
        else:
            assert_close(ours, wanted)


def test_global_pooling_ends_in_plain_memory(onednn: KernelSet) -> None:
    x = in_layout(TensorSpec((3, 7, 7, 16)), "nChw8c")
    assert onednn.make(AdaptiveAveragePoolSpec((1, 1)), (x,), training=True).output == TensorSpec((3, 1, 1, 16))


def test_windows_of_changing_size_are_left_to_numpy() -> None:
    assert plain_pool(AdaptiveAveragePoolSpec((3, 2)), TensorSpec((1, 10, 7, 4))) is None


SHAPE = (3, 9, 7, 20)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("shape", "layout"), [(SHAPE, "NHWC"), (SHAPE, "nChw8c"), ((33, 7), "NHWC")])
def test_relu(onednn: KernelSet, reference: KernelSet, shape: tuple[int, ...], layout: str, in_place: bool) -> None:
    random = np.random.default_rng(0)
    x, dy = random.standard_normal(shape), random.standard_normal(shape)
    x.reshape(-1)[::5] = 0.0
    spec = TensorSpec(shape) if layout == "NHWC" else in_layout(TensorSpec(shape), layout)
    ours = run(onednn, ReluSpec(), [x], output_grad=dy, layouts=[spec], in_place=in_place)
    assert_close(ours, run(reference, ReluSpec(), [x], output_grad=dy, dtype="float64"))


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("layouts", [("NHWC", "NHWC"), ("nChw8c", "nChw8c"), ("NHWC", "nChw8c")])
@pytest.mark.parametrize("adds", [(False, False), (True, False), (False, True), (True, True)])
def test_add(onednn: KernelSet, reference: KernelSet, relu: bool, layouts: tuple[str, str], adds: tuple[bool, bool]) -> None:
    random = np.random.default_rng(0)
    a, b, dy, *before = (random.standard_normal(SHAPE) for _ in range(5))
    old = [value if add else None for value, add in zip(before, adds, strict=True)]
    specs = [in_layout(TensorSpec(SHAPE), layout) for layout in layouts]
    ours = run(onednn, AddSpec(relu), [a, b], output_grad=dy, layouts=specs, accumulate=old)
    wanted = run(reference, AddSpec(relu), [a, b], output_grad=dy, dtype="float64")
    wanted.input_grads = [grad + (0 if held is None else held) for grad, held in zip(wanted.input_grads, old, strict=True)]
    assert_close(ours, wanted)


C = 16

WINDOW = Window((2, 2), (2, 2), (0, 0, 0, 0))

CONV = Conv2dSpec(C, C, Window((3, 3), (1, 1), (1, 1, 1, 1)))

#: operator -> (spec, number of inputs, NaN in the input is NaN in the output)
OPERATORS: dict[str, tuple[Spec, int, bool]] = {
    "convolution": (CONV, 1, True),
    "sum": (AddSpec(), 2, True),
    "average pooling": (PoolSpec("average", WINDOW), 1, True),
    "batch norm": (BatchNormSpec(C), 1, True),
    "ReLU": (ReluSpec(), 1, False),
    "convolution, ReLU": (WithRelu(CONV), 1, False),
    "sum, ReLU": (AddSpec(relu=True), 2, False),
    "max pooling": (PoolSpec("max", WINDOW), 1, False),
    "batch norm, ReLU": (BatchNormSpec(C, relu=True), 1, False),
    "batch norm, sum, ReLU": (BatchNormSpec(C, relu=True, add=True), 2, False),
}


def _run(onednn: OnednnKernelSet, spec: Spec, inputs: int, value: float) -> Result:
    random = np.random.default_rng(0)
    xs = [random.standard_normal((2, 8, 8, C)).astype(np.float32) for _ in range(inputs)]
    xs[0][0, 2, 3, 1] = value
    parameters, statistics = {}, {}
    if isinstance(spec, BatchNormSpec):
        parameters = {role: np.ones(C, np.float32) for role in ("weight", "bias")}
        statistics = {role: np.ones(C, np.float32) for role in ("running_mean", "running_var", "batch_mean", "batch_var")}
    elif isinstance(spec, Conv2dSpec | WithRelu):
        parameters = {"weight": random.standard_normal((C, 3, 3, C)).astype(np.float32), "bias": np.zeros(C, np.float32)}
    size = 4 if isinstance(spec, PoolSpec) else 8
    return run(
        onednn, spec, xs, parameters=parameters, statistics=statistics, output_grad=np.ones((2, size, size, C), np.float32)
    )


@pytest.mark.parametrize("name", OPERATORS)
def test_nan_passes_or_becomes_a_number(onednn: OnednnKernelSet, name: str) -> None:
    spec, inputs, passes = OPERATORS[name]
    result = _run(onednn, spec, inputs, np.nan)
    assert np.isnan(result.output).any() == passes


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [name for name in OPERATORS if "conv" in name or "norm" in name])
def test_gradients_of_parameters_and_batch_statistics_tell(onednn: OnednnKernelSet, name: str, value: float) -> None:
    """Zero times NaN is NaN: what a ReLU hides in forward is seen in the gradient of the layer before it."""
    spec, inputs, _ = OPERATORS[name]
    result = _run(onednn, spec, inputs, value)
    assert not np.isfinite(result.gradients["weight"]).all()
    if isinstance(spec, BatchNormSpec):
        assert not np.isfinite(result.statistics["batch_mean"][1])
        assert not np.isfinite(result.statistics["batch_var"][1])
