"""`hpctrain bench scaling`: the same training on several numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hpctrain.cli.arguments import OVERRIDES, FilePath, OutputFile, Seconds
from hpctrain.core.text import echo


class RankCounts(click.ParamType):
    """Numbers of ranks, as 1,2,4."""

    name = "ranks"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in str(value).split(",")]
        if not all(word.isdecimal() and int(word) >= 1 for word in words):
            self.fail(f"{value!r} must be numbers of ranks, each at least 1, such as 1,2,4", param, ctx)
        return tuple(sorted({int(word) for word in words}))


@click.command()
@OVERRIDES
@click.option(
    "--config", "file", type=FilePath(dir_okay=False, path_type=Path), required=True, help="Configuration file to train."
)
@click.option("--ranks", type=RankCounts(), required=True, help="Numbers of ranks to compare, such as 1,2,4.")
@click.option(
    "--mode",
    type=click.Choice(["weak", "strong"]),
    default="weak",
    show_default=True,
    help="Meaning of the configured batch: each rank's own (weak), or shared by all ranks (strong).",
)
@click.option(
    "--steps",
    type=click.IntRange(min=2),
    default=20,
    show_default=True,
    help="Number of steps per run; the first one is not counted.",
)
@click.option(
    "--launcher",
    metavar="COMMAND",
    help='Command that starts a job, such as "srun -n {ranks}"; by default the mpiexec beside this Python.',
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Number of threads per rank; by default this machine's cores over the most ranks.",
)
@click.option(
    "--machine",
    type=FilePath(),
    metavar="FILE|NAME",
    help="Machine that steps are predicted with, a file of `hpctrain calibrate` or an installed one; by default each job "
    "measures its links.",
)
@click.option(
    "--out",
    type=OutputFile(streams=True),
    default=Path("scaling.json"),
    show_default=True,
    help="File to which all figures are written as JSON; the plot is written beside it.",
)
@click.option(
    "--timeout-seconds",
    type=Seconds(min=1),
    default=3600.0,
    show_default=True,
    help="Longest time that one run may take, in seconds.",
)
def scaling(
    overrides: tuple[str, ...],
    file: Path,
    ranks: tuple[int, ...],
    mode: Any,
    steps: int,
    launcher: str | None,
    threads: int | None,
    machine: str | None,
    out: Path,
    timeout_seconds: float,
) -> None:
    """Compare several numbers of ranks.

    Prints efficiency, exposed communication and the limit for each number of ranks. Each number runs twice: as it is, and with
    --compute-only. OVERRIDES such as averager=sharded win over the file.
    """
    from hpctrain.bench import scaling as study

    task = study.ScalingStudy(
        file=file,
        overrides=overrides,
        mode=mode,
        steps=steps,
        launcher=launcher,
        threads=threads,
        timeout_seconds=timeout_seconds,
        machine=machine,
    )
    points = study.run(task, ranks, say=echo)
    for line in study.lines(points, mode):
        echo(line)
    study.write(out, task, points)
    echo(out)
    echo(study.plot(out.with_suffix(".png"), points, mode) or "no plot: matplotlib is not installed (extra export)")
