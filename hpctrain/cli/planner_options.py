"""Arguments and options that the commands of the planner share, and checks of the files that they are to write."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import click

from hpctrain.cli.arguments import FilePath
from hpctrain.cli.bench import RankCounts
from hpctrain.core.errors import ConfigError

ELLIPSIS = "..."
_MOST_RANKS = 1_000_000


class RankSeries(RankCounts):
    """Numbers of ranks: 1,2,4 or 1,2,...,8192, where each number is as many times the one before as the second is the first."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in str(value).split(",")]
        if ELLIPSIS in words:
            place = words.index(ELLIPSIS)
            words[place : place + 1] = self._between(words, place, str(value), param, ctx)
        counts = super().convert(",".join(words), param, ctx)
        if counts[-1] > _MOST_RANKS:
            self.fail(f"{counts[-1]} ranks are more than any machine has; the most are {_MOST_RANKS}", param, ctx)
        return counts

    def _between(
        self, words: list[str], place: int, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[str]:
        """The numbers that the dots stand for."""
        around = words[max(0, place - 2) : place] + words[place + 1 : place + 2]
        if len(around) < 3 or not all(word.isdecimal() and int(word) >= 1 for word in around):
            self.fail(f"{value!r} must have two numbers before the dots and one behind them, as 1,2,...,8192", param, ctx)
        first, second, last = map(int, around)
        if second <= first or second % first or last < second:
            self.fail(f"{value!r} must grow by a whole factor up to the dots and beyond, as 1,2,...,8192", param, ctx)
        factor, count, counts = second // first, second, []
        while count * factor < last:
            count *= factor
            counts.append(str(count))
        if count * factor != last and count != last:
            nearest = count * factor if last - count > count * factor - last else count
            self.fail(f"{value!r} does not reach {last} by factors of {factor}; the nearest number is {nearest}", param, ctx)
        return counts


class Factor(click.FloatRange):
    """A finite number above 0."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        factor = float(super().convert(value, param, ctx))
        if not math.isfinite(factor):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return factor


class SlowRank(click.ParamType):
    """A rank and how many times longer its compute takes, as 3=1.5."""

    name = "rank=factor"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        if isinstance(value, tuple):
            return value
        rank, _, factor = str(value).partition("=")
        if not rank.strip().isdecimal():
            self.fail(f"{value!r} must be a rank and a factor, as 3=1.5", param, ctx)
        return int(rank), Factor().convert(factor, param, ctx)


MACHINE = click.option(
    "--machine",
    type=FilePath(),
    required=True,
    metavar="FILE|NAME",
    help="Machine to plan for: a file that `hpctrain calibrate` wrote, or the name of one that is installed.",
)
BANDWIDTH = click.option(
    "--bandwidth", type=Factor(), default=1.0, help="Factor on the bandwidth of the machine's links, to ask what if."
)
LATENCY = click.option(
    "--latency", type=Factor(), default=1.0, help="Factor on the latency of the machine's links, to ask what if."
)
COMPUTE = click.option(
    "--compute", type=Factor(), default=1.0, help="Factor on the speed at which ranks compute, to ask what if."
)
IMAGE = click.option(
    "--image",
    nargs=3,
    type=click.IntRange(min=1),
    metavar="H W C",
    help="Size of the images as the network sees them; by default that of the training file's, augmented, or the model's own "
    "where there is no such file.",
)
CLASSES = click.option(
    "--classes",
    type=click.IntRange(min=1),
    help="Number of classes; by default that of the training file, or the model's own where there is no such file.",
)


def slow_ranks(pairs: tuple[tuple[int, float], ...], most_ranks: int) -> Mapping[int, float]:
    """The factors by rank.

    Raises:
        ConfigError: a rank that no simulated job has.
    """
    for rank, _ in pairs:
        if rank >= most_ranks:
            raise ConfigError(
                f"--slow names rank {rank}, but the largest job has {most_ranks} ranks; the last is {most_ranks - 1}."
            )
    return dict(pairs)
