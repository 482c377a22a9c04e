"""Linear of the cuda set against the NumPy set in float64, in every direction and dtype."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.backend.cuda.emulator.rounding import read
from hpctrain.backend.kernels.abilities import SufficientFactors
from hpctrain.backend.kernels.base import Buffers
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import LinearSpec, TensorSpec
from hpctrain.testing.operators import OperatorBench
from tests.support.rounded import assert_rounded, assert_same_bits, device_bench, dyadic, emulated_kernels

PRECISIONS = ["float64", "float32", "tf32", "bfloat16"]


def values(spec: LinearSpec) -> dict[str, np.ndarray]:
    """Weights that every dtype holds, and biases that bfloat16 does not hold."""
    roles = {"weight": dyadic(*spec.weight_shape, seed=3), "bias": dyadic(spec.features_out, seed=4) + 2.0**-12}
    return roles if spec.bias else {"weight": roles["weight"]}


def compare(spec: LinearSpec, samples: int, precision: str, *, accumulate: bool = False, seed: int = 0) -> None:
    kernels = emulated_kernels(precision, seed)
    dtype, parameters = kernels.runtime.dtype, values(spec)
    x, dy, start = (dyadic(samples, n, seed=i) for i, n in enumerate((spec.features_in, spec.features_out, spec.features_in)))
    expected = OperatorBench(NumpyKernelSet(), spec, [x], parameters=parameters, accumulate=accumulate)
    bench = device_bench(kernels, spec, x, parameters, accumulate=accumulate)
    assert_rounded(bench.forward(), expected.forward(), dtype)
    actual, gradients = bench.backward(dy, [start]), expected.backward(dy, [start])
    assert_rounded(actual.inputs[0], gradients.inputs[0], dtype)
    for role, gradient in actual.parameters.items():
        assert_rounded(gradient, gradients.parameters[role], "float32" if dtype == "bfloat16" else dtype)


@pytest.mark.usefixtures("emulated_device")
@settings(max_examples=60)
@given(
    samples=st.integers(0, 40),
    features_in=st.integers(1, 40),
    features_out=st.one_of(st.integers(1, 20), st.sampled_from([64, 257, 1000])),
    bias=st.booleans(),
    precision=st.sampled_from(PRECISIONS),
    accumulate=st.booleans(),
    seed=st.integers(0, 3),
)
def test_equals_numpy(
    samples: int, features_in: int, features_out: int, bias: bool, precision: str, accumulate: bool, seed: int
) -> None:
    compare(LinearSpec(features_in, features_out, bias), samples, precision, accumulate=accumulate, seed=seed)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_more_rows_than_blocks(emulated_device, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    monkeypatch.setattr("hpctrain.backend.kernels.cuda.images._WAVES", 1)
    compare(LinearSpec(2, 300), 70, precision, seed=2)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_without_samples_gradients_of_parameters_are_zero(emulated_device, precision: str, bias: bool) -> None:
    spec = LinearSpec(7, 5, bias)
    bench = device_bench(emulated_kernels(precision), spec, np.zeros((0, 7)), values(spec))
    assert bench.forward().shape == (0, 5)
    gradients = bench.backward(np.zeros((0, 5)))
    assert gradients.inputs[0].shape == (0, 7)
    assert [gradient.any() for gradient in gradients.parameters.values()] == [False] * (1 + bias)


def test_bfloat16_rounds_the_sum_with_the_bias_once(emulated_device) -> None:
    """1 + 2^-8 lies midway between two bfloat16 numbers: a bias of 2^-16 decides, unless the product was rounded before."""
    spec = LinearSpec(2, 8)
    parameters = {"weight": np.array([[1.0] * 8, [2.0**-8] * 8]), "bias": np.full(8, 2.0**-16)}
    bench = device_bench(emulated_kernels("bfloat16"), spec, np.ones((3, 2)), parameters, training=False)
    np.testing.assert_array_equal(bench.forward(), np.full((3, 8), 1 + 2.0**-7))


def test_all_orders_give_the_same_bits(emulated_device) -> None:
    random = np.random.default_rng(0)
    spec = LinearSpec(5, 24)
    x, dy = random.standard_normal((90, 5)), random.standard_normal((90, 24))
    results = []
    for seed in (0, 1, 2):
        bench = device_bench(emulated_kernels("bfloat16", seed), spec, x, values(spec))
        y, gradients = bench.forward(), bench.backward(dy)
        results.append([y, *gradients.inputs, *gradients.parameters.values()])
    assert_same_bits(results)


def test_a_gradient_that_nobody_wants_is_not_computed(emulated_device) -> None:
    spec = LinearSpec(4, 4)
    bench = device_bench(emulated_kernels("float32"), spec, np.ones((3, 4)), values(spec), wanted=[False])
    bench.forward()
    gradients = bench.backward(np.ones((3, 4)))
    assert gradients.inputs == (None,)
    assert (gradients.parameters["weight"] == 3).all()


def test_sufficient_factors_are_as_the_ability_says(emulated_device) -> None:
    """x and dy stay what they are through both halves of backward."""
    spec, x, dy = LinearSpec(6, 8), dyadic(5, 6), dyadic(5, 8, seed=1)
    bench = device_bench(emulated_kernels("float32"), spec, x, values(spec))
    assert isinstance(bench.operator, SufficientFactors)
    assert bench.operator.needs_inputs == (True,)
    bench.forward()
    gradients = bench.backward(dy).parameters
    kept, errors = read(bench.operator.buffers.inputs[0]), read(bench.operator.output_grad)
    np.testing.assert_array_equal(kept.T @ errors, gradients["weight"])
    np.testing.assert_array_equal(errors.sum(axis=0), gradients["bias"])


def test_a_weight_that_was_not_rounded_is_refused(emulated_device) -> None:
    kernels = emulated_kernels("bfloat16")
    operator = kernels.make(LinearSpec(4, 4, bias=False), (TensorSpec((2, 4), "bfloat16"),), training=False)
    x, weight = (kernels.allocate(64).view(dtype) for dtype in ("bfloat16", "float32"))
    with pytest.raises(AssertionError, match="weight of a linear layer in bfloat16 is float32"):
        operator.bind(Buffers(inputs=(x[:8].reshape(2, 4),), output=x[8:16].reshape(2, 4), parameters={"weight": weight[:16]}))
