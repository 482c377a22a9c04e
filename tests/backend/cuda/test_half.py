"""Rounding to bfloat16, against the two neighbours of every value."""

from __future__ import annotations

import numpy as np

from hpctrain.backend.cuda.half import bfloat16_bits, bfloat16_values

ALL_BITS = np.arange(1 << 16, dtype=np.uint16)


def test_every_bfloat16_comes_back() -> None:
    values = bfloat16_values(ALL_BITS)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(bfloat16_bits(values)[numbers], ALL_BITS[numbers])
    assert np.isnan(bfloat16_values(bfloat16_bits(values[~numbers]))).all()


def test_values_are_rounded_to_the_nearest_and_to_even_in_the_middle() -> None:
    """Of each pair of neighbours: the middle, and the float32 just below and above it."""
    low = ALL_BITS[(ALL_BITS & 0x7FFF) < 0x7F7F]  # so that the neighbour away from zero is finite
    middle = (low.astype(np.uint32) << 16) + np.uint32(0x8000)
    even = low + (low & 1)
    np.testing.assert_array_equal(bfloat16_bits(middle.view(np.float32)), even)
    np.testing.assert_array_equal(bfloat16_bits((middle - np.uint32(1)).view(np.float32)), low)
    np.testing.assert_array_equal(bfloat16_bits((middle + np.uint32(1)).view(np.float32)), low + 1)


def test_values_beyond_the_largest_become_infinite() -> None:
    largest = bfloat16_values(np.array([0x7F7F], np.uint16))
    assert np.isinf(bfloat16_values(bfloat16_bits(np.full(1, np.finfo(np.float32).max)))).all()
    assert bfloat16_values(bfloat16_bits(largest * np.float32(1 + 2**-9))) == largest


def test_float64_is_rounded_by_way_of_float32() -> None:
    value = np.array([1 + 2**-8 + 2**-40])  # the middle of two neighbours, as soon as it is float32
    assert bfloat16_values(bfloat16_bits(value)) == 1.0


def test_the_shape_is_kept() -> None:
    assert bfloat16_bits(np.zeros((2, 3), np.float32)).shape == (2, 3)
    assert bfloat16_values(np.zeros((2, 0), np.uint16)).shape == (2, 0)
