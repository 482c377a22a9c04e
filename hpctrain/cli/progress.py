"""How far a command is: a bar on a terminal, a line now and then in a log, nothing for what is done at once."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hpctrain.core.text import echo

if TYPE_CHECKING:
    from hpctrain.train.progress_bar import ProgressBar

#: between two lines of a log
LINE_SECONDS = 30.0


@contextmanager
def progress(
    description: str, total: int, noun: str = "images", clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int], None]]:
    """While this lasts, standard error shows how many of `total` are done; gives what is to be told of each few more.

    On a terminal that is a bar, of which nothing stays. Elsewhere it is a line every half minute.

    Args:
        noun: what is counted. clock: in seconds.
    """
    if not sys.stderr.isatty():
        yield _Lines(description, total, noun, clock).advance
        return
    from rich.console import Console

    from hpctrain.train.progress_bar import ProgressBar  # loads rich, which takes longer than short commands

    bar = ProgressBar(Console(stderr=True, soft_wrap=True, highlight=False, force_terminal=True), clock, stays=False)
    try:
        bar.begin(description, total)
        yield _Line(bar, description, total, noun, clock).advance
    finally:
        bar.close()


class _Lines:
    """Lines of a log; arguments as of `progress`."""

    def __init__(self, description: str, total: int, noun: str, clock: Callable[[], float]) -> None:
        self._description, self._total, self._noun, self._clock = description, total, noun, clock
        self._done = 0
        self._last = clock()

    def advance(self, count: int) -> None:
        """So many more are done."""
        self._done += count
        if self._clock() - self._last < LINE_SECONDS:
            return
        self._last = self._clock()
        share = f", {self._done / self._total:.1%}" if self._total else ""
        echo(f"{self._description}: {self._done:,} of {self._total:,} {self._noun}{share}", err=True)


class _Line:
    """The line of a bar, with the rate and the time left; arguments as of `progress`."""

    def __init__(self, bar: ProgressBar, description: str, total: int, noun: str, clock: Callable[[], float]) -> None:
        from hpctrain.train.progress_text import TimeLeft

        self._bar, self._description, self._noun, self._clock = bar, description, noun, clock
        self._begin, self._done, self._left = clock(), 0, TimeLeft(0, total, clock)

    def advance(self, count: int) -> None:
        """So many more are done."""
        from hpctrain.train.progress_text import duration_text

        self._done += count
        elapsed, left = self._clock() - self._begin, self._left.seconds(self._done)
        facts = [(1, f"{self._done / elapsed:,.0f} {self._noun}/s")] if elapsed > 0 else []
        self._bar.show(self._description, self._done, facts if left is None else [*facts, (0, f"{duration_text(left)} left")])
