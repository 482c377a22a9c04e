import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.backend import host_arithmetic
from hpctrain.backend.arithmetic import Corrections, MomentRule, UpdateRun
from hpctrain.backend.host_arithmetic import HostArithmetic, all_finite, square_sum
from hpctrain.backend.kernels.numpy.memory import allocate

ARITHMETIC = HostArithmetic()


def values(size: int, dtype: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(dtype)


@pytest.mark.parametrize("size", [0, 1, 65536, 65537])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_squares_are_summed_in_float64(size: int, dtype: str) -> None:
    array = values(size, dtype)
    assert square_sum(array) == pytest.approx(float((array.astype(np.float64) ** 2).sum()), rel=1e-13)
    sums = ARITHMETIC.square_sums([array, array[:1]])
    assert sums.dtype == np.float64
    assert sums.tolist() == [square_sum(array), square_sum(array[:1])]


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 5, 9])
def test_what_is_not_finite_is_seen_wherever_it_is(wrong: float, place: int) -> None:
    array = values(10, "float32")
    assert all_finite(array)
    array[place] = wrong
    assert not all_finite(array)
    assert ARITHMETIC.fetch_finite([array[:place], array, array[place + 1 :]]).result().tolist() == [True, False, True]


def test_what_overflows_only_when_it_is_squared_is_finite() -> None:
    assert all_finite(np.full(3, 3e38, np.float32))


@pytest.mark.parametrize("make", [None, allocate])
def test_zeros_are_flat_and_of_the_dtype(make) -> None:
    array = HostArithmetic(make).zeros(7, "float64")
    assert (array.shape, array.dtype) == ((7,), np.float64)
    assert not array.any()


def test_targets_come_first_and_shapes_may_differ() -> None:
    target, source = values(6, "float64", 1).reshape(2, 3), values(6, "float64", 2)
    first = target.copy()
    ARITHMETIC.add(target, source)
    assert np.array_equal(target, first + source.reshape(2, 3))
    ARITHMETIC.subtract(target, source)
    ARITHMETIC.copy(target, source)
    assert np.array_equal(target.reshape(-1), source)
    single = np.zeros(6, np.float32)
    ARITHMETIC.copy(single, source)
    assert np.array_equal(single, source.astype(np.float32))
    ARITHMETIC.fill(single, 3.0)
    assert single.tolist() == [3.0] * 6
    ARITHMETIC.from_host(single, source)
    assert np.array_equal(single, source.astype(np.float32))


@pytest.mark.parametrize("shape", [(3, 4, 5, 2), (2, 0, 5, 2), (0, 4, 5, 2)])
def test_pixels_are_summed_and_values_spread_over_them(shape: tuple[int, ...]) -> None:
    images, means = np.random.default_rng(0).standard_normal(shape), np.full((shape[0], 1, 1, shape[3]), np.nan)
    ARITHMETIC.sum_pixels(means, images, 0.25)
    np.testing.assert_allclose(means, images.sum(axis=(1, 2), keepdims=True) / 4, rtol=1e-14)
    ARITHMETIC.spread_pixels(images, means, 2.0)
    np.testing.assert_array_equal(images, np.broadcast_to(2.0 * means, shape))


def test_what_lies_on_the_host_is_not_copied() -> None:
    array = values(4, "float32")
    assert ARITHMETIC.to_host(array) is array
    assert ARITHMETIC.fetch(array).result() is array


@settings(deadline=None)
@given(
    st.integers(1, 9),
    st.sampled_from([0.0, 0.9]),
    st.booleans(),
    st.sampled_from([1.0, 0.25]),
    st.sampled_from([0.0, 0.01]),
    st.integers(0, 3),
)
def test_a_descent_is_its_equations_in_whatever_chunks(chunk, factor, nesterov, scale, decay, offset) -> None:
    w, g, start, stop = values(20, "float64", 3), values(20, "float64", 4), 3, 17
    m = values(20, "float64", 5)
    expected_w, expected_m = w.copy(), m.copy()
    gradient = scale * g + decay * w
    step = gradient
    if factor:
        state = slice(start + offset, stop + offset)
        expected_m[state] = factor * m[state] + gradient[start:stop]
        step = np.zeros(20)
        step[start:stop] = gradient[start:stop] + factor * expected_m[state] if nesterov else expected_m[state]
    expected_w[start:stop] -= 0.1 * step[start:stop]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_arithmetic, "CHUNK", chunk)
        descent = ARITHMETIC.descent(w, g, m, factor=factor, nesterov=nesterov)
        descent.update([UpdateRun(start, stop, scale, decay, offset)], 0.1)
    np.testing.assert_allclose(w, expected_w, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(m, expected_m, rtol=1e-13, atol=1e-15)


@settings(deadline=None)
@given(
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from([1.0, 0.25]),
    st.sampled_from([0.0, 0.01]),
    st.integers(0, 3),
)
def test_moments_are_their_equations_in_whatever_chunks(chunk, directs, scale, decay, offset) -> None:
    w, g, start, stop = values(20, "float64", 3), values(20, "float64", 4), 3, 17
    m, v = values(20, "float64", 5), values(20, "float64", 6) ** 2
    inside, state = slice(start, stop), slice(start + offset, stop + offset)
    gradient = scale * g[inside]
    expected = [x.copy() for x in (w, g, m, v)]
    expected[2][state] = 0.9 * m[state] + 0.1 * gradient
    expected[3][state] = 0.75 * v[state] + 0.25 * gradient**2
    direction = 1.5 * expected[2][state] / (2.5 * np.sqrt(expected[3][state]) + 1e-3) + decay * w[inside]
    if directs:
        expected[1][inside] = direction
    else:
        expected[0][inside] -= 0.1 * direction
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_arithmetic, "CHUNK", chunk)
        descent = ARITHMETIC.moment_descent(w, g, m, v, MomentRule(0.9, 0.75, 1e-3))
        runs = [UpdateRun(start, stop, scale, decay, offset)]
        if directs:
            descent.direct(runs, Corrections(1.5, 2.5))
        else:
            descent.update(runs, Corrections(1.5, 2.5), 0.1)
    for array, wanted in zip((w, g, m, v), expected, strict=True):
        np.testing.assert_allclose(array, wanted, rtol=1e-13, atol=1e-15)


def test_a_rate_of_numpy_does_not_widen_the_arithmetic() -> None:
    plain, scalar = (values(9, "float32") for _ in range(2))
    for data, rate in ((plain, 0.1), (scalar, np.float64(0.1))):
        descent = ARITHMETIC.descent(data, values(9, "float32", 1), np.zeros(9, np.float32), factor=0.9, nesterov=False)
        descent.update([UpdateRun(0, 9, 1.0, 0.0)], rate)
    assert plain.tobytes() == scalar.tobytes()
