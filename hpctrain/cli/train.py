"""`hpctrain train` and `hpctrain eval`: set threads, start the communication, build the experiment, run it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.failure import job_ends_on_error
from hpctrain.comm.launcher import Launcher, detect
from hpctrain.config.load import load
from hpctrain.config.schema import Config
from hpctrain.threads import ThreadPlan, set_threads

if TYPE_CHECKING:
    from hpctrain.experiment.session import Session

_FILE = click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
_OVERRIDES = click.argument("overrides", nargs=-1)


class _Job:
    """What is known of this process so far: enough to end the job from any point."""

    def __init__(self) -> None:
        self.launcher: Launcher = detect(os.environ)
        self.session: Session | None = None

    def rank(self) -> int:
        if self.session is not None:
            return self.session.world.rank
        return self.launcher.rank or 0

    def abort(self, code: int) -> None:
        if self.session is not None:
            self.session.world.abort(code)

    def start(self, file: Path, overrides: tuple[str, ...]) -> tuple[Config, Session]:
        """Config, threads (before NumPy is imported), then MPI."""
        config, source = load(file, overrides)
        threads: ThreadPlan = set_threads(self.launcher, None if config.threads == "auto" else config.threads)
        from hpctrain.experiment.check import check_names
        from hpctrain.experiment.session import Session

        check_names(config, source)
        self.session = Session.start(config, self.launcher, threads)
        return config, self.session


@click.command()
@_FILE
@_OVERRIDES
@click.option(
    "--resume", metavar="auto|PATH", help="Go on from the newest valid checkpoint of the latest run, or from a file or run."
)
@click.option("--steps", type=click.IntRange(min=0), default=0, help="Stop after this many steps (0: train all epochs).")
def train(file: Path, overrides: tuple[str, ...], resume: str | None, steps: int) -> None:
    """Train as FILE says; OVERRIDES such as optimizer.lr=0.2 win over it."""
    job = _Job()
    with job_ends_on_error(job.rank, job.abort):
        _, session = job.start(file, overrides)
        from hpctrain.experiment.run import run_training

        run_training(session, resume=resume, steps=steps)


@click.command()
@_FILE
@_OVERRIDES
@click.option(
    "--checkpoint", default="auto", metavar="auto|PATH", help="A checkpoint file or run directory; auto: the latest run's."
)
def evaluate(file: Path, overrides: tuple[str, ...], checkpoint: str) -> None:
    """Evaluate a checkpoint on the test set of FILE."""
    job = _Job()
    with job_ends_on_error(job.rank, job.abort):
        _, session = job.start(file, overrides)
        from hpctrain.experiment.run import run_evaluation

        run_evaluation(session, checkpoint)
