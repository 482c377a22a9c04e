"""Services of the host next to those of devices: arithmetic, checksums, sizes, and what the host does not need."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.backend import host_arithmetic
from hpctrain.backend.arithmetic import Arithmetic, Corrections, MomentRule, UpdateRun
from hpctrain.backend.host_arithmetic import HostArithmetic, HostWordSums, all_finite
from hpctrain.backend.numpy.operator import allocate
from hpctrain.backend.operators import ALIGNMENT_BYTES, aligned
from hpctrain.testing.operators import empty
from hpctrain_testing.emulator.memory import borrowed, on_host
from tests.support.emulated import CudaKernelsFactory

ARITHMETIC = HostArithmetic()


def values(size: int, dtype: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(dtype)


@pytest.mark.parametrize("size", [0, 1, 65536, 65537])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_squares_are_summed_in_float64(size: int, dtype: str) -> None:
    array = values(size, dtype)
    sums = ARITHMETIC.square_sums([array, array[:1]])
    assert sums.dtype == np.float64
    exact = [float((part.astype(np.float64) ** 2).sum()) for part in (array, array[:1])]
    assert sums.tolist() == pytest.approx(exact, rel=1e-13)


FINITE = st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=9)


@given(FINITE, st.sampled_from([np.nan, np.inf, -np.inf]), st.integers(0, 8), st.sampled_from(["float32", "float64"]))
def test_what_is_not_finite_is_seen_wherever_it_is(numbers: list[float], wrong: float, place: int, dtype: str) -> None:
    """Products of the largest floats overflow; they are finite all the same."""
    array, place = np.array(numbers, dtype), place % len(numbers)
    assert all_finite(array)
    array[place] = wrong
    assert not all_finite(array)
    assert ARITHMETIC.fetch_finite([array[:place], array, array[place + 1 :]]).result().tolist() == [True, False, True]


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


@settings(deadline=None)
@given(
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1.0, 0.25]),
    st.sampled_from([0.0, 0.01]),
    st.integers(0, 3),
)
def test_moments_are_their_equations_in_whatever_chunks(chunk, directs, decoupled, scale, decay, offset) -> None:
    w, g, start, stop = values(20, "float64", 3), values(20, "float64", 4), 3, 17
    m, v = values(20, "float64", 5), values(20, "float64", 6) ** 2
    inside, state = slice(start, stop), slice(start + offset, stop + offset)
    gradient = scale * g[inside] + (0 if decoupled else decay) * w[inside]
    expected = [x.copy() for x in (w, g, m, v)]
    expected[2][state] = 0.9 * m[state] + 0.1 * gradient
    expected[3][state] = 0.75 * v[state] + 0.25 * gradient**2
    direction = 1.5 * expected[2][state] / (2.5 * np.sqrt(expected[3][state]) + 1e-3) + decoupled * decay * w[inside]
    if directs:
        expected[1][inside] = direction
    else:
        expected[0][inside] -= 0.1 * direction
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_arithmetic, "CHUNK", chunk)
        descent = ARITHMETIC.moment_descent(w, g, m, v, MomentRule(0.9, 0.75, 1e-3, decoupled))
        runs = [UpdateRun(start, stop, scale, decay, offset)]
        if directs:
            descent.direct(runs, Corrections(1.5, 2.5))
        else:
            descent.update(runs, Corrections(1.5, 2.5), 0.1)
    for array, wanted in zip((w, g, m, v), expected, strict=True):
        np.testing.assert_allclose(array, wanted, rtol=1e-13, atol=1e-15)


SIZES = (3, 0, 5, 1, 4)


def _arrays() -> list[np.ndarray]:
    """Neighbours in one buffer, the third apart, and one with memory of its own."""
    flat = np.random.default_rng(2).standard_normal(40).astype(np.float32)
    starts = (0, 3, 9, 14, 15)
    return [*(flat[start : start + size] for start, size in zip(starts, SIZES, strict=True)), np.arange(3.0)]


@given(number=st.integers(0, len(SIZES)), place=st.integers(0, 99), bit=st.integers(0, 31))
def test_a_flipped_bit_marks_its_array_for_good(number: int, place: int, bit: int) -> None:
    arrays = _arrays()
    guard = HostWordSums(arrays)
    guard.remember()
    guard.compare()
    assert not guard.fetch_changed().result().any()
    words = arrays[number].view(np.uint32)
    if words.size:
        words[place % words.size] ^= np.uint32(1 << bit)
    guard.compare()
    expected = [other == number and words.size > 0 for other in range(len(arrays))]
    np.testing.assert_array_equal(guard.fetch_changed().result(), expected)
    guard.remember()
    guard.compare()
    np.testing.assert_array_equal(guard.fetch_changed().result(), expected)


def test_sums_are_of_the_words_of_each_array() -> None:
    arrays = _arrays()
    expected = [int(array.view(np.uint32).sum(dtype=np.uint64)) % (1 << 32) for array in arrays]
    assert HostWordSums(arrays).fetch().result().tolist() == expected


def test_no_arrays_have_no_sums() -> None:
    assert HostWordSums([]).fetch().result().shape == (0,)
    assert HostWordSums([]).fetch_changed().result().shape == (0,)


def test_services_have_the_same_signatures() -> None:
    for name, method in inspect.getmembers(Arithmetic, inspect.isfunction):
        assert inspect.signature(getattr(HostArithmetic, name)).parameters.keys() == inspect.signature(method).parameters.keys()


def test_a_device_has_one_service(cuda_kernels: CudaKernelsFactory) -> None:
    arithmetic = cuda_kernels().arithmetic
    mirrors = arithmetic.mirrors()
    assert mirrors is not None
    assert arithmetic.mirrors() is mirrors
    assert mirrors.pinned_bytes == 0


@pytest.mark.parametrize("seed", range(10))
def test_what_is_marked_as_done_is_in_memory(seed: int, cuda_kernels: CudaKernelsFactory) -> None:
    """Read without any wait but for the mark, as an MPI library reads."""
    kernels = cuda_kernels("float64", seed)
    messages, array = kernels.arithmetic.messages(), empty(kernels, (9,), "float64")
    assert messages is not None
    for value in (3.0, 4.0):
        kernels.arithmetic.fill(array, value)
        mark = messages.mark()
        kernels.arithmetic.fill(empty(kernels, (9,), "float64"), 7.0)
        while not mark.done:
            pass
        assert mark.done
        np.testing.assert_array_equal(on_host(borrowed(array)), np.full(9, value))


def test_devices_are_distinguished(cuda_kernels: CudaKernelsFactory) -> None:
    first, second = (cuda_kernels("float64", 0).arithmetic.messages() for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.identity != second.identity
    assert first.group_fault() is None


@given(st.integers(0, 1 << 40))
def test_a_size_is_rounded_up_to_the_next_multiple(size_bytes: int) -> None:
    rounded = aligned(size_bytes)
    assert rounded % ALIGNMENT_BYTES == 0
    assert 0 <= rounded - size_bytes < ALIGNMENT_BYTES
    assert aligned(rounded) == rounded
