"""`hpctrain doctor`: a job of seconds that says whether a training would run well here."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import click

from hpctrain.cli.arguments import OVERRIDES, FilePath, Seconds
from hpctrain.cli.failure import job_ends_on_error
from hpctrain.cli.loading import load_config
from hpctrain.doctor.run import LATER_SECONDS, DoctorRank
from hpctrain.doctor.start_facts import queued_seconds
from hpctrain.doctor.watch import Notebook, watched
from hpctrain.launch.job_clock import age_seconds
from hpctrain.launch.launcher import detect


@click.command()
@click.argument("file", type=FilePath(dir_okay=False, path_type=Path), required=False)
@OVERRIDES
@click.option("--strict", is_flag=True, help="Leave with exit code 2 where there are warnings, too.")
@click.option("--json", "as_json", is_flag=True, help="Print all findings and the place of each rank as JSON.")
@click.option(
    "--run-directory",
    type=FilePath(file_okay=False, path_type=Path),
    help="Directory in which runs will be made, to be tried out; by default the configuration's output, or runs.",
)
@click.option(
    "--seconds",
    type=Seconds(min=5),
    default=60.0,
    show_default=True,
    help="Longest time that the job may take, in seconds, also where MPI hangs.",
)
def doctor(
    file: Path | None, overrides: tuple[str, ...], strict: bool, as_json: bool, run_directory: Path | None, seconds: float
) -> None:
    """Check whether a training would run well here.

    Start it as the training: mpiexec -n 4 python -m mpi4py -m hpctrain doctor FILE. OVERRIDES such as batch=64 win over FILE,
    without which grid and data files are not looked at. Each finding has the line that mends it; the exit code is 2 where
    something would stop or spoil a training.
    """
    launcher = detect(os.environ)
    read = None if file is None else partial(load_config, file, overrides)
    rank = DoctorRank(launcher, read, run_directory, strict, as_json, seconds, age_seconds() - queued_seconds())

    def work(notebook: Notebook) -> int:
        with job_ends_on_error(rank.rank, rank.abort):
            return rank.run(notebook)
        raise AssertionError("an error has ended the process")

    raise SystemExit(watched(work, rank.explain, seconds + (LATER_SECONDS if launcher.rank else 0)))
