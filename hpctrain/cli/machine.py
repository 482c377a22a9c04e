"""`hpctrain calibrate`: measure the machine that the job runs on, and write it to a file that planners read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.arguments import OutputFile, Seconds
from hpctrain.cli.failure import job_ends_on_error
from hpctrain.launch.launcher import detect
from hpctrain.launch.threads import set_threads

if TYPE_CHECKING:
    from hpctrain.comm.base import Communicator

_DEADLINE_SECONDS = 300.0


@click.command()
@click.option(
    "--out",
    type=OutputFile(streams=True, of_job=True),
    required=True,
    help="File to which the machine is written, such as machine.yaml; its name without the ending becomes the machine's.",
)
@click.option(
    "--seconds",
    type=Seconds(min=5),
    default=60.0,
    show_default=True,
    help="Longest time to measure, in seconds; large messages of slow networks are left out where it is short.",
)
@click.option(
    "--threads", type=click.IntRange(min=1), help="Number of threads per rank; by default OMP_NUM_THREADS, else the rank's cores."
)
def calibrate(out: Path, seconds: float, threads: int | None) -> None:
    """Measure this machine for planners.

    Start it as a training: mpiexec -n 4 python -m mpi4py -m hpctrain calibrate --out machine.yaml. Its ranks measure messages
    within and between their nodes, and operators; what they cannot measure says so in the file.
    """
    launcher = detect(os.environ)
    world: Communicator | None = None

    def rank() -> int:
        return world.rank if world is not None else launcher.rank or 0

    def abort(code: int) -> None:
        if world is not None:
            world.abort(code)

    with job_ends_on_error(rank, abort):
        plan = set_threads(launcher, threads)  # before NumPy is imported
        from hpctrain.planner.measurement import run_calibration
        from hpctrain.job.session import start_world

        world = start_world(launcher, _DEADLINE_SECONDS)
        run_calibration(world, plan.threads, seconds, out, _DEADLINE_SECONDS)
