"""Norms in one order: the same bits however the elements are shared out among ranks and slices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.averaging.slices import cut, fused
from hpctrain.averaging.tree_norms import BLOCK, TreeNorms
from hpctrain.nn.parameter import FlatGroup, ParameterSpec
from hpctrain.optim.base import Norms

SIZES = (3, 5 * BLOCK + 7, 0, 40, 2 * BLOCK - 50, BLOCK)


def _nothing(*arguments: Any) -> np.ndarray:
    return np.zeros(0)


def _group() -> FlatGroup:
    specs = {f"p{i}": ParameterSpec((size,), _nothing) for i, size in enumerate(SIZES)}
    group = FlatGroup(specs, "float64")
    random = np.random.default_rng(0)
    for flat in (group.data, group.grad):
        flat[...] = random.standard_normal(group.size) * 10.0 ** random.integers(-3, 4, group.size)
    return group


def _whole(group: FlatGroup) -> np.ndarray:
    norms = TreeNorms(group, [(0, group.size)])
    norms.clear(slice(None))
    norms.add_partial(group, group.segments)
    norms.complete(slice(None))
    return norms.squares


@given(st.integers(1, 9), st.integers(1, 8 * BLOCK), st.integers(50, 8 * BLOCK))
def test_any_slices_on_any_ranks_have_the_bits_of_one(ranks: int, least: int, most: int) -> None:
    group = _group()
    slices = cut(group, fused(group, least), most, BLOCK)
    assert sum(sum(piece.counts(ranks)) for piece in slices) == group.size
    parts = [piece.part(rank, ranks) for piece in slices for rank in range(ranks)]
    of_ranks = [TreeNorms(group, parts) for _ in range(ranks)]
    for rank, norms in enumerate(of_ranks):
        norms.clear(slice(None))
        for piece in slices:
            norms.add_partial(group, group.covering(*piece.part(rank, ranks)))
    total = np.sum([norms.message(slice(None)) for norms in of_ranks], axis=0)
    of_ranks[0].message(slice(None))[...] = total
    of_ranks[0].complete(slice(None))
    assert of_ranks[0].squares.tobytes() == _whole(group).tobytes()


def test_they_are_the_norms() -> None:
    group = _group()
    plain = Norms(group)
    plain.add_partial(group, group.segments)
    assert np.allclose(_whole(group), plain.squares, rtol=1e-13, atol=0)
    assert _whole(group).tobytes() != plain.squares.tobytes()  # another order: bits are compared for a reason


def test_some_places_are_cleared_summed_and_completed_alone() -> None:
    group = _group()
    norms = TreeNorms(group, [(0, group.size)])
    norms.add_partial(group, group.segments)
    norms.complete(slice(None))
    before = norms.squares.copy()
    norms.clear(slice(1, 3))
    assert not norms.message(slice(1, 3)).any()
    assert norms.message(slice(3, 6)).all()
    norms.complete(slice(1, 3))
    assert not norms.squares[1:3].any()
    assert np.array_equal(norms.squares[3:], before[3:])


def test_a_part_that_cuts_a_term_is_a_bug() -> None:
    group = _group()
    with pytest.raises(AssertionError, match="ends inside of a term"):
        TreeNorms(group, [(0, BLOCK + 1)])
