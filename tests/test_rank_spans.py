"""Ranks as people write them, and back."""

import pytest

from hpctrain.rank_spans import ranks_of, spans


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((), ""), ((3,), "3"), ((0, 1), "0-1"), ((5, 0, 2, 1), "0-2, 5"), ((0, 2, 4), "0, 2, 4"), (tuple(range(1000)), "0-999")],
)
def test_there_and_back(ranks: tuple[int, ...], text: str) -> None:
    assert spans(ranks) == text
    assert ranks_of(text) == tuple(sorted(ranks))
