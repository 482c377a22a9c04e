"""Messages of 16 bits: every code, each element within half of a last digit, what is lost exactly, and nothing allocated."""

import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest

from hpctrain.averaging import sixteen_bits
from hpctrain.averaging.sixteen_bits import Bfloat16Codes, Cast16, OddRounding

DTYPES = ["float32", "float64"]

BLOCK = sixteen_bits._BLOCK


@pytest.fixture
def small_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sixteen_bits, "_BLOCK", 64)


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


@pytest.mark.usefixtures("small_casts")
@pytest.mark.parametrize("dtype", DTYPES)
def test_bfloat16_is_the_nearest_of_eight_digits(dtype: str) -> None:
    cast = Cast16(70, dtype)
    numbers = np.random.default_rng(2)
    values = (numbers.standard_normal(70) * 2.0 ** numbers.integers(-120, 120, 70)).astype(dtype)
    unit = 2.0 ** (np.frexp(np.abs(values).astype(np.float64))[1] - 8)
    np.testing.assert_array_equal(received(cast, values), np.round(values / unit) * unit)


@pytest.mark.usefixtures("small_casts")
@pytest.mark.parametrize("dtype", DTYPES)
def test_received_and_lost_are_the_array_exactly(dtype: str) -> None:
    for values in arrays(dtype):
        if np.abs(values).max(initial=0) > 2.0**127:
            continue
        cast = Cast16(values.size, dtype)
        lost, message, before = values.copy(), message_of(cast, values), values.copy()
        assert values.tobytes() == before.tobytes()
        cast.subtract_from(message, lost)
        again = received(cast, values)
        total = np.linspace(-1, 1, values.size).astype(dtype)
        expected = total + again
        cast.add_to(message, total)
        np.testing.assert_array_equal(total, expected)
        assert cast.message_size == 2 * values.size
        np.testing.assert_array_equal(lost + again, values)
        np.testing.assert_array_equal(lost, values - again)


@pytest.mark.usefixtures("small_casts")
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_received_so(dtype: str) -> None:
    for value in (np.inf, -np.inf, np.nan):
        values = np.ones(130, dtype)
        values[[3, 129]] = value
        np.testing.assert_array_equal(received(Cast16(130, dtype), values), values)
        residual = values.copy()
        cast = Cast16(130, dtype)
        cast.subtract_from(message_of(cast, values), residual)
        assert not np.isfinite(residual[[3, 129]]).any()


@pytest.mark.usefixtures("small_casts")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_call_takes_no_memory(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sixteen_bits, "_BLOCK", BLOCK)
    values = np.random.default_rng(5).standard_normal(300_000).astype(dtype)
    cast = Cast16(values.size, dtype)
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


ALL = np.arange(1 << 16, dtype=np.uint16)


def values_of(codes: np.ndarray = ALL) -> np.ndarray:
    Bfloat16Codes(codes.size).decode(codes, values := np.empty(codes.size, np.float32))
    return values


def codes_of(values: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        Bfloat16Codes(values.size).encode(values, codes := np.empty(values.size, np.uint16))
    return codes


def finite() -> np.ndarray:
    """The codes of numbers of plus sign, in ascending order, and of infinity."""
    return ALL[: int(np.flatnonzero(np.isinf(values_of()))[0]) + 1]


def test_values_are_those_that_the_format_defines() -> None:
    codes = np.array([0, 1, 0x3F80, 0x7F7F, 0x8080, 0xFF80], np.uint16)
    largest = 2.0**127 * (2 - 2**-7)
    np.testing.assert_array_equal(values_of(codes), [0, 2**-133, 1, largest, -(2.0**-126), -np.inf])


def test_every_code_is_its_value_s_code() -> None:
    values = values_of()
    again = codes_of(values)
    number = ~np.isnan(values)
    np.testing.assert_array_equal(again[number], ALL[number])
    assert np.isnan(values_of(again[~number])).all()


def test_numbers_between_two_codes_become_the_nearer_and_halves_the_even_one() -> None:
    codes = finite()[:-1]
    values = values_of(codes).astype(np.float64)
    middle = (values[:-1] + values[1:]) / 2
    even = np.where(codes[:-1] % 2 == 0, codes[:-1], codes[1:])
    single = middle.astype(np.float32)
    assert (single == middle).all(), "the middle of two codes is a float32"
    for sign, bit in ((1, 0), (-1, 0x8000)):
        np.testing.assert_array_equal(codes_of(sign * single), even | bit)
        below, above = (sign * np.nextafter(single, np.float32(limit)) for limit in (-np.inf, np.inf))
        np.testing.assert_array_equal(codes_of(below), codes[:-1] | bit)
        np.testing.assert_array_equal(codes_of(above), codes[1:] | bit)


def test_the_border_of_infinity() -> None:
    border = 2.0**128 * (1 - 2**-9)
    values = np.array([border, np.nextafter(np.float32(border), np.float32(0))], np.float32)
    assert np.isinf(values_of(codes_of(values))).tolist() == [True, False]


def nearest(value: float, ascending: np.ndarray) -> int:
    """The code of a float64 of plus sign, rounded once, by fractions."""
    place = int(np.searchsorted(ascending, value))
    if place == 0 or ascending[place] == value:
        return place
    low, high = (Fraction(float(ascending[place + shift])) for shift in (-1, 0))
    gap = Fraction(value) - low, high - Fraction(value)
    return place if gap[1] < gap[0] or (gap[0] == gap[1] and place % 2 == 0) else place - 1


@pytest.mark.slow
def test_float64_is_rounded_as_if_once() -> None:
    """Numbers whose nearest float32 is the middle of two codes, though they are not."""
    codes = finite()[:-1]
    ascending = values_of(codes).astype(np.float64)
    numbers = np.random.default_rng(2)
    chosen = numbers.integers(0, codes.size - 1, 3000)
    middle = (ascending[chosen] + ascending[chosen + 1]) / 2
    for shift in (-1, 0, 1):
        values = middle + shift * np.spacing(middle) * 2.0 ** numbers.integers(0, 20, middle.size)
        narrowed = np.empty(values.size, np.float32)
        OddRounding(values.size).narrow(values, narrowed)
        assert codes_of(narrowed).tolist() == [nearest(value, ascending) for value in values]


def test_narrowed_numbers_are_odd_neighbours() -> None:
    numbers = np.random.default_rng(3)
    values = numbers.standard_normal(20_000) * 2.0 ** numbers.integers(-160, 129, 20_000)
    values[::7] = np.round(values[::7])
    narrowed = np.empty(values.size, np.float32)
    with np.errstate(all="ignore"):
        OddRounding(values.size).narrow(values, narrowed)
    for value, result in zip(values.tolist(), narrowed, strict=True):
        assert math.isfinite(result)
        if value != float(result):
            assert result.view(np.uint32) % 2 == 1
            assert abs(value) >= 2.0**127 or abs(value - float(result)) < float(np.spacing(np.abs(result)))
    assert (narrowed == values).any()


def test_narrowing_leaves_exact_and_not_finite_numbers() -> None:
    values = np.array([0.0, -0.0, 1.5, -3.0, 2.0**-149, np.inf, -np.inf, np.nan])
    narrowed = np.empty(values.size, np.float32)
    OddRounding(values.size).narrow(values, narrowed)
    np.testing.assert_array_equal(narrowed, values)
    np.testing.assert_array_equal(np.signbit(narrowed[:4]), np.signbit(values[:4]))
