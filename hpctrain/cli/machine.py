"""`hpctrain doctor` and `hpctrain calibrate`: jobs that examine the machine on which they run.

The doctor reports within seconds whether a training would run well. The calibration measures the machine and writes a machine
model for planners.
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import click

from hpctrain.cli.arguments import AUTO, OVERRIDES, FilePath, Finite, OutputFile, with_auto
from hpctrain.doctor.run import LATER_SECONDS, DoctorRank
from hpctrain.launch.keeper import Notebook, run_watched
from hpctrain.launch.launcher import detect
from hpctrain.launch.scheduler import age_seconds
from hpctrain.launch.threads import set_threads
from hpctrain.process.ends import job_ends_on_error
from hpctrain.process.rank import RankProcess
from hpctrain.process.start import load_config

_DEADLINE_SECONDS = 300.0


@click.command()
@click.option(
    "--out",
    type=OutputFile(streams=True, of_job=True),
    required=True,
    help="File to which the machine model is written, such as machine.yaml; its stem becomes the name of the machine.",
)
@click.option(
    "--seconds",
    type=Finite(min=5),
    default=60.0,
    show_default=True,
    help="Time limit of the measurement, in seconds; a short limit leaves out large messages of slow networks.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Number of threads per rank; default: OMP_NUM_THREADS, else the cores of the rank.",
)
def calibrate(out: Path, seconds: float, threads: int | None) -> None:
    """Measure this machine and write a machine model.

    Start it like a training: mpiexec -n 4 python -m mpi4py -m hpctrain calibrate --out machine.yaml. The ranks time operators,
    in float32 and in bfloat16 if their processors multiply it, and messages within and between nodes. Ranks with one thread on
    each of at least two cores also time operators with a single thread. The file marks the quantities that could not be measured.
    """
    job = RankProcess()
    with job_ends_on_error(job.rank, job.abort, job.failed):
        plan = set_threads(job.launcher, threads)  # before NumPy is imported
        from hpctrain.backend.choice import make_backend
        from hpctrain.cli.simulation_tables import print_machine
        from hpctrain.job.session import StartedJob
        from hpctrain.planner.measure.measurement import run_calibration

        world = job.start_world(_DEADLINE_SECONDS)
        kernels = make_backend("auto", place=StartedJob(world, plan.threads, _DEADLINE_SECONDS).place()).kernels
        begin = time.perf_counter()
        machine = run_calibration(world, kernels, plan.threads, seconds, out, _DEADLINE_SECONDS)
        if world.rank == 0:
            print_machine(machine)
            if not machine.single_thread_rates:
                print(
                    "The effect of threads was not measured; this requires kernels of the CPU, and ranks with one thread on each "
                    "of at least two cores."
                )
            print(f"{out}: calibrated in {time.perf_counter() - begin:.0f} s with kernels {kernels.name}")
        job.finish()


@click.command()
@click.argument("file", type=FilePath(path_type=Path), required=False)
@OVERRIDES
@AUTO
@click.option("--strict", is_flag=True, help="Also exit with code 2 if there are warnings.")
@click.option("--json", "as_json", is_flag=True, help="Print all findings and the host and cores of each rank as JSON.")
@click.option(
    "--seconds",
    type=Finite(min=5),
    default=60.0,
    show_default=True,
    help="Time limit of the job, in seconds; the job ends at the limit even if MPI hangs.",
)
def doctor(file: Path | None, overrides: tuple[str, ...], auto: bool, strict: bool, as_json: bool, seconds: float) -> None:
    """Check whether a training would run well here.

    Start it like the training: mpiexec -n 4 python -m mpi4py -m hpctrain doctor FILE. OVERRIDES such as batch=64 override keys of
    FILE. Without FILE, grid and data files are not checked, and the directory for runs is `runs`. Each finding has a line that
    fixes it. The exit code is 2 if something would stop or spoil a training.
    """
    launcher = detect(os.environ)
    read = None if file is None else partial(load_config, file, with_auto(overrides, auto=auto))
    rank = DoctorRank(launcher, read, strict, as_json, seconds, time.monotonic() - age_seconds())

    def work(notebook: Notebook) -> int:
        with job_ends_on_error(rank.rank, rank.abort):
            return rank.run(notebook)
        raise AssertionError("an error has ended the process")

    raise SystemExit(run_watched(work, rank.explain, seconds + (LATER_SECONDS if launcher.rank else 0)))
