"""Passes over magnitudes against sorts of the whole array, with arrays longer and shorter than a block."""

import numpy as np
import pytest

from hpctrain.compress import selection
from hpctrain.compress.selection import Band, Selection

DTYPES = ["float32", "float64"]


def arrays(dtype: str) -> list[np.ndarray]:
    """Arrays around the size of a block, with ties, zeros of both signs, denormal and not finite numbers."""
    numbers = np.random.default_rng(1)
    tiny = np.finfo(dtype).smallest_subnormal
    mixed = np.array([0.0, -0.0, tiny, -tiny, 1.0, -1.0, 2.5, np.inf, -np.inf, np.nan], dtype)
    return [
        np.empty(0, dtype),
        np.array([-3.0], dtype),
        *(numbers.standard_normal(size).astype(dtype) for size in (15, 16, 17, 32, 1000)),
        *(numbers.choice(mixed, size) for size in (16, 100, 333)),
    ]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_BLOCK", 16)


def magnitudes(values: np.ndarray, passes: Selection) -> np.ndarray:
    return values.view(passes.unsigned) & passes.unsigned.type(passes.top - 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_integers_are_in_the_order_of_magnitudes_with_what_is_not_finite_above(dtype: str) -> None:
    passes = Selection(dtype)
    limits = np.finfo(dtype)
    ascending = np.array([0, limits.smallest_subnormal, limits.tiny, 1, limits.max, np.inf, np.nan], dtype)
    order = magnitudes(np.copysign(ascending, -1), passes).astype(object)
    assert list(order) == sorted(set(order))
    assert passes.infinity == order[-2]
    assert order[-1] < passes.top


@pytest.mark.parametrize("dtype", DTYPES)
def test_counts_are_those_of_a_sort(dtype: str) -> None:
    passes = Selection(dtype)
    for values in arrays(dtype):
        whole = magnitudes(values, passes)
        thresholds = sorted({0, 1, passes.infinity, passes.top, *map(int, whole[:5])})
        expected = [int((whole.astype(object) >= threshold).sum()) for threshold in thresholds]
        assert passes.counts(values.view(passes.unsigned), thresholds) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_thresholds_are_those_of_a_sort(dtype: str) -> None:
    passes = Selection(dtype)
    passes.reserve(1000, 0)
    for values in arrays(dtype):
        bits, whole = values.view(passes.unsigned), np.sort(magnitudes(values, passes))[::-1]
        for rank in {rank for rank in (1, 2, values.size // 2, values.size) if 1 <= rank <= values.size}:
            assert passes.threshold(bits, rank) == whole[rank - 1]
            if values.size // 3 >= rank:
                sample = np.sort(magnitudes(values, passes)[: values.size // 3 * 3 : 3])[::-1]
                assert passes.sampled(bits, 3, rank) == sample[rank - 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_positions_are_all_above_and_a_window_of_the_band(dtype: str) -> None:
    passes = Selection(dtype)
    numbers = np.random.default_rng(2)
    for values in arrays(dtype):
        whole = magnitudes(values, passes)
        for _ in range(20):
            thresholds = np.array([0, 1, passes.infinity, passes.top, *map(int, whole[:5])], object)
            below, above = sorted(numbers.choice(thresholds, 2))
            band = np.flatnonzero((whole.astype(object) >= below) & (whole.astype(object) < above))
            first, stop = sorted(numbers.integers(0, band.size + 1, 2))
            expected = np.sort(np.append(np.flatnonzero(whole.astype(object) >= above), band[first:stop]))
            choice, out = Band(above, below, first, stop), np.full(values.size, -1, np.intp)
            size = passes.positions(values.view(passes.unsigned), choice, out)
            np.testing.assert_array_equal(out[:size], expected)
            if expected.size:
                short = out[: expected.size - 1]
                assert passes.positions(values.view(passes.unsigned), choice, short) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_candidates_are_all_that_reach_a_threshold_or_none_where_there_is_no_room(dtype: str) -> None:
    passes = Selection(dtype)
    passes.reserve(0, 40)
    values = np.linspace(-1, 1, 101, dtype=dtype)
    bits, whole = values.view(passes.unsigned), magnitudes(values, passes)
    least = passes.unsigned.type(np.sort(whole)[-40])
    candidates = passes.candidates(bits, int(least))
    assert candidates is not None
    np.testing.assert_array_equal(candidates[1], np.flatnonzero(whole >= least))
    np.testing.assert_array_equal(candidates[0], whole[whole >= least])
    assert passes.candidates(bits, 0) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_common_magnitude_is_one_that_many_of_a_sample_have(dtype: str) -> None:
    passes = Selection(dtype)
    passes.reserve(1000, 0)
    values = np.where(np.arange(1000) % 2 == 0, -4, np.arange(1000)).astype(dtype)
    bits = values.view(passes.unsigned)
    assert passes.common(bits, 1, 998) == int(np.array(4, dtype).view(passes.unsigned))
    assert passes.common(bits, 1, 100) is None
