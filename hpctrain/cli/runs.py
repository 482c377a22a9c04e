"""The commands that read run directories: `hpctrain autopsy`, `watch`, `trace`, `report` and `compare`.

Only `report --test` needs MPI.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.arguments import RUNS, FilePath, Finite, OutputFile, newest_runs
from hpctrain.core.errors import DataError
from hpctrain.core.text import echo, echo_block, escaped, size_text
from hpctrain.launch.launcher import detect
from hpctrain.launch.threads import set_threads
from hpctrain.process.ends import job_ends_on_error
from hpctrain.process.rank import RankProcess

if TYPE_CHECKING:
    from rich.console import Console

    from hpctrain.config.schema import Config
    from hpctrain.core.yaml_source import Source
    from hpctrain.report.page import JudgedSet
    from hpctrain.runs.state import RunReader, RunState


@click.command()
@click.argument("run", required=False, type=FilePath(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the findings and the state of every rank as JSON.")
def autopsy(run: Path | None, as_json: bool) -> None:
    """Name the rank of a dead job that failed first.

    RUN is a run directory, or a directory of flight records. Flight records contain the last actions of each rank and survive a
    crash. The default is the newest run in `runs`, or a later start on this machine that ended before it created a run directory.
    """
    from hpctrain.flight import autopsy as report
    from hpctrain.flight.autopsy import autopsy as findings

    run = _latest_start() if run is None else run
    from hpctrain.runs.directory import RunDirectory, flight_directory, stored_checkpoints

    found = report.find_records(flight_directory(run))
    records, notes = found.records, found.notes()
    if as_json:
        echo_block(json.dumps(report.autopsy_json(records, notes), indent=1))
        return
    width = shutil.get_terminal_size().columns
    for sentence in findings(records).sentences:
        echo_block(click.wrap_text(escaped(sentence), width))
    if any(record.gone for record in records) and stored_checkpoints(RunDirectory(run).checkpoints):
        echo_block(click.wrap_text("`hpctrain train FILE --resume auto` continues from the newest checkpoint.", width))
    echo()
    for line in _aligned(report.rank_table(records), width):
        echo(line)
    for record in records:
        if record.sentence:
            echo_block(click.wrap_text(escaped(f"rank {record.rank}: {record.sentence}"), width, subsequent_indent="  "))
    for note in notes:
        echo_block(click.wrap_text(escaped(f"note: {note}"), width, subsequent_indent="  "))
    logs = _logs(run, [record.rank for record in records])
    if logs:
        echo(logs)


def _latest_start() -> Path:
    """Return the newest run with flight records, or the flight directory of the latest start if that is newer or set by the user.

    Raises:
        DataError: there are no records.
    """
    from hpctrain.flight.start_records import RECORDS, latest
    from hpctrain.runs.directory import flight_directory, runs

    newest = next((run.path for run in runs(RUNS, None) if run.flight_records().is_dir()), None)
    start, named = latest(os.environ, ended=newest is not None), bool(os.environ.get(RECORDS))
    if newest is None or (start is not None and (named or _changed(start) > _changed(flight_directory(newest)))):
        newest = start
    if newest is None:
        raise DataError(
            f"There are no flight records of a run in {RUNS.absolute()} or of a start on this machine; give a run directory, or "
            f"set {RECORDS}."
        )
    echo(f"records of {newest}", err=True)
    return newest


def _changed(directory: Path) -> float:
    """Return the time of the latest change in a directory; 0 if it no longer exists."""
    with contextlib.suppress(OSError):
        return max(entry.stat().st_mtime for entry in [directory, *directory.iterdir()])
    return 0.0


def _logs(run: Path, ranks: list[int]) -> str:
    """Return a line with the directory of the ranks' log files; empty if there are none."""
    from hpctrain.core.text import spans
    from hpctrain.runs.directory import RunDirectory

    kept = [rank for rank in ranks if RunDirectory(run).log_path(rank).is_file()]
    if not kept:
        return ""
    return f"logs of {'rank' if len(kept) == 1 else 'ranks'} {spans(kept)}: {RunDirectory(run).log_path(kept[0]).parent}"


def _aligned(rows: list[tuple[str, ...]], width: int) -> list[str]:
    """Return lines with aligned cells. A line that does not fit is cut off and ends in three dots."""
    numbers = (0, 3, 5, 7)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = (
            cell.rjust(widths[column]) if column in numbers else cell.ljust(widths[column]) for column, cell in enumerate(row)
        )
        line = "  ".join(cells).rstrip()
        lines.append(line if len(line) <= width else f"{line[: width - 3]}...")
    return lines


@click.command()
@click.argument("run", required=False, type=FilePath(path_type=Path))
@click.option(
    "--runs",
    type=FilePath(file_okay=False, path_type=Path),
    default=RUNS,
    show_default=True,
    help="Directory of runs, which is searched if RUN is missing.",
)
@click.option("--once", is_flag=True, help="Show the current state once and exit.")
@click.option(
    "--interval",
    type=Finite(min=0.1),
    default=1.0,
    show_default=True,
    help="Interval between updates, in seconds.",
)
def watch(run: Path | None, runs: Path, once: bool, interval: float) -> None:
    """Follow a run from another shell until it ends.

    RUN is a run directory; default: the newest one in --runs that is training or, if none is, the newest one. The run is only
    read. If the output is not a terminal, each event is printed as a line.
    """
    from hpctrain.cli.watch_screen import COLUMNS
    from hpctrain.core.console import output_console
    from hpctrain.runs.directory import RunDirectory
    from hpctrain.runs.state import RunReader, is_training

    reader = RunReader(RunDirectory.open(run or newest_runs(directory=runs, prefers=is_training)[0]), follows=not once)
    console = output_console(COLUMNS)
    if once:
        _show(reader.read(time.time()), console)
        return
    try:
        follow = _redraw if console.is_terminal else _lines
        follow(reader, console, interval)
    except KeyboardInterrupt:  # the usual end of `watch`
        return


def _show(state: RunState, console: Console) -> None:
    from hpctrain.cli.watch_screen import screen

    console.print(screen(state, console))


def _redraw(reader: RunReader, console: Console, interval: float) -> None:
    """Redraw the screen at intervals until the run ends. The last screen remains."""
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
    """Print a line for each record of steps, epochs and evaluations and for each event, then the last screen."""
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


@click.command()
@click.argument("run", required=False, type=FilePath(path_type=Path))
@click.option("--all", "whole", is_flag=True, help="Print all rows; by default, the smallest are summed into one row.")
def trace(run: Path | None, whole: bool) -> None:
    """Show where the time of a traced run went.

    RUN is the directory of a run with trace=true. The default is the newest run in `runs`. Rows are sorted by time, the longest
    first.
    """
    from hpctrain.core.errors import DataError, errors_as
    from hpctrain.core.files import json_object, read_bytes
    from hpctrain.trace import time_table, time_table_text

    if run is None:
        run = newest_runs()[0]
        echo(f"run {run}", err=True)
    path = run / "time_table.json"
    if not path.is_file():
        raise DataError(
            f"{run.absolute()} contains no time_table.json; give the directory of a run with trace=true that has ended."
        )
    text = read_bytes(path)
    with errors_as(DataError, lambda why: f"{path} is not a time table of this version of hpctrain; trace the run again."):
        content = json_object(text) or {}
        table, facts = time_table.from_json(content["table"]), (float(content["clock_error_seconds"]), int(content["ranks"]))
    width = shutil.get_terminal_size((time_table_text.COLUMNS, 0)).columns
    for line in time_table_text.lines(table, *facts, width, None if whole else time_table_text.LINES):
        echo(line)


_MOST_PICTURES = 24


@click.command()
@click.argument("runs", metavar="[RUN]...", nargs=-1, type=FilePath(path_type=Path))
@click.option(
    "--out",
    type=OutputFile(streams=True, of_job=True),
    help="File to write; default: report.html in the directory of a single RUN, or in the current directory for several.",
)
@click.option(
    "--test",
    "judges",
    is_flag=True,
    help="Evaluate a single RUN's newest checkpoint on the test set or, if data.test is not set, on the validation set, and add "
    "the confusion matrix and correctly and wrongly classified images.",
)
def report(runs: tuple[Path, ...], out: Path | None, judges: bool) -> None:
    """Write an HTML report of one or more runs.

    The report is one file that needs no network: curves, the time table of a traced run, events, checkpoints, the configuration,
    and its differences between runs. RUN is a run directory. The default is the newest run in `runs`. The run may still be in
    progress.
    """
    from hpctrain.core.errors import ConfigError
    from hpctrain.report.figures import check_matplotlib

    runs = runs or tuple(newest_runs())
    if judges and len(runs) > 1:
        raise ConfigError(f"--test evaluates a single run, but {len(runs)} are given; give one, or leave --test out.")
    check_matplotlib()
    target = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    if not judges:
        write_report(runs, target)
        return
    job = RankProcess()
    with job_ends_on_error(job.rank, job.abort, job.failed):
        results = _judged(job, runs[0])
        if job.rank() == 0:
            write_report(runs, target, results)
        job.finish()


def _judged(job: RankProcess, run: Path) -> list[JudgedSet]:
    """Return the results on a run's test or validation set. Collective over all ranks."""

    def read() -> tuple[Config, Source]:
        set_threads(detect(os.environ), None)  # before NumPy is loaded
        if job.rank() == 0:
            import matplotlib.font_manager  # noqa: F401  may start a process to list fonts, which is unsafe once MPI runs
        from hpctrain.run.stored_run import find_run

        return find_run(str(run), run.parent).parsed(())

    session = job.session(read)
    from hpctrain.report.page import result_of
    from hpctrain.run.evaluation import judge

    return [result_of(run.resolve().name, judge(session, str(run), _MOST_PICTURES))]


def write_report(runs: Sequence[Path], target: Path, results: Sequence[JudgedSet] = ()) -> None:
    """Write the report, and print its path and size.

    Raises:
        ConfigError: the file cannot be written.
        CheckpointError, ConfigError, DataError: as for `read_runs`.
    """
    from hpctrain.core.errors import ConfigError
    from hpctrain.report.page import html, report_page
    from hpctrain.runs.results import read_runs
    from hpctrain.storage.atomic_write import write_text

    text = html(report_page(read_runs(runs), results))
    try:
        write_text(target, text)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written ({error.strerror or error}); give another path.") from error
    echo(f"{target}: {size_text(len(text.encode()))}")


@click.command()
@click.argument("runs", metavar="[RUN RUN]...", nargs=-1, type=FilePath(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def compare(runs: tuple[Path, ...], as_json: bool) -> None:
    """Compare runs: results, configurations, first difference.

    Each RUN is a run directory. The default is the two newest runs in `runs`. The first bitwise difference is found with the
    hashes that runs record every few steps (hashes.every_steps), and with checkpoints of the same step, tensor by tensor.
    """
    from hpctrain.core.errors import ConfigError

    runs = runs or tuple(newest_runs(2))
    if len(runs) < 2:
        raise ConfigError("A comparison needs at least two runs; give two run directories, or use `hpctrain report`.")
    from hpctrain.cli.result_tables import comparison_lines
    from hpctrain.runs.comparison import compared

    comparison = compared(runs)
    if as_json:
        echo_block(json.dumps(comparison.to_json(), indent=1))
        return
    from hpctrain.core.console import output_console

    console = output_console()
    with console.capture() as printed:
        for renderable in comparison_lines(comparison, console.width):
            console.print(renderable, soft_wrap=isinstance(renderable, str))  # strings are wrapped already
    echo_block("\n".join(line.rstrip() for line in printed.get().splitlines()))
