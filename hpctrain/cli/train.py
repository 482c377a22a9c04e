"""`hpctrain train` and `hpctrain eval`: set threads, start the communication, build the experiment, run it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from hpctrain import log
from hpctrain.cli.failure import job_ends_on_error
from hpctrain.cli.loading import load_config
from hpctrain.config.schema import Config
from hpctrain.errors import HpctrainError
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.flight.ring import End
from hpctrain.launch import shared_segments
from hpctrain.launch.exit_codes import STOPPED
from hpctrain.launch.launcher import Launcher, detect
from hpctrain.launch.signals import SignalWatch
from hpctrain.launch.threads import ThreadPlan, set_threads

if TYPE_CHECKING:
    from hpctrain.comm.base import Communicator
    from hpctrain.experiment.session import Session
    from hpctrain.train.console_reporter import ProgressStyle

#: of a job whose configuration could not be read
DEADLINE_SECONDS = 300.0

#: that the ranks may take to end MPI together
LEAVE_SECONDS = 60.0

COMPUTE_ONLY_STEPS = 20

_FILE = click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
_OVERRIDES = click.argument("overrides", nargs=-1)


class _Job:
    """The knowledge of this process so far: enough to end the job from any point."""

    def __init__(self) -> None:
        self.launcher: Launcher = detect(os.environ)
        self.world: Communicator | None = None
        self.flight = FlightRecorder()
        self._exits = contextlib.ExitStack()

    def rank(self) -> int:
        return self.world.rank if self.world is not None else self.launcher.rank or 0

    def abort(self, code: int) -> None:
        if self.world is not None:
            self.world.abort(code)

    def failed(self, sentence: str) -> None:
        """Keep the error in the flight record, before anybody ends the job for it."""
        self.flight.ended(End.FAILED, sentence)

    def finish(self) -> None:
        """The run is over, and well."""
        self._exits.close()

    def leave(self, code: int) -> NoReturn:
        """End this process in good order. Collective: MPI ends first, so that no launcher takes the code for a crash."""
        if self.launcher.name != "none":
            from hpctrain.comm import mpi

            mpi.finish(LEAVE_SECONDS)
        raise SystemExit(code)

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
        from hpctrain.experiment.flight_records import explain_deadlines, watched
        from hpctrain.experiment.same_start import check_same_start
        from hpctrain.experiment.session import Session, start_world
        from hpctrain.experiment.start_search import StartedJob
        from hpctrain.experiment.user_code import check_alike
        from hpctrain.storage.run_directory import git_state

        revision = git_state() if self.rank() == 0 else {}  # starts processes, which no one should once MPI runs
        deadline_seconds = DEADLINE_SECONDS if isinstance(prepared, HpctrainError) else prepared[0].deadline_seconds
        removed = shared_segments.Removed()
        if self.launcher.starts_mpi:
            shared_segments.announce()
            if not self.launcher.local_rank:
                removed = shared_segments.remove_stale()
        self.world = start_world(self.launcher, deadline_seconds, self.flight)
        if self.launcher.starts_mpi:
            shared_segments.remember()
            self._exits.callback(shared_segments.forget)
        self._exits.enter_context(watched(self.flight, self.world, deadline_seconds))
        config, threads = raise_on_all_ranks(self.world, lambda: _given(prepared))
        check_same_start(self.world, config, leads_node=not self.launcher.local_rank)
        check_alike(self.world)
        started = StartedJob(self.world, threads.threads, config.deadline_seconds)
        resolved = resolve(config, started, resume, repeated)
        session = Session.start(resolved, self.launcher, threads, self.world, revision, self.flight)
        explain_deadlines(session.progress)
        if removed.count:
            log.get_logger(__name__).info(str(removed))
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
    metavar="auto|PATH",
    help="Go on from this run directory or checkpoint file; auto takes the newest valid one of the newest run of this name.",
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
@click.option(
    "--stopped-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write this file and leave with 0 in place of 85, after which some launchers would kill the other ranks.",
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
    stopped_file: Path | None,
) -> None:
    """Train the model of FILE.

    OVERRIDES such as optimizer.lr=0.2 win over the file.
    SIGINT (Ctrl-C), SIGTERM, SIGUSR1 and SIGHUP end the run after a step with a checkpoint and exit code 85.
    """
    if compute_only and resume is not None:
        raise click.UsageError("--compute-only trains nothing that could be resumed; leave --resume out.")
    if compute_only and schedule_from is not None:
        raise click.UsageError("--compute-only averages nothing over ranks; leave --schedule-from out.")
    watch, job = watch or SignalWatch(), _Job()
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
        if stopped_file is None:
            job.leave(STOPPED)
        if job.rank() == 0:
            stopped_file.touch()


@click.command()
@_FILE
@_OVERRIDES
@click.option(
    "--checkpoint",
    default="auto",
    metavar="auto|PATH",
    help="Checkpoint file or run directory to evaluate; auto takes the newest run of this name.",
)
def evaluate(file: Path, overrides: tuple[str, ...], checkpoint: str) -> None:
    """Evaluate a checkpoint on the test set of FILE."""
    job = _Job()
    with job_ends_on_error(job.rank, job.abort, job.failed):
        session = job.start(file, overrides, checkpoint)
        from hpctrain.experiment.evaluation import run_evaluation

        run_evaluation(session, checkpoint)
        job.finish()
