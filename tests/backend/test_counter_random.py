"""Counter-based random numbers: published vectors, and independence of every split."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.backend import counter_random as cr
from tests.support.sampling import amount

ONES = 0xFFFFFFFF
# Known answers of Philox4x32-10 published with the Random123 library: (key, counter, words).
VECTORS = [
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES), (ONES,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_one(key, counter):
    """The algorithm as the paper writes it, on Python integers."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & ONES, (p0 >> 32) ^ c3 ^ k1, p0 & ONES
        k0, k1 = (k0 + 0x9E3779B9) & ONES, (k1 + 0xBB67AE85) & ONES
    return c0, c1, c2, c3


@pytest.mark.parametrize(("key", "counter", "words"), VECTORS)
def test_philox_returns_the_published_words(key, counter, words):
    block, sample = (np.array([counter[i] | counter[i + 1] << 32], np.uint64).view(np.int64) for i in (0, 2))
    (_, _, even, odd) = next(cr._words(key, sample, block))
    assert tuple(int(word.item()) for word in (even[0], odd[0], even[1], odd[1])) == words
    assert philox_one(key, counter) == words


def test_words_do_not_depend_on_tiles():
    count = 2 * cr._BLOCK + 7
    words = cr.words((5, 6), [2 | 3 << 32], range(4 * count)).reshape(count, 4)
    for i in (0, cr._BLOCK - 1, cr._BLOCK, count - 1):
        assert tuple(words[i].tolist()) == philox_one((5, 6), (i, 0, 2, 3))
    assert cr.words((1, 2), np.zeros(3), range(5)).shape == (3, 5)
    assert cr.words((1, 2), np.zeros(0), range(5)).shape == (0, 5)
    assert cr.words((1, 2), np.zeros(2), range(0)).shape == (2, 0)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**50), st.integers(0, ONES), st.integers(0, ONES))
@settings(max_examples=30)
def test_words_address_sample_and_index(sample, index, key0, key1):
    sample_bits, block = sample & (2**64 - 1), index // 4
    expected = philox_one((key0, key1), (block & ONES, block >> 32, sample_bits & ONES, sample_bits >> 32))[index % 4]
    assert cr.words((key0, key1), [sample], range(index, index + 1)).tolist() == [[expected]]
    assert cr.words((key0, key1), [sample], np.array([index])).tolist() == [[expected]]


def test_key_is_stable_and_separates_its_parts():
    assert cr.key("dropout", 1, 2, "features.0") == (0x240857DD, 0xE9FF0848)  # pinned: checkpoints rely on it
    keys = {cr.key("a", 12), cr.key("a1", 2), cr.key("a", 1, 2), cr.key("a", "12"), cr.key("a", 21), cr.key("a"), cr.key()}
    assert len(keys) == 7
    assert cr.key(np.int64(3)) == cr.key(3)


@pytest.mark.job
def test_key_does_not_depend_on_the_process():
    code = "from hpctrain.backend.counter_random import key; print(key('dropout', 7))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert out.strip() == str(cr.key("dropout", 7))


@given(
    st.integers(0, 37), st.integers(0, 37), st.lists(st.integers(0, 6), max_size=6), st.lists(st.integers(0, 400), max_size=30)
)
@settings(max_examples=amount(30, 60), deadline=None)
def test_any_split_draws_its_part_of_one_mask(start, length, samples, scattered):
    stream = cr.key("mask", 3)
    whole = cr.keep_mask(stream, np.arange(7), range(401), 0.4)
    ids = np.array(samples, np.int64)
    assert np.array_equal(cr.keep_mask(stream, ids, range(start, start + length), 0.4), whole[ids, start : start + length])
    picked = np.array(scattered, np.int64)
    assert np.array_equal(cr.keep_mask(stream, ids, picked, 0.4), whole[np.ix_(ids, picked)])
    assert np.array_equal(cr.uniform(stream, ids, picked), cr.uniform(stream, np.arange(7), range(401))[np.ix_(ids, picked)])


def test_tiles_do_not_show():
    stream, width = cr.key("tiles"), 4 * cr._BLOCK + 9
    wide = cr.words(stream, [3, 4], range(width))
    assert np.array_equal(wide[1:, cr._BLOCK :], cr.words(stream, [4], range(cr._BLOCK, width)))
    tall = cr.words(stream, np.arange(cr._BLOCK + 3), range(5))
    assert np.array_equal(tall[-4:, 1:3], cr.words(stream, np.arange(cr._BLOCK - 1, cr._BLOCK + 3), range(1, 3)))


def test_mask_is_written_into_the_given_array_of_the_same_draw():
    stream, out = cr.key("out"), np.zeros((3, 11), np.bool_)
    given_array = cr.keep_mask(stream, [5, 6, 2**40], range(2, 13), 0.25, out=out)
    assert given_array is out
    assert np.array_equal(out, cr.keep_mask(stream, [5, 6, 2**40], range(2, 13), 0.25))


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_mask_keeps_the_share_it_should(rate):
    kept = cr.keep_mask(cr.key("rate"), np.arange(64), range(4096), rate).mean()
    spread = np.sqrt(rate * (1 - rate) / (64 * 4096))
    assert abs(kept - (1 - rate)) <= 5 * spread


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_uniform_numbers_are_uniform_and_below_one(dtype):
    x = cr.uniform(cr.key("uniform"), np.arange(100), range(1000), dtype)
    assert x.dtype == dtype
    assert x.min() >= 0
    assert x.max() < 1
    counts = np.histogram(x, 16, (0, 1))[0]
    chi_square = ((counts - x.size / 16) ** 2 / (x.size / 16)).sum()
    assert chi_square < 45  # 15 degrees of freedom: exceeded once in 13,000 keys
    assert abs(np.corrcoef(x[:, 0], x[:, 1])[0, 1]) < 0.5
