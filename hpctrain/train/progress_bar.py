"""Show progress: estimate the time left, and draw a bar.

rich is loaded only where a bar is drawn.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from hpctrain.core.text import duration_text, fitting

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID


class TimeLeft:
    """Estimates how long the rest takes from how long the work so far took, evaluations and checkpoints included.

    Args:
        done, whole: of the work, in any unit; what was done before now took no time of this run's. clock: in seconds.
    """

    def __init__(self, done: int, whole: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._before, self._whole, self._clock = done, whole, clock
        self._begin = clock()

    def seconds(self, done: int) -> float | None:
        """Return the seconds left; None if this run has not done anything yet."""
        if done <= self._before:
            return None
        pace = (self._clock() - self._begin) / (done - self._before)
        return pace * max(0, self._whole - done)


#: how a pass over samples shows where it is
PassStyle = Literal["bar", "none"]
#: is called with the number of samples that are done
Advance = Callable[[int], None]

# What a bar needs in addition to its facts: itself, the percentage, and the spaces between.
_NARROWEST_BAR = 8
_BAR_ROOM = _NARROWEST_BAR + len(" 100% ") + 2


class ProgressBar:
    """A bar at the bottom of a terminal, until `close`.

    Args:
        console: where it is drawn. clock: in seconds. stays: as it was drawn last, once it is closed.
        over_stdout: what is written to stdout while it is shown appears above it.
    """

    def __init__(
        self,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
        *,
        stays: bool = True,
        over_stdout: bool = True,
    ) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn  # some dozen files for a bar alone

        self._console, self._clock = console, clock
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            refresh_per_second=4,
            expand=True,
            transient=not stays,
            redirect_stdout=over_stdout,
        )
        self._task: TaskID | None = None
        self._progress.start()

    def begin(self, description: str, total: int, done: int = 0) -> None:
        """Let the line show this work from now on. total, done: in any unit."""
        self._task = self._progress.add_task(description, total=total, completed=done, note="")

    def show(self, description: str, done: int, facts: Sequence[tuple[int, str]]) -> None:
        """Show the work at the next redrawing. facts: as `fitting` takes; those without room are left out."""
        assert self._task is not None, "it has begun"
        note = fitting(facts, self._console.width - len(description) - _BAR_ROOM)
        self._progress.update(self._task, description=description, completed=done, note=note)

    @contextmanager
    def pass_over(self, description: str, samples: int) -> Iterator[Advance]:
        """Let the line show a pass over `samples` samples during the block, and then its former work again."""
        before = self._task
        if before is not None:
            self._progress.update(before, visible=False)
        self.begin(description, samples)
        task, left, begin = self._task, TimeLeft(0, samples, self._clock), self._clock()
        assert task is not None
        try:
            yield lambda done: self.show(description, done, _facts(done, left, self._clock() - begin))
        finally:
            self._progress.remove_task(task)
            self._task = before
            if before is not None:
                self._progress.update(before, visible=True)

    def close(self) -> None:
        """End the line; may be called twice."""
        self._progress.stop()


def _facts(done: int, left: TimeLeft, elapsed_seconds: float) -> list[tuple[int, str]]:
    """Return the rate of a pass and the time that it has left."""
    facts = [(1, f"{done / elapsed_seconds:,.0f} images/s")] if done and elapsed_seconds > 0 else []
    seconds = left.seconds(done)
    return facts if seconds is None else [*facts, (0, f"{duration_text(seconds)} left")]


@contextmanager
def pass_on_stderr(style: PassStyle | None, samples: int, *, visible: bool, description: str) -> Iterator[Advance]:
    """Show a pass over `samples` samples on stderr during the block; nothing of it stays, and stdout is unaffected.

    Args:
        style: None: a bar where stderr is a terminal, nothing elsewhere; "bar": one there, too. visible: False on ranks that show
            nothing.
    """
    shown = style == "bar" or (style is None and sys.stderr.isatty())
    if not (visible and shown):
        yield _nothing
        return
    from rich.console import Console

    # Nothing is cut, and what a terminal gets from stdout stands above the line.
    console = Console(stderr=True, soft_wrap=True, highlight=False, force_terminal=True)
    bar = ProgressBar(console, stays=False, over_stdout=sys.stdout.isatty())
    try:
        with bar.pass_over(description, samples) as advance:
            yield advance
    finally:
        bar.close()


def _nothing(done: int) -> None:
    """No-op callback."""
