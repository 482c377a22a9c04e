"""Linear: central differences, both dtypes, no samples."""

import numpy as np
import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import LinearSpec
from hpctrain.testing.operator_gradients import assert_close, check_gradient
from hpctrain.testing.operators import OperatorBench, default_parameters

KERNELS = NumpyKernelSet()


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_gradient(bias: bool, accumulate: bool) -> None:
    x = np.random.default_rng(0).standard_normal((3, 7))
    check_gradient(KERNELS, LinearSpec(7, 5, bias), [x], accumulate=accumulate)


@pytest.mark.parametrize("accumulate", [False, True])
def test_equals_the_products(accumulate: bool) -> None:
    """Large enough for several blocks of the accumulated input gradient."""
    spec = LinearSpec(9000, 11)
    random = np.random.default_rng(0)
    x, dy, start = random.standard_normal((37, 9000)), random.standard_normal((37, 11)), random.standard_normal((37, 9000))
    parameters = default_parameters(spec, "float64")
    bench = OperatorBench(KERNELS, spec, [x], parameters=parameters, accumulate=accumulate)
    assert_close(bench.forward(), x @ parameters["weight"] + parameters["bias"], 1e-12, "output")
    grads = bench.backward(dy, [start])
    assert_close(grads.inputs[0], dy @ parameters["weight"].T + (start if accumulate else 0), 1e-12, "input")
    assert_close(grads.parameters["weight"], x.T @ dy, 1e-12, "weight")
    assert_close(grads.parameters["bias"], dy.sum(axis=0), 1e-12, "bias")


def test_without_samples_gradients_are_zero() -> None:
    spec = LinearSpec(7, 5)
    bench = OperatorBench(KERNELS, spec, [np.zeros((0, 7))], parameters=default_parameters(spec, "float64"))
    assert bench.forward().shape == (0, 5)
    grads = bench.backward(np.zeros((0, 5)))
    assert grads.inputs[0].shape == (0, 7)
    assert not grads.parameters["weight"].any()
    assert not grads.parameters["bias"].any()


def test_float32_is_near_float64() -> None:
    spec = LinearSpec(225, 9)
    x = np.random.default_rng(0).standard_normal((7, 225))
    parameters = default_parameters(spec, "float64")
    double = OperatorBench(KERNELS, spec, [x], parameters=parameters).forward()
    single_parameters = {role: value.astype("float32") for role, value in parameters.items()}
    single = OperatorBench(KERNELS, spec, [x.astype("float32")], parameters=single_parameters).forward()
    assert single.dtype == np.float32
    assert_close(single, double, 1e-5, "float32")
