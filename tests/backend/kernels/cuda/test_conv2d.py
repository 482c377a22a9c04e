"""Convolutions of the cuda set against the NumPy set in float64, in every direction and dtype; which plans they ask for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.backend.cuda.device import ConvolutionKey
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.cuda.emulator.memory import on_host
from hpctrain.backend.cuda.emulator.rounding import read, write
from hpctrain.backend.kernels.abilities import Accumulating
from hpctrain.backend.kernels.base import Buffers, StepContext
from hpctrain.backend.kernels.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.kernels.fused_specs import WithRelu
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import Conv2dSpec, TensorSpec, Window
from hpctrain.testing.operators import OperatorBench, default_parameters

#: of float64 NumPy, relative to the largest element: bfloat16 rounds once, the weight's gradient from float32 sums
ERRORS = {"float64": 1e-10, "float32": 1e-5, "tf32": 1e-5, "bfloat16": 2.0**-8}
SAME = (1, 1, 1, 1)

CASES = [
    (Conv2dSpec(4, 6, Window((5, 3), (2, 3), (1, 2, 0, 1), (1, 2)), groups=2), (2, 7, 9, 4)),
    (Conv2dSpec(8, 16, Window((3, 3), (1, 1), SAME), bias=False), (2, 6, 5, 8)),
    (Conv2dSpec(3, 8, Window((3, 3), (2, 2), (0, 1, 0, 1))), (1, 7, 9, 3)),
    (Conv2dSpec(6, 6, Window((3, 3), (1, 1), SAME), groups=6), (1, 4, 5, 6)),
    (Conv2dSpec(3, 4, Window((1, 1), (2, 3), (0, 0, 0, 0)), bias=False), (2, 5, 7, 3)),
    (Conv2dSpec(5, 48, Window((1, 1), (1, 1), (0, 0, 0, 0))), (4, 16, 17, 5)),
    (WithRelu(Conv2dSpec(4, 16, Window((3, 3), (1, 1), SAME))), (2, 6, 5, 4)),
    (WithRelu(Conv2dSpec(3, 5, Window((3, 2), (2, 1), SAME))), (2, 7, 5, 3)),
    (WithRelu(Conv2dSpec(4, 8, Window((3, 3), (1, 1), SAME), bias=False)), (2, 6, 5, 4)),
]
NO_PIXELS = [(0, 7, 9, 4), (3, 0, 9, 4), (3, 7, 0, 4)]


@dataclass
class Bench:
    """A convolution of the cuda set with all its buffers, whose scratch and results hold NaN before each call."""

    kernels: CudaKernelSet
    spec: Conv2dSpec | WithRelu
    x: np.ndarray
    parameters: dict[str, np.ndarray]
    training: bool = True
    input_gradient: bool = True
    offset: int = 0  # of parameters and their gradients, in elements
    input_first: bool = False  # backward begins with the input's gradient

    def __post_init__(self) -> None:
        runtime = self.kernels.runtime
        x = TensorSpec(self.x.shape, runtime.dtype)
        self.operator = self.kernels.make(self.spec, (x,), training=self.training, input_gradient=self.input_gradient)
        self.x_array = self.array(x.shape, runtime.dtype, self.x)
        self.y, self.dy = (self.array(self.operator.output.shape, runtime.dtype) for _ in range(2))
        self.dx = self.array(x.shape, runtime.dtype) if self.input_gradient else None
        parameters = {role: self.parameter(value, runtime.parameter_dtype) for role, value in self.parameters.items()}
        shadows = {role: self.parameter(value, "bfloat16") for role, value in self.parameters.items()}
        nothing = {role: np.full_like(value, np.nan) for role, value in self.parameters.items()}
        self.gradients = {role: self.parameter(value, runtime.parameter_dtype) for role, value in nothing.items()}
        self.scratch = self.kernels.allocate(self.operator.scratch_bytes)
        self.operator.bind(
            Buffers(
                inputs=(self.x_array,),
                output=self.y,
                input_grads=(self.dx,) if self.training else (),
                output_grad=self.dy if self.training else None,
                parameters=parameters,
                gradients=self.gradients if self.training else {},
                shadows=shadows if runtime.dtype == "bfloat16" else {},
                scratch=self.scratch,
            )
        )

    def array(self, shape: tuple[int, ...], dtype: str, values: np.ndarray | None = None) -> DeviceArray:
        size = int(np.prod(shape)) * {"float64": 8, "float32": 4, "bfloat16": 2}[dtype]
        array = self.kernels.allocate(size).view(dtype).reshape(shape)
        write(array, np.full(shape, np.nan) if values is None else values)
        return array

    def parameter(self, values: np.ndarray, dtype: str) -> DeviceArray:
        array = self.array((self.offset + values.size,), dtype)[self.offset :].reshape(values.shape)
        write(array, values)
        return array

    def poison(self) -> None:
        on_host(self.scratch)[...] = 0xFF

    def run(self, dy: np.ndarray) -> dict[str, np.ndarray]:
        """y, and the gradients of all."""
        self.poison()
        self.operator.forward(StepContext())
        results = {"y": read(self.y).copy()}
        if self.training:
            write(self.dy, dy)
            halves = [self.operator.backward_parameters, self.operator.backward_input]
            for k, half in enumerate(reversed(halves) if self.input_first else halves):
                self.poison()
                if k or not self.operator.needs_output:  # read in the first half alone
                    write(self.y, np.full(self.y.shape, np.nan))
                half()
            results |= {role: read(gradient).copy() for role, gradient in self.gradients.items()}
            results |= {} if self.dx is None else {"x": read(self.dx).copy()}
        return results


def bfloat16_values(*shape: int, seed: int = 0) -> np.ndarray:
    """Numbers that every dtype holds exactly."""
    return (np.random.default_rng(seed).integers(-63, 64, shape) / 32).astype(np.float64)


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
    parameters = {role: bfloat16_values(*value.shape, seed=1) for role, value in default_parameters(inner, "float64").items()}
    return bfloat16_values(*shape), parameters, bfloat16_values(*spec.output(TensorSpec(shape)).shape, seed=2)


@pytest.mark.parametrize("precision", ["float64", "float32", "tf32", "bfloat16"])
@pytest.mark.parametrize(("spec", "shape"), CASES)
def test_equals_the_numpy_set(cuda_kernels, precision, spec, shape) -> None:
    x, parameters, dy = case(spec, shape)
    expected = reference(spec, x, parameters, dy)
    for seed in (0, 1, 7):
        results = Bench(cuda_kernels(precision, seed), spec, x, parameters).run(dy)
        assert results.keys() == expected.keys()
        for name, values in expected.items():
            error = np.abs(results[name] - values).max() / np.abs(values).max()
            assert error < ERRORS[precision], f"{name} of {spec} with seed {seed}: {error}"


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
@given(cases(), st.integers(0, 3), st.sampled_from(["float64", "bfloat16"]))
def test_any_geometry_equals_the_numpy_set(cuda_kernels, case_: tuple, offset: int, precision: str) -> None:
    x, parameters, dy = case(*case_)
    expected = reference(case_[0], x, parameters, dy)
    results = Bench(cuda_kernels(precision, 3), case_[0], x, parameters, offset=offset).run(dy)
    for name, values in expected.items():
        largest = np.abs(values).max(initial=1e-30)
        assert np.abs(results[name] - values).max(initial=0.0) <= ERRORS[precision] * largest, name


@pytest.mark.parametrize(("spec", "shape"), CASES[-3:])
def test_a_relu_is_undone_once_whichever_half_of_backward_comes_first(cuda_kernels, spec, shape) -> None:
    x, parameters, dy = case(spec, shape)
    results = [Bench(cuda_kernels("bfloat16"), spec, x, parameters, input_first=first).run(dy) for first in (False, True)]
    for name, values in results[0].items():
        np.testing.assert_array_equal(results[1][name], values, name)


def test_a_gradient_that_is_not_a_number_is_seen_behind_a_relu(cuda_kernels) -> None:
    spec, shape = CASES[-3]
    x, parameters, dy = case(spec, shape)
    y = reference(spec, x, parameters, dy)["y"]
    dy[np.unravel_index(np.argmin(y), y.shape)] = np.nan  # where the ReLU passes nothing on
    assert y.min() == 0
    assert np.isnan(Bench(cuda_kernels("float32"), spec, x, parameters).run(dy)["bias"]).any()


@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("offset", [1, 2, 7])
def test_parameters_may_begin_anywhere_in_their_group(cuda_kernels, precision, offset) -> None:
    """The emulated device refuses what no plan could read; results do not depend on it."""
    spec, shape = CASES[0]
    x, parameters, dy = case(spec, shape)
    expected, results = (Bench(cuda_kernels(precision), spec, x, parameters, offset=at).run(dy) for at in (0, offset))
    for name, values in expected.items():
        np.testing.assert_array_equal(results[name], values, name)


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
@pytest.mark.parametrize("shape", NO_PIXELS)
def test_without_pixels_nothing_is_planned_and_gradients_are_zero(cuda_kernels, precision, shape) -> None:
    spec = Conv2dSpec(4, 6, Window((3, 3), (2, 1), SAME))
    kernels = cuda_kernels(precision)
    asked = record_plans(kernels)
    x, parameters, dy = case(spec, shape)
    results = Bench(kernels, spec, x, parameters).run(dy)
    assert asked == []
    assert results["y"].size == results["x"].size == 0
    assert not results["weight"].any()
    assert not results["bias"].any()


@pytest.mark.parametrize("bias", [True, False])
def test_the_plan_that_adds_a_bias_computes_the_relu_too(cuda_kernels, bias) -> None:
    spec, shape = WithRelu(Conv2dSpec(4, 6, Window((3, 3), (1, 1), SAME), bias=bias)), (2, 5, 5, 4)
    kernels = cuda_kernels("float32")
    asked = record_plans(kernels)
    x, parameters, _ = case(spec, shape)
    Bench(kernels, spec, x, parameters, training=False).run(np.zeros(0))
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
    x, parameters, dy = case(spec, shape)
    kernels = cuda_kernels("bfloat16")
    asked = record_plans(kernels)
    Bench(kernels, spec, x, parameters, **options).run(dy)
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
    x, parameters, dy = case(spec, shape)
    bench = Bench(kernels, spec, x, parameters)
    weight_bytes = 4 * int(np.prod(spec.weight_shape))
    assert bench.operator.scratch_bytes == sum(-(-size // 256) * 256 for size in (70000, weight_bytes))
    bench.run(dy)


def test_the_bias_gradient_of_many_rows_is_the_same_in_any_order_of_blocks(cuda_kernels) -> None:
    spec, shape = Conv2dSpec(1, 24, Window((1, 1), (1, 1), (0, 0, 0, 0))), (3, 61, 67, 1)
    x, parameters, dy = case(spec, shape)
    dy = np.random.default_rng(0).standard_normal(dy.shape)
    results = [Bench(cuda_kernels("float32", seed), spec, x, parameters).run(dy)["bias"] for seed in (0, 1, 5)]
    assert all(np.array_equal(results[0], other) for other in results[1:])
    np.testing.assert_allclose(results[0], dy.sum(axis=(0, 1, 2)), rtol=1e-5, atol=1e-4)


def test_leaves_the_addition_of_gradients_to_the_plan(cuda_kernels) -> None:
    """Its plans write: scratch for a sum would be as large as x in every convolution, whether it adds or not."""
    operator = cuda_kernels("float32").make(CASES[1][0], (TensorSpec(CASES[1][1]),), training=True)
    assert not isinstance(operator, Accumulating)


def test_a_weight_without_its_shadow_is_refused_at_bind(cuda_kernels) -> None:
    spec, shape = CASES[1]
    kernels = cuda_kernels("bfloat16")
    operator = kernels.make(spec, (TensorSpec(shape, "bfloat16"),), training=False)
    weight = kernels.allocate(4 * int(np.prod(spec.weight_shape))).view("float32")
    with pytest.raises(AssertionError, match="the weight of a convolution in bfloat16 is float32"):
        operator.bind(Buffers((), None, parameters={"weight": weight}, scratch=kernels.allocate(operator.scratch_bytes)))


def record_plans(kernels: CudaKernelSet) -> list[ConvolutionKey]:
    """The keys that the set's device is asked for from here on."""
    asked: list[ConvolutionKey] = []
    device = kernels.runtime.device
    plan = device.convolution
    device.convolution = lambda key: (asked.append(key), plan(key))[1]
    return asked
