"""`hpctrain train` and `hpctrain eval`: set threads, start the communication, build the experiment, run it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.failure import job_ends_on_error
from hpctrain.cli.job_process import JobProcess
from hpctrain.cli.loading import load_config
from hpctrain.config.schema import Config
from hpctrain.errors import HpctrainError
from hpctrain.launch.exit_codes import STOPPED
from hpctrain.launch.launcher import detect
from hpctrain.launch.signals import SignalWatch
from hpctrain.launch.threads import ThreadPlan, set_threads

if TYPE_CHECKING:
    from hpctrain.experiment.session import Session
    from hpctrain.train.console_reporter import ProgressStyle

#: of a job whose configuration could not be read
DEADLINE_SECONDS = 300.0

COMPUTE_ONLY_STEPS = 20

_FILE = click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
_OVERRIDES = click.argument("overrides", nargs=-1)


class _Job(JobProcess):
    """A process of a configured job."""

    def start(self, file: Path, overrides: tuple[str, ...], resume: str | None = None, repeated: str | None = None) -> Session:
        """Configuration and threads (before NumPy is imported), then MPI; what is wrong with them, all ranks say alike.

        MPI starts in any case: a rank alone with its error would leave the others waiting for it.

        Args:
            resume, repeated: as `--resume` and `--schedule-from` name earlier runs, whose automatic choices go on.
        """
        prepared: tuple[Config, ThreadPlan] | HpctrainError
        try:
            prepared = self._prepare(file, overrides)
        except HpctrainError as error:
            prepared = error
        from hpctrain.comm.raise_on_all_ranks import raise_on_all_ranks
        from hpctrain.experiment.automatic import resolve
        from hpctrain.experiment.same_start import check_same_start
        from hpctrain.experiment.session import Session
        from hpctrain.experiment.start_search import StartedJob
        from hpctrain.experiment.user_code import check_alike
        from hpctrain.storage.run_directory import git_state

        revision = git_state() if self.rank() == 0 else {}  # starts processes, which no one should once MPI runs
        deadline_seconds = DEADLINE_SECONDS if isinstance(prepared, HpctrainError) else prepared[0].deadline_seconds
        world = self.start_world(deadline_seconds)
        self.exits.callback(self.end_mpi)  # while its segments are still written down: who is killed here has left them
        self.watch(world, deadline_seconds)
        config, threads = raise_on_all_ranks(world, lambda: _given(prepared))
        check_same_start(world, config, leads_node=not self.launcher.local_rank)
        check_alike(world)
        started = StartedJob(world, threads.threads, config.deadline_seconds)
        resolved = resolve(config, started, resume, repeated)
        session = Session.start(resolved, self.launcher, threads, world, revision, self.flight)
        self.started(session.progress)
        return session

    def _prepare(self, file: Path, overrides: tuple[str, ...]) -> tuple[Config, ThreadPlan]:
        config, source = load_config(file, overrides)
        threads = set_threads(self.launcher, None if config.threads == "auto" else config.threads)
        from hpctrain.experiment.check import check_names
        from hpctrain.experiment.options import filled

        check_names(config, source)
        if self.rank() == 0 and any(reporter.name == "tensorboard" for reporter in config.metrics.all_reporters):
            from hpctrain.train.reporters.tensorboard import tensorboard_writer

            tensorboard_writer()  # what is missing is told before the job starts, and no process is started once MPI runs
        return filled(config), threads


def _given(prepared: tuple[Config, ThreadPlan] | HpctrainError) -> tuple[Config, ThreadPlan]:
    if isinstance(prepared, HpctrainError):
        raise prepared
    return prepared


@click.command()
@_FILE
@_OVERRIDES
@click.option(
    "--resume",
    metavar="auto|best|PATH",
    help="Go on from this run directory or checkpoint file; auto takes the newest valid one of the newest run of this name, best "
    "goes back to the best one.",
)
@click.option("--steps", type=click.IntRange(min=0), default=0, help="Stop after this many steps; 0 trains all epochs.")
@click.option(
    "--compute-only",
    is_flag=True,
    help="Time steps without communication, then communication alone; 20 steps, unless --steps says otherwise.",
)
@click.option(
    "--progress",
    "style",
    type=click.Choice(["bar", "lines", "none"]),
    help="Show where training is by a bar, a line at every interval, or not at all; by default a bar on a terminal, else lines.",
)
@click.option(
    "--schedule-from",
    metavar="RUN",
    help="Average gradients in the slices and the order of this run, a directory or a checkpoint file, to repeat it bit by bit.",
)
@click.pass_obj
def train(
    watch: SignalWatch | None,
    file: Path,
    overrides: tuple[str, ...],
    resume: str | None,
    steps: int,
    compute_only: bool,
    style: ProgressStyle | None,
    schedule_from: str | None,
) -> None:
    """Train the model of FILE.

    OVERRIDES such as optimizer.lr=0.2 win over the file.
    SIGINT (Ctrl-C), SIGTERM, SIGUSR1 and SIGHUP end the run after a step with a checkpoint and exit code 85.
    """
    if compute_only and resume is not None:
        raise click.UsageError("--compute-only trains nothing that could be resumed; leave --resume out.")
    if compute_only and schedule_from is not None:
        raise click.UsageError("--compute-only averages nothing over ranks; leave --schedule-from out.")
    watch, job = watch or SignalWatch(), _Job(detect(os.environ))
    if compute_only:
        watch.end_at_once()
    stopped = False
    with job_ends_on_error(job.rank, job.abort, job.failed):
        session = job.start(file, (*overrides, "trace=true") if compute_only else overrides, resume, schedule_from)
        from hpctrain.experiment.run import run_compute_only, run_training

        if compute_only:
            run_compute_only(session, steps or COMPUTE_ONLY_STEPS, style)
        else:
            stopped = run_training(session, watch, resume=resume, steps=steps, schedule_from=schedule_from, style=style)
        job.finish()
    if stopped:
        job.leave(STOPPED)


@click.command()
@_FILE
@_OVERRIDES
@click.option(
    "--checkpoint",
    default="auto",
    metavar="auto|best|PATH",
    help="Checkpoint file or run directory to evaluate; auto takes the newest one of the newest run of this name, best "
    "the one with the best evaluation.",
)
def evaluate(file: Path, overrides: tuple[str, ...], checkpoint: str) -> None:
    """Evaluate a checkpoint on the test set of FILE."""
    job = _Job(detect(os.environ))
    with job_ends_on_error(job.rank, job.abort, job.failed):
        session = job.start(file, overrides, checkpoint)
        from hpctrain.experiment.evaluation import run_evaluation

        run_evaluation(session, checkpoint)
        job.finish()
