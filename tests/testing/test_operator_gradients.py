"""The gradient check of one operator finds what it should."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from hpctrain.backend.kernels.base import Operator, StepContext
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import Spec, TensorSpec
from hpctrain.nn.custom import ArrayLayer, ArraySpec
from hpctrain.testing.operator_gradients import assert_close, check_gradient, numerical_gradient


class Cube(ArrayLayer):
    """y = x^3, with a gradient that is off by the given factor."""

    def __init__(self, error: float = 1.0) -> None:
        self._error = error

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def forward(
        self, x: np.ndarray, parameters: Mapping[str, np.ndarray], context: StepContext, saved: dict[str, Any]
    ) -> np.ndarray:
        return x**3

    def backward(
        self, x: np.ndarray, dy: np.ndarray, parameters: Mapping[str, np.ndarray], saved: dict[str, Any]
    ) -> tuple[np.ndarray, Mapping[str, np.ndarray]]:
        return 3.0 * self._error * x**2 * dy, {}


class Kernels(NumpyKernelSet):
    """Layers of our own too, of which no kernel set knows."""

    def make(self, spec: Spec, inputs: tuple[TensorSpec, ...], *, training: bool) -> Operator:
        assert isinstance(spec, ArraySpec)
        return spec.operator(inputs, training=training)


def test_a_wrong_gradient_is_found_and_a_right_one_passes() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 1))
    check_gradient(Kernels(), Cube().spec("cube"), [x])
    with pytest.raises(AssertionError, match="gradient of input 0"):
        check_gradient(Kernels(), Cube(1.0001).spec("cube"), [x])


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
