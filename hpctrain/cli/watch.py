"""`hpctrain watch`: follows a run from another shell, by the files in its directory. Needs no MPI and writes nothing."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.arguments import FilePath, Seconds

if TYPE_CHECKING:
    from rich.console import Console

    from hpctrain.runs.state import RunReader, RunState
    from hpctrain.runs.directory import RunDirectory

_RUNS = Path("runs")


@click.command()
@click.argument("run", required=False, type=FilePath(path_type=Path))
@click.option(
    "--runs",
    type=FilePath(file_okay=False, path_type=Path),
    default=_RUNS,
    show_default=True,
    help="Directory whose newest run is followed where no RUN is given.",
)
@click.option("--once", is_flag=True, help="Show the run as it is now and end.")
@click.option(
    "--interval",
    type=Seconds(min=0.1),
    default=1.0,
    show_default=True,
    help="Look again after so many seconds.",
)
def watch(run: Path | None, runs: Path, once: bool, interval: float) -> None:
    """Follow a run from another shell until it ends.

    RUN is a run directory, by default the newest one. Nothing is written to it. Where the output is no terminal, each news is
    a line.
    """
    from hpctrain.cli.watch_screen import COLUMNS
    from hpctrain.core.console import PlainConsole
    from hpctrain.runs.state import RunReader

    reader = RunReader(_directory(run, runs), follows=not once)
    console = PlainConsole(width=None if sys.stdout.isatty() else COLUMNS)
    if once:
        _show(reader.read(time.time()), console)
        return
    try:
        follow = _redraw if console.is_terminal else _lines
        follow(reader, console, interval)
    except KeyboardInterrupt:  # the usual end of somebody who looks
        return


def _directory(run: Path | None, runs: Path) -> RunDirectory:
    """The run to follow.

    Raises:
        CheckpointError: there is none.
    """
    from hpctrain.core.errors import CheckpointError
    from hpctrain.runs import directory

    if run is not None:
        return directory.RunDirectory.open(run)
    for newest in directory.runs(runs, None):
        return newest
    raise CheckpointError(f"There is no run in {runs}; give the directory of one, or that of all by --runs.")


def _show(state: RunState, console: Console) -> None:
    from hpctrain.cli.watch_screen import screen

    console.print(screen(state, console))


def _redraw(reader: RunReader, console: Console, interval: float) -> None:
    """A screen that is drawn again until the run ends, and stays then."""
    from rich.live import Live

    from hpctrain.cli.watch_screen import screen

    with Live(console=console, auto_refresh=False) as live:
        while True:
            state = reader.read(time.time())
            live.update(screen(state, console), refresh=True)
            if state.end is not None:
                return
            time.sleep(interval)


def _lines(reader: RunReader, console: Console, interval: float) -> None:
    """A line for each record of steps, epochs and evaluations and for each event, then the last screen."""
    from hpctrain.cli.watch_screen import news

    known = 0
    while True:
        state = reader.read(time.time())
        known = min(known, len(state.records))  # a resume cuts the metrics
        for line in news(state.records[known:]):
            console.print(line, soft_wrap=True)
        known = len(state.records)
        if state.end is not None:
            console.print()
            _show(state, console)
            return
        sys.stdout.flush()
        time.sleep(interval)
