"""`hpctrain compare`: runs side by side, on a terminal. Needs no MPI."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from hpctrain.cli.arguments import FilePath, OutputFile
from hpctrain.core.text import echo_block


@click.command()
@click.argument("runs", metavar="RUN RUN...", nargs=-1, required=True, type=FilePath(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
@click.option("--out", type=OutputFile(streams=True), help="File to which the report of all runs is written, too.")
def compare(runs: tuple[Path, ...], as_json: bool, out: Path | None) -> None:
    """Compare runs: results, differences, and where bits part.

    Each RUN is a run directory. Bits are compared by the hashes that runs keep every few steps (hashes.every_steps), and by
    checkpoints of the same step, tensor by tensor.
    """
    from hpctrain.core.errors import ConfigError

    if len(runs) < 2:
        raise ConfigError("One run cannot be compared; give two run directories or more, or use `hpctrain report`.")
    from hpctrain.report.comparison import compared
    from hpctrain.report.comparison_text import lines

    comparison = compared(runs)
    if as_json:
        echo_block(json.dumps(comparison.to_json(), indent=1))
    else:
        from hpctrain.core.console import PlainConsole

        console = PlainConsole(width=None if sys.stdout.isatty() else 80)
        for renderable in lines(comparison):
            console.print(renderable)
    if out is not None:
        from hpctrain.cli.runs import write_report
        from hpctrain.report.figures import check_matplotlib

        check_matplotlib()
        write_report(runs, out, None)
