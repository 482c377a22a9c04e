"""`hpctrain trace`: the time table of a traced run once more, whole or on one screen. Needs no MPI."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from hpctrain.cli.arguments import FilePath
from hpctrain.core.text import echo


@click.command()
@click.argument("run", type=FilePath(path_type=Path))
@click.option("--all", "whole", is_flag=True, help="Print all rows, where by default the lightest are summed up in one.")
def trace(run: Path, whole: bool) -> None:
    """Show where the time of a traced run went.

    RUN is the directory of a run with trace=true. Rows that took most of a step come first.
    """
    from hpctrain.core.errors import DataError
    from hpctrain.core.files import json_object, read_bytes
    from hpctrain.trace import time_table, time_table_text

    path = run / "time_table.json"
    if not path.is_file():
        raise DataError(f"{run} holds no time_table.json; give the directory of a run with trace=true that has ended.")
    try:
        content = json_object(read_bytes(path)) or {}
        table, facts = time_table.from_json(content["table"]), (float(content["clock_error_seconds"]), int(content["ranks"]))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} is no time table of this version; trace the run again.") from error
    width = shutil.get_terminal_size((time_table_text.COLUMNS, 0)).columns
    for line in time_table_text.lines(table, *facts, width, None if whole else time_table_text.LINES):
        echo(line)
