"""`hpctrain autopsy`: what a job that died or hung did last, and who held the others up. Needs no MPI."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import click

from hpctrain.cli.arguments import FilePath
from hpctrain.core.errors import DataError
from hpctrain.core.text import echo, echo_block, escaped


@click.command()
@click.argument("run", required=False, type=FilePath(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the findings and the state of every rank as JSON.")
def autopsy(run: Path | None, as_json: bool) -> None:
    """Say which rank of a dead job went wrong first, and where.

    RUN is a run directory, or one that holds flight records: what each rank did last, which the system keeps however it ended. By
    default it is the latest start on this machine that ended before it had a run directory.
    """
    from hpctrain.flight import report
    from hpctrain.flight.autopsy import autopsy as findings

    run = _latest_start() if run is None else run
    found = report.find_records(directory_of(run))
    records, notes = found.records, found.notes()
    if as_json:
        echo_block(json.dumps(report.as_json(records, notes), indent=1))
        return
    width = shutil.get_terminal_size().columns
    for sentence in findings(records).sentences:
        echo_block(click.wrap_text(escaped(sentence), width))
    echo()
    for line in _aligned(report.table(records), width):
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
    """Return the directory with the records of the latest start.

    Raises:
        DataError: no start has left records.
    """
    from hpctrain.flight.start_records import RECORDS, latest

    directory = latest(os.environ)
    if directory is None:
        raise DataError(f"No start has left flight records on this machine; give the directory of a run, or set {RECORDS}.")
    echo(f"records of {directory}", err=True)
    return directory


def _logs(run: Path, ranks: list[int]) -> str:
    """Where the log files of ranks lie that have kept some; empty where none has."""
    from hpctrain.rank_spans import spans
    from hpctrain.runs.directory import RunDirectory

    kept = [rank for rank in ranks if RunDirectory(run).log_path(rank).is_file()]
    if not kept:
        return ""
    return f"logs of {'rank' if len(kept) == 1 else 'ranks'} {spans(kept)}: {RunDirectory(run).log_path(kept[0]).parent}"


def directory_of(run: Path) -> Path:
    """Return the directory of a run's records: the one that the run points to, its subdirectory `flight`, or `run` itself.

    Raises:
        DataError: the pointer file is damaged.
    """
    from hpctrain.runs.directory import RunDirectory

    kept = RunDirectory(run).flight_records()
    return kept if kept.is_dir() else run


def _aligned(rows: list[tuple[str, ...]], width: int) -> list[str]:
    """Lines whose cells stand below each other; one that does not fit ends in three dots."""
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
