"""Convolutions, linear layers and the loss of the cuda set against the NumPy set in float64, in every direction and dtype."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.backend.cuda.conv2d import CudaConv2d, CudaPatchConv2d, CudaPointwiseConv2d
from hpctrain.backend.cuda.device import ConvolutionKey
from hpctrain.backend.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import LossSums, Operator, SufficientFactors
from hpctrain.backend.specs import Conv2dSpec, LinearSpec, SoftmaxCrossEntropySpec, TensorSpec, Window, WithRelu
from hpctrain.testing.operators import OperatorBench, default_parameters
from hpctrain_testing.emulator.memory import read
from tests.support.emulated import CudaKernelsFactory
from tests.support.kernel_pairs import run
from tests.support.rounded import DTYPES, assert_rounded, device_bench, dyadic, emulated_kernels, rounded
from tests.support.sampling import amount

#: of float64 NumPy, relative to the largest element: bfloat16 rounds once, the weight's gradient from float32 sums
ERRORS = {"float64": 1e-10, "float32": 1e-5, "tf32": 1e-5, "bfloat16": 2.0**-8}

PRECISIONS = list(ERRORS)

SAME = (1, 1, 1, 1)

CASES = [
    (Conv2dSpec(4, 6, Window((5, 3), (2, 3), (1, 2, 0, 1), (1, 2)), groups=2), (2, 7, 9, 4)),
    (Conv2dSpec(8, 16, Window((3, 3), (1, 1), SAME), bias=False), (2, 6, 5, 8)),
    (WithRelu(Conv2dSpec(4, 16, Window((3, 3), (1, 1), SAME))), (2, 6, 5, 4)),
    (WithRelu(Conv2dSpec(3, 5, Window((3, 2), (2, 1), SAME))), (2, 7, 5, 3)),
    (WithRelu(Conv2dSpec(4, 8, Window((3, 3), (1, 1), SAME), bias=False)), (2, 6, 5, 4)),
]

NO_PIXELS = [(0, 7, 9, 4), (3, 0, 9, 4), (3, 7, 0, 4)]


def convolved(
    kernels: CudaKernelSet, spec: Conv2dSpec | WithRelu, x: np.ndarray, parameters: dict[str, np.ndarray], dy: np.ndarray
) -> dict[str, np.ndarray]:
    """y, and the gradients of all."""
    bench = device_bench(kernels, spec, x, parameters)
    y, gradients = bench.forward(), bench.backward(dy)
    return {"y": y, **gradients.parameters, "x": gradients.inputs[0]}


def made(kernels: CudaKernelSet, spec: Conv2dSpec | WithRelu, shape: tuple[int, ...], **options: bool) -> Operator:
    return kernels.make(spec, (TensorSpec(shape, kernels.runtime.dtype),), **{"training": True, **options})


def reference(
    spec: Conv2dSpec | WithRelu, x: np.ndarray, parameters: dict[str, np.ndarray], dy: np.ndarray
) -> dict[str, np.ndarray]:
    inner, relu = (spec.inner, True) if isinstance(spec, WithRelu) else (spec, False)
    bench = OperatorBench(NumpyKernelSet(), inner, [x], parameters=parameters)
    y = bench.forward()
    gradients = bench.backward(np.where(y > 0, dy, 0.0) if relu else dy)
    return {"y": np.maximum(y, 0.0) if relu else y, **gradients.parameters, "x": gradients.inputs[0]}


def case(spec: Conv2dSpec | WithRelu, shape: tuple[int, ...]) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]:
    """x, parameters, dy."""
    inner = spec.inner if isinstance(spec, WithRelu) else spec
    parameters = {role: dyadic(*value.shape, seed=1) for role, value in default_parameters(inner, "float64").items()}
    return dyadic(*shape), parameters, dyadic(*spec.output(TensorSpec(shape)).shape, seed=2)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Conv2dSpec | WithRelu, tuple[int, ...]]:
    small = st.integers(1, 3)
    kernel, stride, dilation = (draw(st.tuples(small, small)) for _ in range(3))
    window = Window(kernel, stride, draw(st.tuples(*[st.integers(0, 3)] * 4)), dilation)
    edges = window.padding
    size = [max(0, window.extent[d] - edges[2 * d] - edges[2 * d + 1]) + draw(st.integers(0, 4)) for d in (0, 1)]
    groups = draw(small)
    spec = Conv2dSpec(groups * draw(small), groups * draw(st.sampled_from([1, 2, 8])), window, groups, draw(st.booleans()))
    return (WithRelu(spec) if draw(st.booleans()) else spec), (draw(st.integers(0, 3)), *size, spec.channels_in)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(cases(), st.sampled_from(PRECISIONS), st.integers(0, 7))
def test_any_geometry_equals_the_numpy_set(cuda_kernels, case_: tuple, precision: str, seed: int) -> None:
    x, parameters, dy = case(*case_)
    expected = reference(case_[0], x, parameters, dy)
    results = convolved(cuda_kernels(precision, seed), case_[0], x, parameters, dy)
    for name, values in expected.items():
        largest = np.abs(values).max(initial=1e-30)
        assert np.abs(results[name] - values).max(initial=0.0) <= ERRORS[precision] * largest, name


@pytest.mark.parametrize(("spec", "shape"), CASES[-3:])
def test_a_relu_is_undone_once_whichever_half_of_backward_comes_first(cuda_kernels, spec, shape) -> None:
    x, parameters, dy = case(spec, shape)
    common = {"parameters": parameters, "output_grad": dy, "dtype": "bfloat16"}
    first, other = (run(cuda_kernels("bfloat16"), spec, [x], input_first=first, **common).arrays() for first in (False, True))
    for name, values in first.items():
        np.testing.assert_array_equal(other[name], values, name)


def test_a_gradient_that_is_not_a_number_is_seen_after_a_relu(cuda_kernels) -> None:
    spec, shape = CASES[-3]
    x, parameters, dy = case(spec, shape)
    y = reference(spec, x, parameters, dy)["y"]
    dy[np.unravel_index(np.argmin(y), y.shape)] = np.nan  # where the ReLU passes nothing on
    assert y.min() == 0
    assert np.isnan(convolved(cuda_kernels("float32"), spec, x, parameters, dy)["bias"]).any()


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
@pytest.mark.parametrize("shape", NO_PIXELS)
def test_without_pixels_nothing_is_planned_and_gradients_are_zero(cuda_kernels, precision, shape) -> None:
    spec = Conv2dSpec(4, 6, Window((3, 3), (2, 1), SAME))
    kernels = cuda_kernels(precision)
    asked = record_plans(kernels)
    x, parameters, dy = case(spec, shape)
    results = convolved(kernels, spec, x, parameters, dy)
    assert asked == []
    assert results["y"].size == results["x"].size == 0
    assert not results["weight"].any()
    assert not results["bias"].any()


@pytest.mark.parametrize("bias", [True, False])
def test_the_plan_that_adds_a_bias_computes_the_relu_too(cuda_kernels, bias) -> None:
    spec, shape = WithRelu(Conv2dSpec(4, 6, Window((3, 3), (1, 1), SAME), bias=bias)), (2, 5, 5, 4)
    kernels = cuda_kernels("float32")
    asked = record_plans(kernels)
    made(kernels, spec, shape, training=False)
    assert [key.fused for key in asked] == ["bias_relu" if bias else ""]


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({"training": False}, {"forward"}),
        ({"input_gradient": False}, {"forward", "weight"}),
        ({}, {"forward", "weight", "input"}),
    ],
)
def test_plans_only_what_will_be_asked_for(cuda_kernels, options, kinds) -> None:
    """And each with the whole geometry, a fused bias only where it is added."""
    spec, shape = CASES[0]
    kernels = cuda_kernels("bfloat16")
    asked = record_plans(kernels)
    made(kernels, spec, shape, **options)
    assert Counter(key.kind for key in asked) == Counter(kinds)
    for key in asked:
        fused = "bias" if key.kind == "forward" else ""
        y = spec.output(TensorSpec(shape)).shape
        geometry = (spec.window.stride, spec.window.padding, spec.window.dilation, spec.groups)
        assert key == ConvolutionKey(key.kind, shape, spec.weight_shape, y, *geometry, "bfloat16", "bfloat16", fused)


def test_scratch_holds_the_largest_workspace_of_the_three_directions(cuda_kernels, monkeypatch) -> None:
    spec, shape = CASES[1]
    kernels = cuda_kernels("float32")
    plan, needs = kernels.runtime.device.convolution, {"forward": 1000, "weight": 70000, "input": 30000}

    def with_workspace(key: ConvolutionKey):
        convolution = plan(key)
        monkeypatch.setattr(convolution, "workspace_bytes", needs[key.kind])
        return convolution

    monkeypatch.setattr(kernels.runtime.device, "convolution", with_workspace)
    weight_bytes = 4 * int(np.prod(spec.weight_shape))
    assert made(kernels, spec, shape).scratch_bytes == sum(-(-size // 256) * 256 for size in (70000, weight_bytes))


def record_plans(kernels: CudaKernelSet) -> list[ConvolutionKey]:
    """The keys that the set's device is asked for from here on."""
    asked: list[ConvolutionKey] = []
    device = kernels.runtime.device
    plan = device.convolution
    device.convolution = lambda key: (asked.append(key), plan(key))[1]
    return asked


def patches(channels: int, kernel: tuple[int, int], stride: tuple[int, int] = (1, 1), **options: Any) -> Conv2dSpec:
    return Conv2dSpec(channels, 5, Window(kernel, stride, (1, 1, 1, 1), options.pop("dilation", (1, 1))), bias=False, **options)


@pytest.mark.parametrize(
    ("spec", "width", "precision", "options", "kind"),
    [
        (Conv2dSpec(3, 5, Window((1, 1), (1, 1), (0,) * 4), bias=False), 9, "bfloat16", {}, CudaPointwiseConv2d),
        (Conv2dSpec(3, 5, Window((1, 1), (1, 1), (0,) * 4), bias=False), 9, "float64", {"training": False}, CudaPointwiseConv2d),
        (Conv2dSpec(16, 5, Window((1, 1), (1, 1), (0,) * 4, (2, 2)), bias=False), 9, "tf32", {}, CudaPointwiseConv2d),
        (Conv2dSpec(16, 5, Window((1, 1), (1, 1), (0,) * 4)), 9, "bfloat16", {}, CudaConv2d),
        (WithRelu(Conv2dSpec(16, 5, Window((1, 1), (1, 1), (0,) * 4), bias=False)), 9, "bfloat16", {}, CudaConv2d),
        (Conv2dSpec(16, 4, Window((1, 1), (1, 1), (0,) * 4), 2, bias=False), 9, "bfloat16", {}, CudaConv2d),
        (Conv2dSpec(16, 5, Window((1, 1), (1, 2), (0,) * 4), bias=False), 9, "bfloat16", {}, CudaConv2d),
        (Conv2dSpec(16, 5, Window((1, 1), (1, 1), (0, 0, 0, 1)), bias=False), 9, "bfloat16", {}, CudaConv2d),
        (patches(7, (3, 3)), 9, "bfloat16", {"input_gradient": False}, CudaPatchConv2d),
        (patches(7, (3, 3)), 9, "bfloat16", {"training": False}, CudaPatchConv2d),
        (patches(7, (3, 3)), 9, "bfloat16", {}, CudaConv2d),
        (patches(8, (3, 3)), 9, "bfloat16", {"input_gradient": False}, CudaConv2d),
        (patches(3, (3, 3)), 9, "float32", {"input_gradient": False}, CudaPatchConv2d),
        (patches(4, (3, 3)), 9, "tf32", {"input_gradient": False}, CudaConv2d),
        (patches(1, (3, 3)), 9, "float64", {"input_gradient": False}, CudaPatchConv2d),
        (patches(2, (3, 3), dilation=(1, 2)), 9, "bfloat16", {"input_gradient": False}, CudaConv2d),
        (WithRelu(patches(2, (3, 3))), 9, "bfloat16", {"input_gradient": False}, CudaConv2d),
        (patches(2, (8, 128)), 130, "bfloat16", {"training": False}, CudaPatchConv2d),  # 256 packs
        (patches(1, (3, 683)), 700, "bfloat16", {"training": False}, CudaConv2d),  # 257 packs
        (patches(1, (3, 3)), (1 << 31) // 3, "bfloat16", {"training": False}, CudaPatchConv2d),
        (patches(1, (3, 3)), (1 << 31) // 3 + 1, "bfloat16", {"training": False}, CudaConv2d),
    ],
)
def test_convolutions_are_products_where_these_compute_them(
    cuda_kernels, monkeypatch, spec: Conv2dSpec | WithRelu, width: int, precision: str, options: dict[str, bool], kind: type
) -> None:
    """32 bits do not count rows of 2**31 elements under a window; the end of these would be read from before the image."""
    kernels = cuda_kernels(precision)
    monkeypatch.setattr(kernels.runtime.device, "convolution", lambda key: SimpleNamespace(workspace_bytes=0))
    channels = getattr(spec, "inner", spec).channels_in
    assert type(made(kernels, spec, (1, 9, width, channels), **options)) is kind


def compare_products(spec: Conv2dSpec, shape: tuple[int, ...], precision: str, seed: int, *, accumulate: bool = False) -> None:
    """All results, to the last bit: sums of these numbers are exact in float32, so that each result is rounded once."""
    kernels, (x, parameters, dy) = emulated_kernels(precision, seed), case(spec, shape)
    dtype, asked, start = kernels.runtime.dtype, record_plans(kernels), dyadic(*shape, seed=3)
    expected = reference(spec, x, parameters, dy)
    wanted = [CudaPointwiseConv2d.fits(spec)]
    bench = device_bench(kernels, spec, x, parameters, wanted=wanted, accumulate=accumulate)
    np.testing.assert_array_equal(bench.forward(), rounded(expected["y"], dtype))
    gradients = bench.backward(dy, [start])
    np.testing.assert_array_equal(gradients.parameters["weight"], expected["weight"])
    if wanted[0]:
        np.testing.assert_array_equal(gradients.inputs[0], rounded(expected["x"] + start * accumulate, dtype))
    assert asked == []


@st.composite
def products(draw: st.DrawFn) -> tuple[Conv2dSpec, tuple[int, ...]]:
    """Windows that leave the image on any side, or on all; images of all sizes that fit, and without pixels."""
    kernel, stride = draw(st.tuples(*[st.integers(1, 7)] * 2)), draw(st.tuples(*[st.integers(1, 4)] * 2))
    padding = draw(st.tuples(*[st.integers(0, 8)] * 4))
    least = [max(1, size - padding[2 * dim] - padding[2 * dim + 1]) for dim, size in enumerate(kernel)]
    height, width = (draw(st.just(0) | st.integers(size, size + 7)) for size in least)
    spec = Conv2dSpec(draw(st.integers(1, 3)), draw(st.integers(1, 9)), Window(kernel, stride, padding), bias=False)
    return spec, (draw(st.integers(0, 3)), height, width, spec.channels_in)


@pytest.mark.usefixtures("emulated_device")
@settings(max_examples=amount(30, 60))
@given(products(), st.sampled_from(["float64", "float32", "tf32", "bfloat16"]), st.integers(0, 3))
def test_any_patches_equal_the_numpy_set(case_: tuple[Conv2dSpec, tuple[int, ...]], precision: str, seed: int) -> None:
    spec, shape = case_
    if precision == "float64":  # in which a pack holds two elements
        spec, shape = replace(spec, channels_in=1), (*shape[:3], 1)
    compare_products(spec, shape, precision, seed)


@pytest.mark.usefixtures("emulated_device")
@settings(max_examples=30)
@given(
    st.integers(0, 3),
    st.tuples(*[st.integers(0, 5)] * 2),
    st.tuples(*[st.integers(1, 17)] * 2),
    st.sampled_from(["float64", "float32", "bfloat16"]),
    st.booleans(),
)
def test_any_pixels_equal_the_numpy_set(
    images: int, sides: tuple[int, int], channels: tuple[int, int], precision: str, accumulate: bool
) -> None:
    spec = Conv2dSpec(*channels, Window((1, 1), (1, 1), (0,) * 4), bias=False)
    compare_products(spec, (images, *sides, channels[0]), precision, 0, accumulate=accumulate)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_nan_reaches_the_windows_that_see_it_and_no_others(cuda_kernels, precision: str) -> None:
    """Rows of patches end with zeros, and not with the pixels below the window, whose product with zero would be NaN."""
    spec, shape = patches(3, (3, 3)), (1, 6, 6, 3)
    x, parameters, _ = case(spec, shape)
    x[0, 2, :2] = np.nan
    y = device_bench(cuda_kernels(precision), spec, x, parameters, wanted=[False]).forward()
    seen = np.zeros((6, 6), bool)
    seen[1:4, :3] = True
    np.testing.assert_array_equal(np.isnan(y), np.broadcast_to(seen[None, :, :, None], y.shape))


def test_patches_far_into_a_batch_are_found(cuda_kernels) -> None:
    """Two windows are read 2**32 elements after the start of x, of which only they are allocated."""
    kernels, far = cuda_kernels("float32"), 1 << 30
    x, out = (kernels.allocate(4 * count).view("float32") for count in (3 * 4, 2 * 8))
    kernels.arithmetic.from_host(x, np.arange(12, dtype=np.float32))
    begin = np.uint64(x.pointer - 4 * 4 * far)
    # height and width of x; two windows, one below the other, of 2 x 4 elements; the first is `far` rows below the first row
    sizes = (far + 3, 4, 2, 1, 1, 4, -far, 0, 2, 4)
    kernels.runtime.launch("patches", "patches_f32", (1,), (2, 4), begin, out, *map(np.int32, sizes), np.int64(2))
    np.testing.assert_array_equal(kernels.arithmetic.to_host(out), [*range(8), *range(4, 12)])


FIRST_OF_RESNETS = Conv2dSpec(3, 8, Window((7, 7), (2, 2), (3,) * 4), bias=False)


@pytest.mark.parametrize(
    ("spec", "shape", "precision"),
    [
        (FIRST_OF_RESNETS, (2, 17, 15, 3), "float32"),
        (FIRST_OF_RESNETS, (2, 17, 15, 3), "bfloat16"),
        # as many packs as threads, and windows wider than images
        (Conv2dSpec(2, 4, Window((8, 64), (1, 3), (7, 7, 60, 30)), bias=False), (1, 5, 9, 2), "float32"),
        (Conv2dSpec(2, 4, Window((8, 128), (1, 3), (7, 7, 100, 90)), bias=False), (1, 5, 9, 2), "bfloat16"),
        (Conv2dSpec(1, 2, Window((1, 1), (3, 1), (2, 0, 0, 5)), bias=False), (3, 40, 41, 1), "float32"),
    ],
)
def test_patches_of_more_rows_than_threads(
    emulated_device, monkeypatch: pytest.MonkeyPatch, spec: Conv2dSpec, shape: tuple[int, ...], precision: str
) -> None:
    monkeypatch.setattr("hpctrain.backend.cuda.conv2d._BLOCKS", 1)
    compare_products(spec, shape, precision, 5)


def linear_values(spec: LinearSpec) -> dict[str, np.ndarray]:
    """Weights that every dtype holds, and biases that bfloat16 does not hold."""
    roles = {"weight": dyadic(*spec.weight_shape, seed=3), "bias": dyadic(spec.features_out, seed=4) + 2.0**-12}
    return roles if spec.bias else {"weight": roles["weight"]}


def compare_linear(spec: LinearSpec, samples: int, precision: str, *, accumulate: bool = False, seed: int = 0) -> None:
    kernels = emulated_kernels(precision, seed)
    dtype, parameters = kernels.runtime.dtype, linear_values(spec)
    x, dy, start = (dyadic(samples, n, seed=i) for i, n in enumerate((spec.features_in, spec.features_out, spec.features_in)))
    expected = OperatorBench(NumpyKernelSet(), spec, [x], parameters=parameters, accumulate=accumulate)
    bench = device_bench(kernels, spec, x, parameters, accumulate=accumulate)
    assert_rounded(bench.forward(), expected.forward(), dtype)
    actual, gradients = bench.backward(dy, [start]), expected.backward(dy, [start])
    assert_rounded(actual.inputs[0], gradients.inputs[0], dtype)
    for role, gradient in actual.parameters.items():
        assert_rounded(gradient, gradients.parameters[role], "float32" if dtype == "bfloat16" else dtype)


@pytest.mark.usefixtures("emulated_device")
@settings(max_examples=amount(30, 60))
@given(
    samples=st.integers(0, 40),
    features_in=st.integers(1, 40),
    features_out=st.one_of(st.integers(1, 20), st.sampled_from([64, 257, 1000])),
    bias=st.booleans(),
    precision=st.sampled_from(PRECISIONS),
    accumulate=st.booleans(),
    seed=st.integers(0, 3),
)
def test_linear_layers_equal_numpy(
    samples: int, features_in: int, features_out: int, bias: bool, precision: str, accumulate: bool, seed: int
) -> None:
    compare_linear(LinearSpec(features_in, features_out, bias), samples, precision, accumulate=accumulate, seed=seed)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_more_rows_than_blocks(emulated_device, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    monkeypatch.setattr("hpctrain.backend.cuda.operator._WAVES", 1)
    compare_linear(LinearSpec(2, 300), 70, precision, seed=2)


def test_bfloat16_rounds_the_sum_with_the_bias_once(emulated_device) -> None:
    """1 + 2^-8 lies midway between two bfloat16 numbers: a bias of 2^-16 decides, unless the product was rounded before."""
    spec = LinearSpec(2, 8)
    parameters = {"weight": np.array([[1.0] * 8, [2.0**-8] * 8]), "bias": np.full(8, 2.0**-16)}
    bench = device_bench(emulated_kernels("bfloat16"), spec, np.ones((3, 2)), parameters, training=False)
    np.testing.assert_array_equal(bench.forward(), np.full((3, 8), 1 + 2.0**-7))


def test_sufficient_factors_are_as_the_ability_says(emulated_device) -> None:
    """x and dy stay what they are through both halves of backward."""
    spec, x, dy = LinearSpec(6, 8), dyadic(5, 6), dyadic(5, 8, seed=1)
    bench = device_bench(emulated_kernels("float32"), spec, x, linear_values(spec))
    assert isinstance(bench.operator, SufficientFactors)
    assert bench.operator.needs_inputs == (True,)
    bench.forward()
    gradients = bench.backward(dy).parameters
    kept, errors = read(bench.operator.buffers.inputs[0]), read(bench.operator.output_grad)
    np.testing.assert_array_equal(kept.T @ errors, gradients["weight"])
    np.testing.assert_array_equal(errors.sum(axis=0), gradients["bias"])


def _host(
    logits: np.ndarray, labels: np.ndarray, spec: SoftmaxCrossEntropySpec, global_count: int, class_scale: float | None = None
) -> tuple[LossSums, np.ndarray]:
    """The NumPy set's, in float64."""
    d_logits = np.full(logits.shape, np.nan)
    loss = NumpyKernelSet().make_loss(spec)
    return loss.run(logits.astype(np.float64), labels, global_count, d_logits, class_scale).result(), d_logits


def _device(
    kernels: CudaKernelSet,
    logits: np.ndarray,
    labels: np.ndarray,
    dtype: str,
    spec: SoftmaxCrossEntropySpec = SoftmaxCrossEntropySpec(),  # noqa: B008  it is frozen
    global_count: int = 7,
    class_scale: float | None = None,
) -> tuple[LossSums, np.ndarray]:
    arithmetic = kernels.arithmetic
    x, dx = (arithmetic.zeros(logits.size, dtype).reshape(logits.shape) for _ in range(2))
    arithmetic.from_host(x, logits)
    arithmetic.fill(dx, np.nan)
    sums = kernels.make_loss(spec).run(x, labels, global_count, dx, class_scale)
    return sums.result(), arithmetic.to_host(dx)


def _sample(count: int, classes: int, dtype: str, scale: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(classes)
    return rounded(random.standard_normal((count, classes)) * scale, dtype), random.integers(0, classes, count)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "classes", "smoothing"),
    [*((5, classes, smoothing) for classes in (2, 10, 129, 1000) for smoothing in (0.0, 0.1)), (2, 21843, 0.1), (600, 7, 0.0)],
)
def test_losses_equal_the_numpy_sets(
    cuda_kernels: CudaKernelsFactory, count: int, classes: int, smoothing: float, dtype: str, weighted: bool
) -> None:
    logits, labels = _sample(count, classes, dtype)
    weights, scale = (tuple(np.linspace(0.2, 3.0, classes).tolist()), 0.7) if weighted else ((), None)
    spec = SoftmaxCrossEntropySpec(smoothing, weights)
    expected, gradient = _host(logits, labels, spec, 7, scale)
    bits = set()
    for seed in range(3):
        sums, d_logits = _device(cuda_kernels(seed=seed), logits, labels, dtype, spec, class_scale=scale)
        assert sums.loss == pytest.approx(expected.loss, rel=ERRORS["float64" if dtype == "float64" else "float32"])
        assert (sums.top1, sums.top5, sums.count) == (expected.top1, expected.top5, count)
        np.testing.assert_allclose(d_logits, gradient, rtol=0, atol=ERRORS[dtype] * np.abs(gradient).max())
        bits.add((sums.loss, d_logits.tobytes()))
    assert len(bits) == 1


def test_a_gradient_keeps_its_digits_where_the_model_is_sure(cuda_kernels: CudaKernelsFactory) -> None:
    """1 - p of p near 1 loses all digits of float32; loss and gradient do not."""
    logits, labels = np.zeros((3, 10), np.float32), np.array([2, 0, 9])
    logits[np.arange(3), labels] = 18.0
    expected, gradient = _host(logits, labels, SoftmaxCrossEntropySpec(), 3)
    sums, d_logits = _device(cuda_kernels(), logits, labels, "float32", SoftmaxCrossEntropySpec(), 3)
    assert expected.loss < 1e-6
    assert sums.loss == pytest.approx(expected.loss, rel=1e-6)
    np.testing.assert_allclose(d_logits, gradient, rtol=1e-5)


@pytest.mark.parametrize("scale", [1e4, 1e30, 3e38])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_extreme_logits_stay_finite(cuda_kernels: CudaKernelsFactory, dtype: str, scale: float) -> None:
    logits, labels = rounded(np.array([[1.0, -1.0, 0.0], [0.0, 1.0, -1.0]]) * scale, dtype), np.array([0, 2])
    for smoothing in (0.0, 0.1):
        expected, gradient = _host(logits, labels, SoftmaxCrossEntropySpec(smoothing), 2)
        sums, d_logits = _device(cuda_kernels(), logits, labels, dtype, SoftmaxCrossEntropySpec(smoothing), 2)
        assert sums.loss == pytest.approx(expected.loss, rel=1e-6)
        np.testing.assert_allclose(d_logits, gradient, atol=ERRORS[dtype] * np.abs(gradient).max())


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_are_ranked_by_index(cuda_kernels: CudaKernelsFactory, dtype: str) -> None:
    """Few values, so that most logits are equal to others."""
    random = np.random.default_rng(0)
    logits, labels = random.integers(0, 3, (60, 9)).astype(np.float64), random.integers(0, 9, 60)
    logits[0] = 0.0
    labels[0] = 4
    expected, _ = _host(logits, labels, SoftmaxCrossEntropySpec(), 60)
    assert 0 < expected.top1 < expected.top5 < 60
    for seed in range(3):
        sums, _ = _device(cuda_kernels(seed=seed), logits, labels, dtype)
        assert (sums.top1, sums.top5) == (expected.top1, expected.top5)


@pytest.mark.parametrize("classes", [3, 9, 300])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_as_in_the_numpy_set(cuda_kernels: CudaKernelsFactory, wrong: float, classes: int) -> None:
    for place in (0, 2, classes - 1):
        logits, labels = np.zeros((2, classes), np.float32), np.array([0, 0])
        logits[1, place] = wrong
        with np.errstate(all="ignore"):
            expected, gradient = _host(logits, labels, SoftmaxCrossEntropySpec(), 2)
        sums, d_logits = _device(cuda_kernels(), logits, labels, "float32", SoftmaxCrossEntropySpec(), 2)
        assert (sums.top1, sums.top5, sums.count) == (expected.top1, expected.top5, 2)
        np.testing.assert_allclose([sums.loss], [expected.loss], rtol=1e-6)
        np.testing.assert_allclose(d_logits, gradient, rtol=1e-6)


def test_a_loss_without_samples(cuda_kernels: CudaKernelsFactory) -> None:
    sums, d_logits = _device(cuda_kernels(), np.zeros((0, 9)), np.zeros(0, np.int64), "float32", global_count=0)
    assert sums == LossSums(0.0, 0, 0, 0)
    assert d_logits.shape == (0, 9)


@pytest.mark.parametrize("seed", range(4))
def test_two_batches_may_be_on_their_way(cuda_kernels: CudaKernelsFactory, seed: int) -> None:
    kernels = cuda_kernels(seed=seed)
    loss = kernels.make_loss(SoftmaxCrossEntropySpec())
    logits = kernels.arithmetic.zeros(20, "float32").reshape(4, 5)
    waiting, expected = [], []
    for step in range(4):
        values, labels = np.random.default_rng(step).standard_normal((4, 5)).astype(np.float32), np.full(4, step)
        count = 4 - step % 2
        kernels.arithmetic.from_host(logits, values)
        waiting.append(loss.run(logits[:count], labels[:count], 4, None))
        labels[...] = -1
        expected.append(_host(values[:count], np.full(count, step), SoftmaxCrossEntropySpec(), 4)[0])
        if len(waiting) == 2:
            for sums, reference in zip(waiting, expected, strict=True):
                arrived = sums.result()
                assert (arrived.top1, arrived.top5, arrived.count) == (reference.top1, reference.top5, reference.count)
                assert arrived.loss == pytest.approx(reference.loss, rel=1e-6)
            waiting, expected = [], []
