"""Draws of combinations meet every legal pair, hold nothing that is refused, and repeat."""

import itertools
from collections.abc import Mapping
from itertools import combinations

import pytest

from tests.support.pairwise import draw, most_pairs, pairs_of, shared_out

VALUES = {"a": ("0", "1", "2"), "b": ("0", "1", "2", "3"), "c": ("0", "1"), "d": ("0", "1", "2"), "e": ("0", "1")}


def _nothing(row: Mapping[str, str]) -> str | None:
    return None


def _refusal(row: Mapping[str, str]) -> str | None:
    if row.get("a") == "1" and row.get("b", "0") != "0":
        return "b needs an a that is not 1."
    if {"c", "d", "e"} <= row.keys() and row["c"] == row["e"] == "1" and row["d"] == "2":
        return "c, d and e do not go together."
    return None


@pytest.mark.parametrize("seed", range(5))
def test_every_pair_meets(seed: int) -> None:
    drawn = draw(VALUES, _nothing, seed=seed)
    met = set().union(*(pairs_of(row) for row in drawn.rows))
    assert len(met) == sum(len(VALUES[a]) * len(VALUES[b]) for a, b in combinations(VALUES, 2))
    assert not drawn.refused
    assert len(drawn.rows) <= 20  # 12 at least: those of a and b


@pytest.mark.parametrize("seed", range(5))
def test_what_is_refused_is_listed_with_its_sentence_and_never_drawn(seed: int) -> None:
    drawn = draw(VALUES, _refusal, seed=seed, count=60)
    assert len(drawn.rows) == 60
    assert not any(_refusal(row) for row in drawn.rows)
    assert drawn.refused == {(("a", "1"), ("b", value)): "b needs an a that is not 1." for value in "123"}
    met = set().union(*(pairs_of(row) for row in drawn.rows))
    assert len(met | set(drawn.refused)) == sum(len(VALUES[a]) * len(VALUES[b]) for a, b in combinations(VALUES, 2))


def test_rows_are_chosen_by_pairs_for_their_cost_and_shared_out_evenly() -> None:
    rows = draw(VALUES, _nothing, seed=1, count=60).rows

    def cost(row: Mapping[str, str]) -> float:
        return 5.0 if row["a"] == "2" else 1.0

    chosen = most_pairs(rows, cost, 60.0)
    spent = sum(map(cost, chosen))
    assert spent <= 60
    assert len(set().union(*map(pairs_of, chosen))) == len(set().union(*map(pairs_of, rows)))
    assert cost(chosen[0]) == 1
    blocks = shared_out(chosen, cost, 4)
    assert sorted(map(str, itertools.chain(*blocks))) == sorted(map(str, chosen))
    assert max(sum(map(cost, block)) for block in blocks) <= spent / 4 + 5
