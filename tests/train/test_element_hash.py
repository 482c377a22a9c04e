"""Hashes that do not depend on how an array is cut, and that see every bit, every position, the shape and the dtype."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hpctrain.boxes import even_intervals, relative, replace_dim, whole
from hpctrain.train import element_hash
from hpctrain.train.element_hash import MODULUS, ElementHash, PartPosition, digest, hash_of, hash_of_all

_MASK = MODULUS - 1


def slow_sum(values: np.ndarray) -> int:
    """The definition, one word after the other, with Python's integers."""
    total = 0
    for position, word in enumerate(values.reshape(-1).view(np.uint32).tolist()):
        x = position << 32 | word
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            x = x * factor & _MASK
            x ^= x >> 32
        total += x
    return total & _MASK


def made(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.random.default_rng(5).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(), (1,), (7, 9), (3, 3, 3, 5), (0, 4)])
def test_it_is_the_sum_of_its_definition(shape: tuple[int, ...], dtype: str) -> None:
    values = made(shape, dtype)
    assert hash_of(values) == digest(slow_sum(values), shape, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("dim", range(3))
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 11])
def test_no_cut_changes_it(dtype: str, dim: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split in any dim, and the flat part of each holder cut again by its owners, in chunks of odd length."""
    monkeypatch.setattr(element_hash, "CHUNK", 13)
    values = made((7, 5, 9), dtype)
    hasher, total = ElementHash(), 0
    for interval in even_intervals(values.shape[dim], parts):
        box = replace_dim(whole(values.shape), dim, interval)
        part = np.ascontiguousarray(values[relative(box, whole(values.shape))]).reshape(-1)
        position = PartPosition.of(values.shape, box)
        for begin, end in even_intervals(part.size, 3):
            total += hasher.sum_of(part[begin:end], begin, position)
    assert total % MODULUS == slow_sum(values)


def test_each_bit_of_each_element_shows() -> None:
    values = made((3, 5), "float32")
    seen = {hash_of(values)}
    for element, bit in itertools.product(range(values.size), range(32)):
        changed = values.copy()
        changed.reshape(-1).view(np.uint32)[element] ^= np.uint32(1 << bit)
        seen.add(hash_of(changed))
    assert len(seen) == 1 + values.size * 32


def test_signs_of_zeros_show_however_many_change() -> None:
    """The changed bit is the highest of each word: what a sum of products alone would be weak for."""
    seen = set()
    for count in range(65):
        values = np.zeros(64, np.float32)
        values[:count] = -0.0
        seen.add(hash_of(values))
    assert len(seen) == 65


def test_elements_that_change_places_show() -> None:
    values = made((2, 3), "float64")
    assert len({hash_of(values[list(order)]) for order in itertools.permutations(range(2))}) == 2
    assert hash_of(np.ascontiguousarray(values[:, ::-1])) != hash_of(values)


def test_shape_and_dtype_are_part_of_it() -> None:
    zeros = [np.zeros(6, "float32"), np.zeros((2, 3), "float32"), np.zeros(3, "float64"), np.zeros((0, 3), "float64")]
    assert len({hash_of(values) for values in zeros}) == len(zeros)


def test_random_changes_give_no_equal_hashes() -> None:
    """A thousand arrays of few different values, as sums of these are equal often."""
    random = np.random.default_rng(3)
    arrays = {array.tobytes(): hash_of(array) for array in random.integers(0, 2, (1000, 12)).astype(np.float32)}
    assert len(set(arrays.values())) == len(arrays)


def test_bits_of_hashes_are_even() -> None:
    """Of many single words, each bit of their numbers is set half of the time: nothing is wasted of the 64."""
    hasher = ElementHash()
    position = PartPosition(1, 0, 0)
    words = np.arange(4096, dtype=np.uint32)
    numbers = np.array([hasher.sum_of(words[k : k + 1], 0, position) for k in range(words.size)], np.uint64)
    shares = [float(((numbers >> np.uint64(bit)) & np.uint64(1)).mean()) for bit in range(64)]
    assert all(0.45 < share < 0.55 for share in shares), shares


def test_a_box_that_is_cut_twice_is_none() -> None:
    with pytest.raises(AssertionError, match="several dims"):
        PartPosition.of((4, 4), ((0, 2), (0, 2)))


def test_one_hash_of_all_knows_names_and_no_order() -> None:
    assert hash_of_all({"a": "1", "b": "2"}) == hash_of_all({"b": "2", "a": "1"})
    assert len({hash_of_all({"a": "1", "b": "2"}), hash_of_all({"a": "2", "b": "1"}), hash_of_all({"a": "1"})}) == 3
