"""How far a command is: a bar on a terminal, a line now and then in a log, nothing for what is done at once."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

#: between two lines of a log
LINE_SECONDS = 30.0


@contextmanager
def progress(description: str, total: int, clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[[int], None]]:
    """While this lasts, standard error shows how many of `total` images are done; gives what is to be told of each few more.

    On a terminal that is a bar, of which nothing stays. Elsewhere it is a line every half minute.
    """
    if sys.stderr.isatty():
        from hpctrain.train.progress_bar import pass_on_stderr  # loads rich, which takes longer than short commands

        with pass_on_stderr("bar", total, visible=True, description=description) as show:
            done = 0

            def advance(count: int) -> None:
                nonlocal done
                done += count
                show(done)

            yield advance
        return
    yield _Lines(description, total, clock).advance


class _Lines:
    """Lines of a log. total: images. clock: in seconds."""

    def __init__(self, description: str, total: int, clock: Callable[[], float]) -> None:
        self._description, self._total, self._clock = description, total, clock
        self._done = 0
        self._last = clock()

    def advance(self, count: int) -> None:
        """So many more are done."""
        self._done += count
        if self._clock() - self._last < LINE_SECONDS:
            return
        self._last = self._clock()
        share = f", {self._done / self._total:.1%}" if self._total else ""
        click.echo(f"{self._description}: {self._done:,} of {self._total:,} images{share}", err=True)
