"""Training from Python: your own models and training loops, on one rank or on many.

    with hpctrain.start(batch=64) as job:
        replica = job.replica(model, (28, 28, 1), optimizer={"name": "sgd", "momentum": 0.9})
        loader = job.loader(replica, "train.h5")
        for batch in loader.epoch(0):
            replica.step(batch, lr=0.05)

Arguments have the names of configuration keys (docs/config.md). docs/python-api.md has complete programs.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.cli.failure import job_ends_on_error
from hpctrain.cli.job_process import JobProcess
from hpctrain.comm.base import Communicator, raise_on_all_ranks
from hpctrain.comm.progress_mode import ProgressMode
from hpctrain.core.errors import ConfigError, CorruptedStateError, DivergedError
from hpctrain.core.files import path_of
from hpctrain.core.log import get_logger
from hpctrain.core.text import choices
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.job import flight_records
from hpctrain.job.same_start import check_same_program
from hpctrain.job.session import StartedJob, on_grid
from hpctrain.launch.launcher import detect
from hpctrain.launch.process_end import STOPPED
from hpctrain.launch.signals import SignalWatch, taken_signals
from hpctrain.launch.threads import set_threads
from hpctrain.models import catalogue
from hpctrain.nn.layers import Layer
from hpctrain.optim.schedules import SCHEDULES, LearningRateSchedule
from hpctrain.parallel.groups import GridGroups
from hpctrain.run.automatic_search import Automatic
from hpctrain.run.python_job import Job, LoopCheckpoints, Stopped
from hpctrain.train.replica import BETWEEN

_log = get_logger(__name__)
_DEADLINE_SECONDS = 300.0
_PROGRESS = ("auto", *(str(mode) for mode in ProgressMode))


@contextlib.contextmanager
def start(
    *,
    batch: int,
    rows: int = 1,
    cols: int | None = None,
    threads: int | None = None,
    progress: str = "auto",
    deadline_seconds: float = _DEADLINE_SECONDS,
    automatic: Automatic | None = None,
    flight: str | Path | None = None,
    signals: bool = False,
) -> Iterator[Job]:
    """Start this rank, and MPI if a launcher has started several ranks. An error that leaves the block ends all ranks.

    An `HpctrainError` ends the job with its message and exit code 2, any other exception with its traceback and exit code 1. All
    ranks must run the same program with the same arguments, packages and files of hpctrain; otherwise the start fails.

    Args:
        batch: global batch size, in samples.
        rows: number of rows of the process grid.
        cols: number of columns of the process grid; default: the number of ranks divided by rows.
        threads: number of threads of this rank; default: OMP_NUM_THREADS, else its share of the cores.
        progress: mode of message progress while kernels run: "auto" (measured), "none", "test", "thread" or "posting".
        deadline_seconds: maximum time that a rank waits for other ranks before it ends the job. Under a launcher or with
            `flight`, it is also the maximum time without any activity of hpctrain.
        automatic: network for which the grid is chosen now; rows and cols are then ignored.
        flight: directory in which each rank writes its flight record, for `hpctrain autopsy`; None writes none.
        signals: whether a signal to stop (INT, TERM, USR1, HUP) sets `Job.stop_requested` instead of ending the process.
    """
    asked = _Asked(batch, rows, cols, threads, progress, deadline_seconds, automatic, flight, signals)
    process = JobProcess(detect(os.environ))

    def abort(code: int) -> None:
        if process.launcher.starts_mpi:  # a lone process ends by the exception, and may be a notebook
            process.abort(code)

    # Signals are caught until the end, so that a further signal does not kill a process that is ending in order.
    with contextlib.ExitStack() as last:
        stopped = False
        with job_ends_on_error(process.rank, abort, process.failed), _alone(process):
            watch = None
            if signals and threading.current_thread() is threading.main_thread():
                watch = last.enter_context(taken_signals(process.rank()))
            job = _started(process, asked, watch)
            with _finishing(job):
                try:
                    yield job
                except Stopped:
                    stopped = True
            process.finish()
        if stopped:
            process.leave(STOPPED)


@dataclass(frozen=True)
class _Asked:
    """The arguments of `start`."""

    batch: int
    rows: int
    cols: int | None
    threads: int | None
    progress: str
    deadline_seconds: float
    automatic: Automatic | None
    flight: str | Path | None
    signals: bool

    @property
    def limit_seconds(self) -> float:
        """Deadline; the default if `deadline_seconds` is not above 0."""
        return self.deadline_seconds if self.deadline_seconds > 0 else _DEADLINE_SECONDS

    def facts(self) -> dict[str, object]:
        """Return the arguments that must be equal on all ranks."""
        alike = ("batch", "rows", "cols", "progress", "deadline_seconds", "signals")
        return {name: getattr(self, name) for name in alike} | {"automatic": self.automatic is not None}

    def check(self, watch: SignalWatch | None) -> None:
        """Raise if an argument is wrong, with the same result on all ranks.

        Args:
            watch: watch of signals; None if there is none.
        """
        if self.progress not in _PROGRESS:
            raise ConfigError(f'There is no progress mode "{self.progress}"; {choices(self.progress, _PROGRESS)}.')
        if self.deadline_seconds <= 0:
            raise ConfigError(
                f"deadline_seconds is {self.deadline_seconds:g}, but must be above 0; the default is {_DEADLINE_SECONDS:g}."
            )
        if self.signals and watch is None:
            raise ConfigError("signals is True, but Python receives signals in its main thread only; call `start` there.")


def _started(process: JobProcess, asked: _Asked, watch: SignalWatch | None) -> Job:
    """Return the job of a process. Errors are raised once all ranks can raise them, so that no rank is left waiting."""
    launcher = process.launcher
    world = process.start_world(asked.limit_seconds)
    if launcher.starts_mpi or asked.flight is not None:
        process.watch(world, asked.limit_seconds)
    if world.size > 1:
        check_same_program(world, asked.facts(), _program(), leads_node=not launcher.local_rank)
    asked.check(watch)
    plan = raise_on_all_ranks(world, lambda: set_threads(launcher, asked.threads))
    best, rows, cols = None, asked.rows, asked.cols
    if asked.automatic is not None:
        best = asked.automatic.best(StartedJob(world, plan.threads, asked.deadline_seconds), asked.batch)
        rows, cols = best.candidate.plan.rows, best.candidate.plan.cols
    cols = max(1, world.size // max(1, rows)) if cols is None else cols
    grid, engine = on_grid(world, rows, cols, batch=asked.batch, deadline_seconds=asked.deadline_seconds, flight=process.flight)
    process.started(engine)
    _keep(process.flight, asked.flight, world)
    engine.notes.phase(BETWEEN)
    checkpoints = LoopCheckpoints(world, engine.notes, asked.deadline_seconds)
    groups = GridGroups(grid)
    return Job(launcher, plan, world, grid, groups, engine, asked.batch, asked.progress, checkpoints, watch, best)


@contextlib.contextmanager
def _finishing(job: Job) -> Iterator[None]:
    """Wait for messages and for the checkpoint in the background when the block ends. Collective over all ranks."""
    try:
        yield
        # Messages of the last step may be in flight, into arrays that Python frees before MPI ends. Overflows in them no longer
        # matter.
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            job.progress.drain()
        job.checkpoints.finish()
    except BaseException as error:
        # All ranks raise these two errors, so they can finish the checkpoint in progress, from which the user resumes. Other
        # errors may occur on one rank only. A single rank must wait: Python may crash if it ends while a thread writes.
        if job.size == 1 or isinstance(error, DivergedError | CorruptedStateError):
            job.checkpoints.finish_after_error()
        raise
    finally:
        job.progress.stop_thread()


def _program() -> Path | None:
    """Return the file of the program; None if there is no file."""
    name = getattr(sys.modules["__main__"], "__file__", None)
    return Path(name) if name is not None and Path(name).is_file() else None


def _alone(process: JobProcess) -> contextlib.AbstractContextManager[object]:
    """Return the context that ends a process without a launcher in order, even after an exception; else an empty context."""
    return contextlib.nullcontext() if process.launcher.starts_mpi else process.exits


def _keep(flight: FlightRecorder, directory: str | Path | None, world: Communicator) -> None:
    """Keep flight records if a directory is given and has space; a training continues without them. Collective over all ranks."""
    target = None if directory is None else raise_on_all_ranks(world, lambda: path_of(directory))
    sentence = None
    try:
        if target is None:
            flight_records.keep_nowhere(flight)
        else:
            flight_records.keep_in(flight, target)
    except OSError as error:
        sentence = flight_records.missing(target or Path(), error)
    warning = flight_records.missing_on(world, sentence)
    if warning is not None and world.rank == 0:
        _log.warning(warning)


def model(name: str, **options: Any) -> Layer:
    """Return a model of the catalogue, such as "resnet18" (see `hpctrain list models`).

    Raises:
        ConfigError: the name is unknown, or an option is wrong.
    """
    return catalogue.build(name, options)


def schedule(
    name: str, *, base_lr: float, epochs: int, steps_per_epoch: int, warmup_epochs: float = 0.0, **options: Any
) -> LearningRateSchedule:
    """Return a learning-rate schedule, such as "cosine"; its `lr(step)` returns the learning rate of a step.

    Raises:
        ConfigError: the name is unknown, or an option is wrong.
    """
    return SCHEDULES.create(
        name, options, base_lr=base_lr, epochs=epochs, steps_per_epoch=steps_per_epoch, warmup_epochs=warmup_epochs
    )
