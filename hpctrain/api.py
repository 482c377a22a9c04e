"""Training from Python: a configured training as a function, or your own models and training loops, on one rank or on many.

    result = hpctrain.train("config.yaml", batch=64)
    print(result.metrics["top1"])

    with hpctrain.start(batch=64) as job:
        replica = job.replica(model, (28, 28, 1), optimizer={"name": "sgd", "momentum": 0.9})
        loader = job.loader(replica, "train.h5")
        for batch in loader.epoch(0):
            replica.step(batch, lr=0.05)

Arguments have the names of configuration keys (docs/config.md). docs/python-api.md has complete programs.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.assembly.faults import refusal
from hpctrain.assembly.keywords import START_KEYS, keyword_config
from hpctrain.comm.base import Communicator, raise_on_all_ranks
from hpctrain.comm.groups import ProcessGrid
from hpctrain.comm.progress import ProgressEngine
from hpctrain.config.load import from_mapping, keyword_overrides
from hpctrain.config.schema import Config
from hpctrain.core import log
from hpctrain.core.errors import (
    CheckpointError,
    CommunicationTimeoutError,
    ConfigError,
    CorruptedStateError,
    DivergedError,
    HpctrainError,
)
from hpctrain.core.files import path_of
from hpctrain.core.registry import Count, CountFromZero, check_types
from hpctrain.core.yaml_source import Source
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.job import flight_records
from hpctrain.job.same_start import check_same_program
from hpctrain.job.session import StartedJob, busy_node, check_sizes
from hpctrain.launch.launcher import detect
from hpctrain.launch.process_end import STOPPED
from hpctrain.launch.signals import SignalWatch, deliver_again, taken_signals
from hpctrain.launch.threads import VARIABLES, set_threads
from hpctrain.models import catalogue
from hpctrain.nn.layers import Layer
from hpctrain.optim.schedules import SCHEDULES, LearningRateSchedule
from hpctrain.parallel.groups import GridGroups
from hpctrain.process.ends import job_ends_on_error
from hpctrain.process.rank import RankProcess
from hpctrain.process.start import load_config
from hpctrain.run.automatic_search import Automatic
from hpctrain.run.python_job import Job, LoopCheckpoints, Stopped
from hpctrain.run.result import EpochCallback, EpochValues, TrainingResult, stored_result
from hpctrain.run.training import RunEnd, TrainingRequest, run_training
from hpctrain.training.replica import BETWEEN
from hpctrain.training.reporting import ProgressStyle

_log = logging.getLogger(__name__)
_DEADLINE_SECONDS = 300.0


@contextlib.contextmanager
def start(
    *,
    batch: int,
    rows: int = 1,
    cols: int | None = None,
    threads: Count | None = None,
    progress: str = "test",
    deadline_seconds: float = _DEADLINE_SECONDS,
    automatic: Automatic | None = None,
    flight: str | Path | None = None,
    signals: bool = False,
) -> Iterator[Job]:
    """Start this rank, and MPI if a launcher has started several ranks. An error that leaves the block ends all ranks.

    An `HpctrainError`, or a call with arguments that the function does not have, ends the job with its message and exit code 2;
    any other exception ends it with its traceback and exit code 1. All ranks must run the same program with the same arguments,
    packages and files of hpctrain; otherwise the start fails.

    Args:
        batch: global batch size, in samples.
        rows: number of rows of the process grid.
        cols: number of columns of the process grid; default: the number of ranks divided by rows.
        threads: number of threads of this rank; default: OMP_NUM_THREADS, else its share of the cores.
        progress: mode of message progress while kernels run: "none", "test" or "thread".
        deadline_seconds: maximum time that a rank waits for other ranks before it ends the job. Under a launcher or with
            `flight`, it is also the maximum time without any activity of hpctrain.
        automatic: network for which the grid is chosen now; rows and cols are then ignored.
        flight: directory in which each rank writes its flight record, for `hpctrain autopsy`; None writes none.
        signals: whether a signal to stop (INT, TERM, USR1, HUP) sets `Job.stop_requested` instead of ending the process.
    """
    asked = _Asked(batch, rows, cols, threads, progress, deadline_seconds, automatic, flight, signals)
    process = RankProcess()

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
        """Deadline in seconds: `deadline_seconds` if it is a number above 0, else the default."""
        is_legal = isinstance(self.deadline_seconds, int | float) and self.deadline_seconds > 0
        return self.deadline_seconds if is_legal else _DEADLINE_SECONDS

    def facts(self) -> dict[str, object]:
        """Return the arguments that must be equal on all ranks."""
        alike = ("batch", "rows", "cols", "progress", "deadline_seconds", "signals")
        return {name: getattr(self, name) for name in alike} | {"automatic": self.automatic is not None}

    def check(self, watch: SignalWatch | None) -> None:
        """Raise ConfigError if an argument has a wrong type, or breaks the rule of its key, on all ranks alike.

        Args:
            watch: watch of signals; None: `signals` is False, or the caller is not in Python's main thread.
        """
        keyword_config(start, START_KEYS, vars(self))
        if self.signals and watch is None:
            raise ConfigError("signals is True, but Python receives signals in its main thread only; call `start` there.")


def _started(process: RankProcess, asked: _Asked, watch: SignalWatch | None) -> Job:
    """Return the job of a process. Errors are raised once all ranks can raise them, so that no rank is left waiting."""
    launcher = process.launcher
    world = process.start_world(asked.limit_seconds)
    if launcher.starts_mpi or asked.flight is not None:
        process.exits.enter_context(flight_records.watched(process.flight, world, asked.limit_seconds))
    if world.size > 1:
        check_same_program(world, asked.facts(), _program(), leads_node=not launcher.local_rank)
    asked.check(watch)
    threads = None if asked.threads is None else int(asked.threads)
    plan = raise_on_all_ranks(world, lambda: set_threads(launcher, threads, measures=True))
    busy = busy_node(world, plan.load)
    if world.rank == 0 and (busy or "other programs" in plan.reason):
        _log.warning(busy or str(plan))
    best, backends, rows, cols = None, {}, int(asked.rows), asked.cols
    if (automatic := asked.automatic) is not None:
        best = automatic.best(StartedJob(world, plan.threads, asked.deadline_seconds), asked.batch)
        rows, cols = best.candidate.plan.rows, best.candidate.plan.cols
        if best.backend is not None:
            backends = {(automatic.backend, automatic.dtype, automatic.precision): best.backend}
    cols = max(1, world.size // rows) if cols is None else int(cols)
    raise_on_all_ranks(world, partial(check_sizes, rows, cols, world.size, asked.batch))
    deadline_seconds, flight = asked.deadline_seconds, process.flight
    engine = ProgressEngine(rank=world.rank, deadline_seconds=deadline_seconds, abort=world.abort, flight=flight)
    grid = ProcessGrid(world, rows, cols)
    _keep(process.flight, asked.flight, world)
    engine.notes.phase(BETWEEN)
    checkpoints = LoopCheckpoints(world, engine.notes, asked.deadline_seconds)
    groups = GridGroups(grid)
    batch = int(asked.batch)
    return Job(launcher, plan, world, grid, groups, engine, batch, asked.progress, checkpoints, watch, best, backends)


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
        # errors may occur on one rank only. A single rank must wait: Python may crash if it ends while a thread writes. An error
        # of the checkpoint must not hide this one.
        if job.size == 1 or isinstance(error, DivergedError | CorruptedStateError):
            with contextlib.suppress(CheckpointError):
                job.checkpoints.finish()
        raise
    finally:
        job.progress.stop_thread()


def _program() -> Path | None:
    """Return the file of the program; None if there is no file."""
    name = getattr(sys.modules["__main__"], "__file__", None)
    return Path(name) if name is not None and Path(name).is_file() else None


def _alone(process: RankProcess) -> contextlib.AbstractContextManager[object]:
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


def train(
    config: str | os.PathLike[str] | Mapping[str, Any],
    /,
    *,
    resume: str | os.PathLike[str] | None = None,
    steps: CountFromZero = 0,
    on_epoch: Callable[[EpochValues], object] | None = None,
    style: ProgressStyle | None = None,
    **overrides: Any,
) -> TrainingResult:
    """Train as `hpctrain train` does, in this process or on all ranks of its MPI job, and return the result on every rank.

    A program may call it repeatedly. A request to stop (Ctrl-C, SIGTERM, SIGUSR1, SIGHUP) ends the training after a step, with a
    checkpoint. The signal is then delivered again, so that Ctrl-C raises KeyboardInterrupt. Under `hpctrain script`, the other
    signals then end the program with exit code 85. Only a call in the main thread handles signals.

    Args:
        config: path of a configuration file, or a mapping of its keys.
        resume: "auto", "best", or the path of a run or checkpoint to resume from; None starts a new run.
        steps: number of steps after which to stop, counted from the start or resume; 0 trains all epochs.
        on_epoch: function that rank 0 calls after the evaluation and checkpoint of each epoch, with its values as in
            `TrainingResult.history`. If it returns a true value or raises an exception, the training ends after this epoch with
            a checkpoint. The exception is then raised on rank 0, and an HpctrainError on the other ranks. The function must
            return within `deadline_seconds`.
        style: display of the progress: "bar" or "lines"; "none" prints only warnings and errors. Default: a bar on a terminal,
            lines elsewhere.
        overrides: values that replace keys of `config`; keys of sections have dots, as in `**{"optimizer.lr": 0.2}`.

    Raises:
        HpctrainError: the configuration, data or run has a fault; raised on all ranks. Any other error of one of several ranks
            ends the job, because the others would wait for that rank.
    """

    def read() -> tuple[Config, Source]:
        check_types(train, {"steps": steps, "config": config, "resume": resume, "on_epoch": on_epoch, "style": style})
        given = keyword_overrides(overrides)
        if isinstance(config, Mapping):
            return from_mapping(config, given, refusal)
        return load_config(path_of(config), tuple(given))

    with contextlib.ExitStack() as restored:
        restored.callback(gc.collect)  # replica, loaders and groups refer to each other
        restored.enter_context(log.restored())
        restored.enter_context(_same_environment())
        watch = SignalWatch()
        if threading.current_thread() is threading.main_thread():
            watch = restored.enter_context(taken_signals(detect(os.environ).rank or 0, trains=True))
        process = RankProcess(stays=True, resume=resume is not None, steps=steps, on_epoch=on_epoch is not None)
        source = str(path_of(resume)) if isinstance(resume, str | os.PathLike) else None
        try:
            end, result, callback = _trained(process, watch, read, source, steps, on_epoch, style)
        except HpctrainError as error:  # its sentence is complete; the frames between it and the call help no user
            raise error.with_traceback(None) from None
    if callback is not None:
        callback.raise_error()
    of_any_rank = None if end.reason is None else signal.Signals.__members__.get(end.reason.name)
    if (request := of_any_rank or watch.request) is not None:  # a request in the last step changes nothing in the run
        deliver_again(request)
    return result


def _trained(
    process: RankProcess,
    watch: SignalWatch,
    read: Callable[[], tuple[Config, Source]],
    resume: str | None,
    steps: int,
    on_epoch: Callable[[EpochValues], object] | None,
    style: ProgressStyle | None,
) -> tuple[RunEnd, TrainingResult, EpochCallback | None]:
    """Train with this watch of signals, and leave no threads, messages or communicators; MPI stays. See `train`."""
    with _raised_or_ended(process), process.exits:
        process.refuse_alone()
        session = process.session(read, trains=True, resume=resume)
        if not process.launcher.starts_mpi and process.ownership is not None:
            process.exits.callback(process.ownership.release)  # no other rank writes to the run after an error of this one
        callback = None if on_epoch is None else EpochCallback(session, on_epoch)
        try:
            asked = TrainingRequest(resume, steps, style, end_after=callback, in_program=True)
            end = run_training(session, watch, asked, process.ownership)
        except (DivergedError, CorruptedStateError):  # all ranks raise them in the same step, with messages in flight
            session.progress.drain()
            raise
        outcome = end.outcome
        stopped = "steps" if outcome.steps_reached else "on_epoch" if end.reason is None else str(end.reason)
        result = stored_result(session, end.directory, outcome, stopped if outcome.stopped else None)
        if process.launcher.starts_mpi:
            from hpctrain.comm import mpi

            mpi.free(session.world)
        return end, result, callback


@contextlib.contextmanager
def _raised_or_ended(process: RankProcess) -> Iterator[None]:
    """Raise errors that all ranks raise alike. Any other error of one of several ranks ends the job."""
    alike: HpctrainError | None = None
    alone = not process.launcher.starts_mpi
    with contextlib.nullcontext() if alone else job_ends_on_error(process.rank, process.abort, process.failed):
        try:
            yield
        except HpctrainError as error:
            of_one = error.reported_by is None or isinstance(error, CommunicationTimeoutError)
            if of_one and not alone:
                raise
            alike = error
    if alike is not None:
        raise alike


@contextlib.contextmanager
def _same_environment() -> Iterator[None]:
    """Restore the numbers of threads in the environment at the end, because a later training would take them for the user's."""
    before = {name: os.environ.get(name) for name in VARIABLES}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def model(name: str, **options: Any) -> Layer:
    """Return a model of the catalogue (`hpctrain list models`), such as "resnet18", with options (docs/options.md).

    Raises:
        ConfigError: the name is unknown, or an option is wrong.
    """
    check_types(model, {"name": name})
    return catalogue.build(name, options)


def schedule(
    name: str, *, base_lr: float, epochs: Count, steps_per_epoch: Count, warmup_epochs: float = 0.0, **options: Any
) -> LearningRateSchedule:
    """Return a learning-rate schedule, such as "cosine"; its `lr(step)` returns the learning rate of a step.

    Args:
        base_lr: learning rate after the warm-up.
        epochs, steps_per_epoch: length of the training; `lr` counts steps from 0.
        warmup_epochs: length of the warm-up, in epochs.
        options: further options of the schedule (docs/options.md).

    Raises:
        ConfigError: the name is unknown, an option is wrong, or a count is not an integer of at least 1.
    """
    given = {"base_lr": base_lr, "epochs": epochs, "steps_per_epoch": steps_per_epoch, "warmup_epochs": warmup_epochs}
    check_types(schedule, {"name": name, **given})
    return SCHEDULES.create(name, options, **given)
