from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from hpctrain.backend.kernels.base import StepContext
from hpctrain.nn import initialise
from hpctrain.nn.custom import ArrayLayer
from hpctrain.nn.parameter import ParameterSpec
from hpctrain.testing.layer_gradients import check_gradients


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


def test_right_gradients_pass() -> None:
    check_gradients(Scale(3), (5, 7, 3))


def test_a_wrong_gradient_is_found_and_named() -> None:
    with pytest.raises(AssertionError, match="gradient of input"):
        check_gradients(Scale(3, input_error=1.0001), (5, 7, 3))
    with pytest.raises(AssertionError, match=r"gradient of layer\.weight"):
        check_gradients(Scale(3, weight_error=1.0001), (5, 7, 3))
