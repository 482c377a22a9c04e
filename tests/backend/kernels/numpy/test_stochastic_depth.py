"""Stochastic depth: a sample is dropped or scaled whole, by its id; the gradient's factors are the forward's."""

import numpy as np
import pytest

from hpctrain.backend.kernels.base import StepContext
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import DropoutSpec
from hpctrain.testing.operator_gradients import check_gradient
from hpctrain.testing.operators import OperatorBench

KERNELS = NumpyKernelSet()
SHAPE = (7, 9, 5)


def forward(x: np.ndarray, ids: np.ndarray, **options: object) -> np.ndarray:
    spec = DropoutSpec(0.4, "layer1.0.stochastic_depth", seed=11, per_sample=True, **options)
    return OperatorBench(KERNELS, spec, [x]).forward(StepContext(step=3, sample_ids=ids))


def test_samples_are_dropped_or_scaled_whole_at_the_rate() -> None:
    x = np.random.default_rng(0).standard_normal((4000, 3))
    factors = forward(x, np.arange(4000)) / x
    np.testing.assert_array_equal(np.ptp(factors, axis=1) < 1e-12, True)
    np.testing.assert_allclose(np.unique(np.round(factors, 9)), [0.0, np.round(1 / 0.6, 9)])
    assert abs((factors[:, 0] == 0).mean() - 0.4) < 5 * np.sqrt(0.4 * 0.6 / 4000)


def test_parts_of_a_sample_have_its_mask_wherever_they_are() -> None:
    ids = np.random.default_rng(1).permutation(40)
    kept = forward(np.ones((40, *SHAPE)), ids)[:, 0, 0, 0] != 0
    assert 0 < kept.sum() < 40
    rows = forward(np.ones((38, 2, 9, 5)), ids, first_sample=2)
    np.testing.assert_array_equal(rows.reshape(38, -1) != 0, np.repeat(kept[2:, None], 90, axis=1))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_gradient(accumulate: bool, in_place: bool) -> None:
    x = np.random.default_rng(0).standard_normal((5, 3, 2, 4))
    context = StepContext(step=2, sample_ids=np.arange(len(x)))
    spec = DropoutSpec(0.5, "a", per_sample=True)
    check_gradient(KERNELS, spec, [x], context=context, accumulate=accumulate, in_place=in_place)


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_gradient_of_large_samples_is_what_forward_makes_of_it(accumulate: bool) -> None:
    """A sample fills a block of an added gradient. The map is linear and diagonal, so it is its own adjoint."""
    random = np.random.default_rng(0)
    x, dy, start = (random.standard_normal((3, 40_000)) for _ in range(3))
    spec, context = DropoutSpec(0.5, "a", per_sample=True), StepContext(step=2, sample_ids=np.arange(3))
    bench = OperatorBench(KERNELS, spec, [x], accumulate=accumulate)
    bench.forward(context)
    (gradient,) = bench.backward(dy, [start]).inputs
    assert gradient is not None
    expected = np.array(OperatorBench(KERNELS, spec, [dy]).forward(context))
    np.testing.assert_allclose(gradient, expected + start if accumulate else expected, rtol=1e-12, atol=1e-12)


def test_a_training_operator_evaluates_as_the_identity() -> None:
    x = np.random.default_rng(0).standard_normal((3, 5))
    bench = OperatorBench(KERNELS, DropoutSpec(0.5, "a", per_sample=True), [x])
    np.testing.assert_array_equal(bench.forward(StepContext(training=False, sample_ids=np.arange(3))), x)


def test_without_samples() -> None:
    bench = OperatorBench(KERNELS, DropoutSpec(0.5, "a", per_sample=True), [np.zeros((0, 7))])
    assert bench.forward().shape == (0, 7)
    assert bench.backward(np.zeros((0, 7))).inputs[0].shape == (0, 7)
