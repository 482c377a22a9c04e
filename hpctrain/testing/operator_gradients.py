"""Numerical gradient check of one operator, in float64: central differences against analytic vector-Jacobian products."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hpctrain.backend.operators import KernelSet, LocalStatistics, StatisticsMerger, StepContext
from hpctrain.backend.specs import Spec
from hpctrain.testing.operators import OperatorBench, default_parameters


def numerical_gradient(
    function: Callable[[], np.ndarray], variable: np.ndarray, cotangent: np.ndarray, *, step: float = 1e-5
) -> np.ndarray:
    """d <function(), cotangent> / d variable for every element, by central differences: the whole Jacobian is exercised.

    Args:
        function: reads `variable` (float64), which is changed in place and restored.
        cotangent: of the function's shape.
        step: the error is of order step**2 and 1e-16 / step.
    """
    assert variable.dtype == np.float64, "central differences need float64"
    gradient = np.zeros_like(variable)
    for index in np.ndindex(variable.shape):
        value = variable[index]
        variable[index] = value + step
        above = np.vdot(function(), cotangent)
        variable[index] = value - step
        below = np.vdot(function(), cotangent)
        variable[index] = value
        gradient[index] = (above - below) / (2 * step)
    return gradient


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float, what: str) -> None:
    """Equal shapes, and the largest difference within `tolerance` of the largest expected value (or of 1).

    Raises:
        AssertionError: with the name, the difference and where it is.
    """
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    if expected.size == 0:
        return
    difference = np.abs(actual - expected)
    worst = np.unravel_index(int(np.argmax(np.nan_to_num(difference, nan=np.inf))), difference.shape)
    limit = tolerance * max(1.0, float(np.abs(expected).max()))
    assert difference[worst] <= limit, (
        f"{what}: {actual[worst]} at {tuple(map(int, worst))}, expected {expected[worst]}; "
        f"the difference {difference[worst]:.3g} is above {limit:.3g}"
    )


def check_gradient(
    kernels: KernelSet,
    spec: Spec,
    inputs: Sequence[np.ndarray],
    *,
    parameters: Mapping[str, np.ndarray] | None = None,
    context: StepContext | None = None,
    accumulate: bool = False,
    in_place: bool = False,
    merger: StatisticsMerger | None = None,
    tolerance: float = 1e-7,
    step: float = 1e-5,
) -> None:
    """Check every gradient of a training operator, of inputs and parameters, against central differences.

    Inputs and parameters are float64, and are changed in place and restored. `step` must not carry an input over a kink (ReLU
    at 0, ties of a maximum): keep inputs that far apart.

    Raises:
        AssertionError: a gradient that is further off than `tolerance`, relative to the largest element.
    """
    parameters = default_parameters(spec, "float64") if parameters is None else parameters
    bench = OperatorBench(
        kernels, spec, inputs, parameters=parameters, accumulate=accumulate, in_place=in_place, merger=merger or LocalStatistics()
    )
    random = np.random.default_rng(1)
    output = bench.forward(context)
    cotangent = random.standard_normal(output.shape)
    start = [random.standard_normal(x.shape) for x in inputs]
    analytic = bench.backward(cotangent, start)

    def run() -> np.ndarray:
        return bench.forward(context)

    for i, x in enumerate(inputs):
        grad = analytic.inputs[i]
        assert grad is not None
        expected = numerical_gradient(run, x, cotangent, step=step)
        assert_close(grad - start[i] if accumulate else grad, expected, tolerance, f"gradient of input {i}")
    for role, value in parameters.items():
        expected = numerical_gradient(run, value, cotangent, step=step)
        assert_close(analytic.parameters[role], expected, tolerance, f"gradient of {role}")
