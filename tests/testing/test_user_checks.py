"""What hpctrain.testing offers to users: checks of gradients, copies to a kernel set's memory, and what a model declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import KernelSet, Operator, StepContext
from hpctrain.backend.specs import Spec, TensorSpec
from hpctrain.models import catalogue
from hpctrain.nn import initialise
from hpctrain.nn.custom import ArrayLayer, ArraySpec
from hpctrain.nn.network import Network
from hpctrain.nn.parameter import ParameterSpec
from hpctrain.testing.layers import check_gradients, exported_shapes, parameter_count
from hpctrain.testing.operators import assert_close, check_gradient, empty, numerical_gradient, poison, put, take
from tests.support import network_state
from tests.support.emulated import CudaKernelsFactory


class Scale(ArrayLayer):
    """y = weight * x^2 per channel, with gradients that are off by the given factors."""

    def __init__(self, channels: int, *, input_error: float = 1.0, weight_error: float = 1.0) -> None:
        self._channels, self._input_error, self._weight_error = channels, input_error, weight_error

    def parameters(self) -> Mapping[str, ParameterSpec]:
        return {"weight": ParameterSpec((self._channels,), initialise.constant(1.0))}

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def forward(
        self, x: np.ndarray, parameters: Mapping[str, np.ndarray], context: StepContext, saved: dict[str, Any]
    ) -> np.ndarray:
        return parameters["weight"] * x**2

    def backward(
        self, x: np.ndarray, dy: np.ndarray, parameters: Mapping[str, np.ndarray], saved: dict[str, Any]
    ) -> tuple[np.ndarray, Mapping[str, np.ndarray]]:
        dx = 2.0 * self._input_error * parameters["weight"] * x * dy
        return dx, {"weight": self._weight_error * (dy * x**2).sum((0, 1, 2))}


def test_a_wrong_gradient_is_found_and_named() -> None:
    check_gradients(Scale(3), (5, 7, 3))
    with pytest.raises(AssertionError, match="gradient of input"):
        check_gradients(Scale(3, input_error=1.0001), (5, 7, 3))
    with pytest.raises(AssertionError, match=r"gradient of layer\.weight"):
        check_gradients(Scale(3, weight_error=1.0001), (5, 7, 3))


class Kernels(NumpyKernelSet):
    """Layers of our own too, of which no kernel set knows."""

    def make(self, spec: Spec, inputs: tuple[TensorSpec, ...], *, training: bool) -> Operator:
        assert isinstance(spec, ArraySpec)
        return spec.operator(inputs, training=training)


def test_a_wrong_gradient_is_found_and_a_right_one_passes() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 1))
    weight = {"weight": np.array([0.5])}
    check_gradient(Kernels(), Scale(1).spec("scale"), [x], parameters=weight)
    with pytest.raises(AssertionError, match="gradient of input 0"):
        check_gradient(Kernels(), Scale(1, input_error=1.0001).spec("scale"), [x], parameters=weight)


def test_the_numerical_gradient_of_a_linear_map_is_its_transpose_and_leaves_the_variable_alone() -> None:
    random = np.random.default_rng(1)
    matrix, x, cotangent = random.standard_normal((7, 5)), random.standard_normal(5), random.standard_normal(7)
    kept = x.copy()
    np.testing.assert_allclose(numerical_gradient(lambda: matrix @ x, x, cotangent), matrix.T @ cotangent, atol=1e-9)
    assert np.array_equal(x, kept)


@pytest.mark.parametrize("wrong", [np.nan, 2.0])
def test_the_worst_element_is_named(wrong: float) -> None:
    expected = np.ones((3, 4))
    actual = expected.copy()
    actual[1, 2] = wrong
    with pytest.raises(AssertionError, match=r"it: .* at \(1, 2\)"):
        assert_close(actual, expected, 1e-3, "it")


def check(kernels: KernelSet, dtype: str, rounding: float) -> None:
    values = np.random.default_rng(0).standard_normal((3, 5, 7))
    array = empty(kernels, (3, 5, 7), dtype)
    assert np.isnan(take(kernels, array)).all()
    put(kernels, array, values)
    copy = take(kernels, array)
    np.testing.assert_allclose(copy, values, rtol=rounding)
    poison(kernels, array)
    assert np.isnan(take(kernels, array)).all()
    assert np.isfinite(copy).all()


@pytest.mark.parametrize(("dtype", "rounding"), [("float64", 0.0), ("float32", 1e-7), ("bfloat16", 2.0**-8)])
def test_arrays_of_the_host_and_of_a_device(cuda_kernels: CudaKernelsFactory, dtype: str, rounding: float) -> None:
    if dtype == "float32":
        check(NumpyKernelSet(), dtype, rounding)
    check(cuda_kernels(dtype), dtype, rounding)
    for kernels in (NumpyKernelSet(), cuda_kernels()):
        array = empty(kernels, (0, 7), "float64")
        put(kernels, array, np.zeros((0, 7)))
        assert take(kernels, array).shape == (0, 7)


@pytest.mark.parametrize(("name", "pixels", "options"), [("small", 9, {"hidden": 4}), ("resnet20", 8, {"width": 0.25})])
def test_declarations_are_those_of_the_network(name: str, pixels: int, options: dict[str, object]) -> None:
    model = catalogue.build(name, options)
    channels = catalogue.image_shape(name)[2]
    network = Network(model, (pixels, pixels, channels), NumpyKernelSet())
    assert parameter_count(model) == sum(parameter.data.size for parameter in network.parameters.values())
    exported = {
        key: array.shape for key, array in network_state.export(network).items() if not key.endswith("num_batches_tracked")
    }
    assert exported_shapes(model) == exported
