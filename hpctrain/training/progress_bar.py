"""Estimate the remaining time, and draw a progress bar.

rich is imported only if a bar is drawn.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from hpctrain.core.text import fitting

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID


class TimeLeft:
    """Estimate of the remaining time from the pace so far, including evaluations and checkpoints.

    The pace excludes the work before the first report, because its time includes the start-up.

    Args:
        done: work done before this run, in any unit; excluded from the pace.
        whole: total work, in the same unit.
        clock: function that returns seconds.
    """

    def __init__(self, done: int, whole: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._before, self._whole, self._clock = done, whole, clock
        self._begin: float | None = None

    def seconds(self, done: int) -> float | None:
        """Return the estimated remaining seconds; None until this run has reported progress twice, or all work as done."""
        if done <= self._before:
            return None
        if self._begin is None:
            self._before, self._begin = done, self._clock()
            return 0.0 if done >= self._whole else None
        pace = (self._clock() - self._begin) / (done - self._before)
        return pace * max(0, self._whole - done)


#: style of the progress display of a pass over samples
PassStyle = Literal["bar", "none"]
#: callback, called with the number of samples done
Advance = Callable[[int], None]

# Columns that a bar needs in addition to its facts: the bar, the percentage, and the spaces between.
_NARROWEST_BAR = 8
_BAR_ROOM = _NARROWEST_BAR + len(" 100% ") + 2


class ProgressBar:
    """Bar at the bottom of a terminal, which `close` erases.

    Output to stdout appears above the bar.
    """

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn  # slow to import

        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None, complete_style="magenta", finished_style="green"),  # 16-colour terminals show both
            TaskProgressColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            refresh_per_second=4,
            expand=True,
            transient=True,
        )
        self._task: TaskID | None = None
        self._progress.start()

    def begin(self, description: str, total: int, done: int = 0) -> None:
        """Show a new task; `total` and `done` are amounts of work in any unit."""
        self._task = self._progress.add_task(description, total=total, completed=done, note="")

    def show(self, description: str, done: int, facts: Sequence[tuple[int, str]]) -> None:
        """Update the task at the next redraw.

        Args:
            facts: facts in the form of `core.text.fitting`; the least important are omitted if the line is too short.
        """
        assert self._task is not None, "call begin first"
        note = fitting(facts, self._console.width - len(description) - _BAR_ROOM)
        self._progress.update(self._task, description=description, completed=done, note=note)

    @contextmanager
    def pass_over(self, description: str, samples: int) -> Iterator[Advance]:
        """Show a pass over `samples` samples during the block, then the previous task again."""
        before = self._task
        if before is not None:
            self._progress.update(before, visible=False)
        self.begin(description, samples)
        task = self._task
        assert task is not None
        try:
            yield lambda done: self.show(description, done, ())
        finally:
            self._progress.remove_task(task)
            self._task = before
            if before is not None:
                self._progress.update(before, visible=True)

    def close(self) -> None:
        """Stop drawing. A second call has no effect."""
        self._progress.stop()


@contextmanager
def pass_on_stderr(style: PassStyle | None, samples: int, *, visible: bool, description: str) -> Iterator[Advance]:
    """Show a pass over `samples` samples on stderr during the block, then erase it. stdout is not affected.

    Args:
        style: "bar": always a bar; "none": no bar; None: a bar if stderr is a terminal.
        visible: whether this rank shows anything.
    """
    shown = style == "bar" or (style is None and sys.stderr.isatty())
    if not (visible and shown):
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console = Console(stderr=True, force_terminal=True)
    # Output of stdout to the same terminal appears above the bar.
    with Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task(description, total=samples)
        yield lambda done: bar.update(task, completed=done)
