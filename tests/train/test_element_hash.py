"""Hashes that do not depend on how an array is cut, and that see every bit, every position, the shape and the dtype."""

from __future__ import annotations

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


def test_shape_and_dtype_are_part_of_it() -> None:
    zeros = [np.zeros(6, "float32"), np.zeros((2, 3), "float32"), np.zeros(3, "float64"), np.zeros((0, 3), "float64")]
    assert len({hash_of(values) for values in zeros}) == len(zeros)


def test_a_box_that_is_cut_twice_is_none() -> None:
    with pytest.raises(AssertionError, match="several dims"):
        PartPosition.of((4, 4), ((0, 2), (0, 2)))


def test_one_hash_of_all_knows_names_and_no_order() -> None:
    assert hash_of_all({"a": "1", "b": "2"}) == hash_of_all({"b": "2", "a": "1"})
    assert len({hash_of_all({"a": "1", "b": "2"}), hash_of_all({"a": "2", "b": "1"}), hash_of_all({"a": "1"})}) == 3
