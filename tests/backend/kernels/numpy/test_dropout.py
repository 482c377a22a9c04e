"""Dropout: one mask however an activation is split, the gradient's mask is the forward's, evaluation is the identity."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.backend.kernels.abilities import InputView
from hpctrain.backend.kernels.base import StepContext
from hpctrain.backend.kernels.numpy.dropout import sample_indices
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import DropoutSpec, TensorSpec
from hpctrain.testing.operator_gradients import check_gradient
from hpctrain.testing.operators import OperatorBench

KERNELS = NumpyKernelSet()
SHAPE = (7, 9, 5)


def forward(x: np.ndarray, ids: np.ndarray, *, step: int = 3, **options: object) -> np.ndarray:
    spec = DropoutSpec(0.4, "features.3", seed=11, **options)
    return OperatorBench(KERNELS, spec, [x]).forward(StepContext(step=step, sample_ids=ids))


def test_elements_are_dropped_or_scaled_at_the_rate() -> None:
    x = np.ones((64, *SHAPE))
    y = forward(x, np.arange(64))
    np.testing.assert_allclose(np.unique(y), [0.0, 1.0 / 0.6])
    deviation = np.sqrt(0.4 * 0.6 / y.size)
    assert abs((y == 0).mean() - 0.4) < 5 * deviation


def test_the_mask_follows_step_seed_layer_and_sample() -> None:
    x, ids = np.ones((3, 225)), np.arange(3)
    base = forward(x, ids)
    np.testing.assert_array_equal(forward(x, ids), base)
    assert (forward(x, ids, step=4) != base).any()
    assert (forward(x, ids + 1) != base).any()
    np.testing.assert_array_equal(forward(x, ids + 1)[:2], base[1:])
    for other in (DropoutSpec(0.4, "features.4", seed=11), DropoutSpec(0.4, "features.3", seed=12)):
        y = OperatorBench(KERNELS, other, [x]).forward(StepContext(step=3, sample_ids=ids))
        assert (y != base).any()


@settings(max_examples=50, deadline=None)
@given(st.tuples(*[st.integers(0, size) for size in SHAPE]), st.tuples(*[st.integers(0, size) for size in SHAPE]))
def test_any_part_draws_its_part_of_the_mask(first: tuple[int, ...], last: tuple[int, ...]) -> None:
    low, high = tuple(map(min, first, last)), tuple(map(max, first, last))
    ids = np.array([5, 2, 9])
    whole = forward(np.ones((3, *SHAPE)), ids)
    corner = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
    part = np.ones((3, *(b - a for a, b in zip(low, high, strict=True))))
    y = forward(part, ids, unsplit_shape=SHAPE, origin=low)
    np.testing.assert_array_equal(y, whole[:, *corner])


@given(st.integers(0, 6), st.integers(1, 7))
def test_rows_of_an_image_are_a_range(first: int, count: int) -> None:
    """The cheap case stays cheap: a split by height needs no index array."""
    count = min(count, 7 - first)
    assert sample_indices((count, 9, 5), SHAPE, (first, 0, 0)) == range(first * 45, (first + count) * 45)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_gradient(accumulate: bool, in_place: bool) -> None:
    x = np.random.default_rng(0).standard_normal((3, 7, 3, 2))
    context = StepContext(step=2, sample_ids=np.array([4, 8, 1]))
    check_gradient(KERNELS, DropoutSpec(0.3, "a"), [x], context=context, accumulate=accumulate, in_place=in_place)


def test_many_samples_are_drawn_in_parts_alike() -> None:
    x = np.ones((130, 4099), np.float32)
    ids = np.random.default_rng(0).permutation(130)
    y = forward(x, ids)
    np.testing.assert_array_equal(y[77:78], forward(x[77:78], ids[77:78]))


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_where_nothing_is_dropped_no_data_moves(rate: float) -> None:
    operator = KERNELS.make(DropoutSpec(rate, "a"), (TensorSpec((3, 5)),), training=rate == 0)
    assert isinstance(operator, InputView)


def test_a_training_operator_evaluates_as_the_identity() -> None:
    x = np.random.default_rng(0).standard_normal((3, 5))
    bench = OperatorBench(KERNELS, DropoutSpec(0.5, "a"), [x])
    y = bench.forward(StepContext(training=False, sample_ids=np.arange(3)))
    np.testing.assert_array_equal(y, x)


def test_without_samples() -> None:
    bench = OperatorBench(KERNELS, DropoutSpec(0.5, "a"), [np.zeros((0, 7))])
    assert bench.forward().shape == (0, 7)
    assert bench.backward(np.zeros((0, 7))).inputs[0].shape == (0, 7)
