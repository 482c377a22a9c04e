"""The numbers of ranks that `hpctrain bench scaling` takes."""

from __future__ import annotations

import click
import pytest

from hpctrain.cli.bench_scaling import RankCounts


@pytest.mark.parametrize(("text", "counts"), [("1", (1,)), ("1,2,4", (1, 2, 4)), ("8, 4,4", (4, 8))])
def test_numbers_are_read_each_once_in_order(text: str, counts: tuple[int, ...]) -> None:
    assert RankCounts().convert(text, None, None) == counts


@pytest.mark.parametrize("text", ["", "0", "1,-2", "two", "1,,2", "1.5"])
def test_what_is_no_number_of_ranks_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        RankCounts().convert(text, None, None)
