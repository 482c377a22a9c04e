"""Options of the planner's commands: series of ranks, and factors."""

import click
import pytest

from hpctrain.cli.planner_options import Factor, RankSeries, SlowRank, slow_ranks
from hpctrain.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("1,2,...,16", (1, 2, 4, 8, 16)),
        ("3, 6, ..., 24", (3, 6, 12, 24)),
        ("1,10,...,1000,5", (1, 5, 10, 100, 1000)),
        ("1,2,...,2", (1, 2)),
        ("1,2,...,4,8", (1, 2, 4, 8)),
        ("7", (7,)),
    ],
)
def test_dots_go_on_by_the_factor_before_them(text: str, ranks: tuple[int, ...]) -> None:
    assert RankSeries().convert(text, None, None) == ranks


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1,2,...,13", "the nearest number is 16"),
        ("1,2,...,11", "the nearest number is 8"),
        ("1,...,8", "two numbers before the dots"),
        ("1,2,...", "one behind them"),
        ("2,3,...,8", "a whole factor"),
        ("2,2,...,8", "a whole factor"),
        ("1,4,...,2", "a whole factor"),
        ("...", "two numbers before"),
        ("1,2,...,8,...,32", "numbers of ranks"),
        ("0,1", "each at least 1"),
        ("1,two", "numbers of ranks"),
        ("", "numbers of ranks"),
        ("1e3", "numbers of ranks"),
        ("1,2000000", "more than any machine has"),
    ],
)
def test_what_is_no_series_is_told(text: str, words: str) -> None:
    with pytest.raises(click.BadParameter) as error:
        RankSeries().convert(text, None, None)
    assert words in error.value.message


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "x", ""])
def test_a_factor_is_finite_and_above_0(text: str) -> None:
    for convert in (Factor().convert, lambda value, *rest: SlowRank().convert(f"1={value}", *rest)):
        with pytest.raises(click.BadParameter):
            convert(text, None, None)


def test_slow_ranks_are_ranks_of_the_job() -> None:
    pairs = (SlowRank().convert("3=1.5", None, None), SlowRank().convert("0=2", None, None))
    assert slow_ranks(pairs, 4) == {3: 1.5, 0: 2.0}
    with pytest.raises(ConfigError, match="rank 3, but the largest job has 2 ranks; the last is 1"):
        slow_ranks(pairs, 2)
    with pytest.raises(click.BadParameter, match="must be a rank and a factor"):
        SlowRank().convert("-1=2", None, None)
