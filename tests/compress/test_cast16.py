"""Messages of 16 bits: each element within half of a last digit, what is lost is the rest exactly, and nothing is allocated."""

import tracemalloc

import numpy as np
import pytest

from hpctrain.compress import cast16
from hpctrain.compress.cast16 import Cast16
from hpctrain.compress.error_feedback import ErrorFeedback

DTYPES = ["float32", "float64"]
BLOCK = cast16._BLOCK
FORMATS = ["bfloat16", "float16"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast16, "_BLOCK", 64)


def message_of(cast: Cast16, values: np.ndarray) -> np.ndarray:
    message = np.empty(cast.message_size, np.uint8)
    cast.compress(values, message)
    return message


def received(cast: Cast16, values: np.ndarray) -> np.ndarray:
    again = np.full_like(values, 9)
    cast.decompress(message_of(cast, values), again)
    return again


def arrays(dtype: str) -> list[np.ndarray]:
    """Arrays of all sizes of numbers, up to the last third of the range of the dtype, and down to denormal ones."""
    numbers = np.random.default_rng(1)
    low, high = (-149, 125) if dtype == "float32" else (-1074, 1021)
    whole = [
        numbers.standard_normal(size) * 2.0 ** float(scale)
        for size in (1, 63, 64, 65, 300)
        for scale in (low, low + 5, low // 2, -24, 0, 14, high // 2, high - 2)
    ]
    mixed = [numbers.standard_normal(200) * 2.0 ** numbers.integers(low, 125, 200).astype(float) for _ in range(5)]
    return [values.astype(dtype) for values in (*whole, *mixed, np.zeros(70), np.empty(0))]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bfloat16_is_the_nearest_of_eight_digits(dtype: str) -> None:
    cast = Cast16(70, dtype, "bfloat16")
    numbers = np.random.default_rng(2)
    values = (numbers.standard_normal(70) * 2.0 ** numbers.integers(-120, 120, 70)).astype(dtype)
    unit = 2.0 ** (np.frexp(np.abs(values).astype(np.float64))[1] - 8)
    np.testing.assert_array_equal(received(cast, values), np.round(values / unit) * unit)


@pytest.mark.parametrize("dtype", DTYPES)
def test_float16_has_eleven_digits_of_the_largest_and_of_what_is_not_too_small_beside_it(dtype: str) -> None:
    last = 2.0**-149 if dtype == "float32" else 2.0**-1046  # of the dtype itself, and of the largest scale
    for values in arrays(dtype):
        largest = float(np.abs(values).max(initial=0))
        error = np.abs(received(Cast16(values.size, dtype, "float16"), values) - values)
        assert (error <= np.maximum(np.maximum(np.abs(values) * 2.0**-11, largest * 2.0**-39), last)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_float16_needs_no_range_of_its_own(dtype: str) -> None:
    numbers = np.random.default_rng(3)
    values = numbers.standard_normal(100).astype(dtype)
    cast = Cast16(100, dtype, "float16")
    for exponent in (-100, -20, 20, 100):
        scaled = values * np.dtype(dtype).type(2.0**exponent)
        np.testing.assert_array_equal(received(cast, scaled), received(cast, values) * np.dtype(dtype).type(2.0**exponent))


@pytest.mark.parametrize("bits", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_received_and_lost_are_the_array_exactly(dtype: str, bits: str) -> None:
    for values in arrays(dtype):
        if bits == "bfloat16" and np.abs(values).max(initial=0) > 2.0**127:
            continue
        cast = Cast16(values.size, dtype, bits)
        lost, message, before = values.copy(), message_of(cast, values), values.copy()
        assert values.tobytes() == before.tobytes()
        cast.subtract_from(message, lost)
        again = received(cast, values)
        np.testing.assert_array_equal(lost + again, values)
        np.testing.assert_array_equal(lost, values - again)


@pytest.mark.parametrize("bits", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_adding_is_receiving_and_adding(dtype: str, bits: str) -> None:
    values = np.random.default_rng(4).standard_normal(200).astype(dtype)
    cast = Cast16(200, dtype, bits)
    total = np.linspace(-1, 1, 200).astype(dtype)
    expected = total + received(cast, values)
    cast.add_to(message_of(cast, values), total)
    np.testing.assert_array_equal(total, expected)


@pytest.mark.parametrize("bits", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_received_so(dtype: str, bits: str) -> None:
    for value in (np.inf, -np.inf, np.nan):
        values = np.ones(130, dtype)
        values[[3, 129]] = value
        np.testing.assert_array_equal(received(Cast16(130, dtype, bits), values), values)
        residual = values.copy()
        cast = Cast16(130, dtype, bits)
        cast.subtract_from(message_of(cast, values), residual)
        assert not np.isfinite(residual[[3, 129]]).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_message_has_two_bytes_an_element_and_two_for_a_scale(dtype: str) -> None:
    assert [Cast16(size, dtype, "bfloat16").message_size for size in (0, 1, 1000)] == [0, 2, 2000]
    assert [Cast16(size, dtype, "float16").message_size for size in (0, 1, 1000)] == [2, 4, 2002]


@pytest.mark.parametrize("bits", FORMATS)
def test_rounding_errors_that_are_kept_are_sent_later(bits: str) -> None:
    """A gradient too small beside a large one is lost in each message, but not in their sum."""
    cast, feedback, total = Cast16(2, "float32", bits), ErrorFeedback(2, "float32"), np.zeros(2, np.float32)
    gradient = np.array([1.0, 1 + 2.0**-13], np.float32)
    message = np.empty(cast.message_size, np.uint8)
    for _ in range(2**10):
        feedback.add(gradient)
        cast.compress(feedback.values, message)
        cast.subtract_from(message, feedback.values)
        cast.add_to(message, total)
    np.testing.assert_array_equal(total.astype(np.float64) + feedback.values, gradient.astype(np.float64) * 2**10)


@pytest.mark.parametrize("bits", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_call_takes_no_memory(dtype: str, bits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast16, "_BLOCK", BLOCK)
    values = np.random.default_rng(5).standard_normal(300_000).astype(dtype)
    cast = Cast16(values.size, dtype, bits)
    message, target = message_of(cast, values), values.copy()
    tracemalloc.start()
    try:
        cast.compress(values, message)
        cast.add_to(message, target)
        cast.subtract_from(message, target)
        cast.decompress(message, target)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 10_000
    assert peak < 100_000
