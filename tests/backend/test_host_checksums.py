"""A guard of the host's arrays notices each flipped bit in its array, however these lie in memory."""

from __future__ import annotations

import zlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend.host_checksums import HostChecksums, HostGuard, HostSums

SIZES = (3, 0, 5, 1, 4)


def _arrays() -> list[np.ndarray]:
    """Neighbours in one buffer, the third apart, and one with memory of its own."""
    flat = np.random.default_rng(2).standard_normal(40).astype(np.float32)
    starts = (0, 3, 9, 14, 15)
    return [*(flat[start : start + size] for start, size in zip(starts, SIZES, strict=True)), np.arange(3.0)]


@given(number=st.integers(0, len(SIZES)), place=st.integers(0, 99), bit=st.integers(0, 31))
def test_a_flipped_bit_marks_its_array_for_good(number: int, place: int, bit: int) -> None:
    arrays = _arrays()
    guard = HostGuard(arrays)
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


def test_checksums_are_of_the_bytes() -> None:
    arrays = _arrays()
    np.testing.assert_array_equal(HostChecksums(arrays).fetch().result(), [zlib.crc32(array.tobytes()) for array in arrays])


def test_sums_are_of_the_words_of_each_array() -> None:
    arrays = _arrays()
    expected = [int(array.view(np.uint32).sum(dtype=np.uint64)) % (1 << 32) for array in arrays]
    assert HostSums(arrays).fetch().result().tolist() == expected


def test_no_arrays_have_no_checksums() -> None:
    assert HostChecksums([]).fetch().result().shape == (0,)
    guard = HostGuard([])
    guard.remember()
    guard.compare()
    assert guard.fetch_changed().result().shape == (0,)
