"""Medians, ratios of pairs and their bootstrap intervals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.pairs import interval, paired, ratio

_VALUES = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=15)


@settings(max_examples=30)
@given(_VALUES)
def test_interval_holds_the_median_and_lies_among_the_values(values: list[float]) -> None:
    found = interval(values)
    assert found.median == pytest.approx(np.median(values))
    assert min(values) <= found.low <= found.median * (1 + 1e-12)
    assert found.median * (1 - 1e-12) <= found.high <= max(values)


@settings(max_examples=30)
@given(_VALUES, st.floats(0.5, 4.0))
def test_interval_scales_with_the_values(values: list[float], factor: float) -> None:
    once, scaled = interval(values), interval([factor * value for value in values])
    assert (scaled.low, scaled.high) == pytest.approx((factor * once.low, factor * once.high))


def test_interval_of_equal_values_is_a_point() -> None:
    found = interval([3.0] * 9)
    assert (found.low, found.median, found.high) == (3.0, 3.0, 3.0)


def test_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(7)
    hits = 0
    for seed in range(100):
        found = interval(random.standard_normal(25).tolist(), seed=seed)
        hits += found.low <= 0.0 <= found.high
    assert 88 <= hits <= 100


def test_more_rounds_make_the_interval_narrower() -> None:
    random = np.random.default_rng(1)
    few, many = (interval(random.standard_normal(count).tolist()) for count in (9, 225))
    assert many.high - many.low < few.high - few.low


def test_ratios_are_those_of_pairs() -> None:
    """A drift that both sides share cancels, as it would not in a ratio of medians."""
    drift = np.array([1.0, 9.0, 2.0, 7.0, 1.5, 30.0, 4.0])
    found = ratio(1.25 * drift, drift[:].tolist())
    assert (found.low, found.median, found.high) == pytest.approx((1.25, 1.25, 1.25))


def test_ratio_and_its_inverse_agree_for_odd_numbers_of_rounds() -> None:
    above, below = [1.0, 2.0, 4.0, 3.0, 8.0], [2.0, 3.0, 3.0, 9.0, 5.0]
    assert ratio(above, below).median == pytest.approx(1 / ratio(below, above).median)


def test_paired_takes_any_function_of_a_round() -> None:
    found = paired(lambda compute, cost, step: max(compute + cost, 2.0) / step, [1.0, 3.0, 3.0], [0.5, 1.0, 1.0], [4.0, 5.0, 8.0])
    assert found.median == 0.5


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_values_that_have_no_median_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        interval(values)


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ratio([1.0, 2.0], [1.0])
