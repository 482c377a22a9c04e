"""The view that judges are given: nodes, and ranks in words."""

from __future__ import annotations

import pytest

from hpctrain.doctor.check import nothing, present
from tests.support.doctored import view


def test_nodes_have_their_ranks() -> None:
    assert view(2, 1, 3).nodes == {0: [0, 1], 1: [2], 2: [3, 4, 5]}


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([0, 1, 2], ""),
        ([2], " on rank 2 (nid1)"),
        ([0, 1], " on ranks 0-1 (nid0)"),
        ([1, 2], " on ranks 1-2 (2 nodes, the first is nid0)"),
    ],
)
def test_ranks_are_told_with_their_hosts(ranks: list[int], words: str) -> None:
    assert view(2, 1).on(ranks) == words


def test_facts_of_ranks_that_looked() -> None:
    assert present([None, 0, None, "x"]) == [(1, 0), (3, "x")]
    assert nothing(object()) is None
