"""A run from start to end: directory, resume, training or evaluation, and printed lines.

A signal or the time limit, measured by this rank's clock, ends a run early.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.assembly.images import WARNING, data_line
from hpctrain.assembly.recipe import describe
from hpctrain.backend.specs import TensorSpec
from hpctrain.comm.base import Communicator, raise_on_all_ranks
from hpctrain.comm.progress import ProgressMode
from hpctrain.config.load import dump
from hpctrain.config.schema import Config
from hpctrain.config.values import SLURM
from hpctrain.core import log, user_code
from hpctrain.core.errors import (
    CheckpointError,
    CollectiveMismatchError,
    CommunicationTimeoutError,
    ConfigError,
    HpctrainError,
)
from hpctrain.core.text import counted, echo_wrapped, loss_text, spans
from hpctrain.flight.autopsy import different_phases
from hpctrain.flight.recorder import RunPhase
from hpctrain.job import flight_records
from hpctrain.job.ownership import RunOwnership
from hpctrain.job.session import Session, busy_node, cores_of_ranks, oversubscribed
from hpctrain.launch.process_end import STOPPED
from hpctrain.launch.scheduler import SLURM_END, age_seconds, slurm_seconds_left
from hpctrain.launch.signals import SignalWatch
from hpctrain.run import accounts, reproducibility
from hpctrain.run.accounts import DataAccount, ReadReport, RunHashes
from hpctrain.run.build import TrainingSetup, build, describe_frozen, keep_choice, start_from_weights
from hpctrain.run.checkpoints import RunCheckpoints, rollback
from hpctrain.run.messages import set_progress
from hpctrain.run.result import EpochCallback
from hpctrain.run.resume import Start, find_start, introduce
from hpctrain.runs.directory import RunDirectory, software_versions
from hpctrain.storage import checkpoint
from hpctrain.storage.checkpoint import checkpoints
from hpctrain.training.accounts import StepTimes
from hpctrain.training.metrics import Reporter
from hpctrain.training.reporters import make_reporter
from hpctrain.training.reporting import ConsoleReporter, LogReporter, ProgressStyle
from hpctrain.training.snapshot import Position
from hpctrain.training.stopping import TimeLimit
from hpctrain.training.trainer import Cadence, Outcome, Trainer

if TYPE_CHECKING:
    from hpctrain.run.trace_report import TraceReport


@dataclass(frozen=True)
class MaxTime:
    """Time limit of a run.

    Attributes:
        limit: time limit as the trainer checks it.
        name: name of the limit, for `reason`.
        sentence: sentence on the limit, reported at the start of the run; "" if there is no limit.
    """

    limit: TimeLimit = field(default_factory=TimeLimit)
    name: str = ""
    sentence: str = ""

    @property
    def reason(self) -> str | None:
        """Name of this limit if it has requested the end of the run, else None."""
        return self.name if self.limit.asked else None


def max_time(configured: float | str | None, environ: Mapping[str, str] = os.environ, *, in_program: bool = False) -> MaxTime:
    """Return the limit for the configured `max_time`: a number of seconds, or "slurm" for the time until the Slurm job ends.

    The duration starts with this process or, in a Python program, which may train several times, with this call.

    Raises:
        ConfigError: `max_time` is "slurm", but the environment does not contain the end of the Slurm job.
    """
    if configured is None:
        return MaxTime()
    if configured != SLURM:
        used = 0.0 if in_program else age_seconds()
        return _named(float(configured) - used, f"max_time, {float(configured):g} s", in_program=in_program)
    left = slurm_seconds_left(environ)
    if left is None:
        raise ConfigError(
            f"max_time is {SLURM}, but the environment has no {SLURM_END}, which Slurm sets from version 22.05 on; "
            "set max_time to a duration such as 3h50m."
        )
    return _named(left, "max_time, the end of the Slurm job", in_program=in_program)


def _named(left: float, name: str, *, in_program: bool) -> MaxTime:
    end = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() + left))
    code = "" if in_program else f" and exit code {STOPPED}"
    sentence = f"{name}: the run ends with a checkpoint{code} before {end}, if it is not done by then"
    return MaxTime(TimeLimit(left), name, sentence)


@dataclass(frozen=True)
class StopReason:
    """Signal or limit that ended a run.

    Attributes:
        ranks: ranks that received the signal; () if all did, or for a limit.
    """

    name: str
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.name + (f" on {'rank' if len(self.ranks) == 1 else 'ranks'} {spans(self.ranks)}" if self.ranks else "")


def stop_reason(world: Communicator, watch: SignalWatch, limit: str | None = None) -> StopReason | None:
    """Return the signal received by the lowest rank that received one, else the limit of the lowest rank that reached one.

    The result is None if there is neither. Collective; call it at the end of a run.

    Args:
        limit: name of the limit that has asked this rank to stop; None if none has.
    """
    reasons = world.allgather_object((watch.request.name if watch.request is not None else None, limit))
    names, limits = [name for name, _ in reasons], [name for _, name in reasons]
    first = next((name for name in names if name is not None), None)
    if first is None:
        reached = next((name for name in limits if name is not None), None)
        return None if reached is None else StopReason(reached)
    ranks = tuple(rank for rank, name in enumerate(names) if name == first)
    return StopReason(first, ranks if len(ranks) < len(names) else ())


def kept_clause(directory: RunDirectory) -> str:
    """Return the end of a sentence on a run that ends at once: the checkpoint to resume from. Checkpoints are not opened."""
    try:
        written = checkpoints(directory.checkpoints)
    except OSError:
        return ""
    return f"; the newest one on the disk is {written[-1][1]}" if written else "; there is none of this run on the disk"


@dataclass(frozen=True)
class TrainingRequest:
    """Request of a user for a training, in addition to its configuration.

    Attributes:
        resume: source of the checkpoint, see `find_start`; None: start a new run.
        steps: number of steps to train; 0: no limit.
        style: display of the progress, see `ConsoleReporter`; "none" prints only warnings and errors.
        end_after: callback of the program, called after each epoch on all ranks; None: there is none.
        in_program: whether a Python program is the caller. Lines on how to resume then name arguments instead of options.
        trial: whether the caller deletes the run directory if the run succeeds. The end of the run then names none of its files.
    """

    resume: str | None = None
    steps: int = 0
    style: ProgressStyle | None = None
    end_after: EpochCallback | None = None
    in_program: bool = False
    trial: bool = False

    @property
    def steps_name(self) -> str:
        """Name of the argument `steps` for the caller: "steps" in Python, "--steps" on the command line."""
        return "steps" if self.in_program else "--steps"

    def continuation(self, directory: Path, *, all_steps: bool = False) -> str:
        """Return the end of a sentence on how to resume the run.

        Args:
            all_steps: whether `steps` has ended the run, and must be left out to train all epochs.
        """
        if self.in_program:
            return f"resume={str(directory)!r}{' and without steps' if all_steps else ''}"
        return f"the same command{' and, instead of --steps,' if all_steps else ' and'} --resume {directory}"


@dataclass(frozen=True)
class RunEnd:
    """How a run ended: its directory, its outcome, and the reason of an early end.

    Attributes:
        reason: signal or time limit that ended the run early, after a checkpoint was written; None: neither did.
    """

    directory: RunDirectory
    outcome: Outcome
    reason: StopReason | None


def enter(session: Session, phase: RunPhase) -> None:
    """Note a phase of the run in the flight record, and check that all ranks enter the same phase. Collective.

    Use it for phases that occur once in a run. Phases of the training loop are only noted; an autopsy compares them after a
    deadline has passed.

    Raises:
        CollectiveMismatchError: a rank has entered another phase, so ranks would wait for each other or match the wrong messages.
    """
    session.progress.notes.phase(phase)
    entered = dict(enumerate(session.world.allgather_object(str(phase))))
    sentence, ranks = different_phases(entered)
    if ranks:
        raise CollectiveMismatchError(sentence, ranks=ranks).of_all_ranks()


def run_training(session: Session, watch: SignalWatch, asked: TrainingRequest, ownership: RunOwnership | None = None) -> RunEnd:
    """Train; print the last accuracies and the path of the run's files. Collective.

    The phases are in this order on all ranks. From the search for a checkpoint or the creation of the run until this call
    returns, this job owns the run, by an ownership that rank 0 holds. No other job writes to the run meanwhile.

    Args:
        watch: watch of signals, which end the run early.
        ownership: ownership with which this job takes the run. None: this call creates one.

    Raises:
        HpctrainError: configuration, data, checkpoint or run have a fault, or ranks have entered different phases; on all ranks.
    """
    ownership = RunOwnership() if ownership is None else ownership
    with ownership.held():
        enter(session, RunPhase.START)
        limit = raise_on_all_ranks(session.world, lambda: max_time(session.config.max_time, in_program=asked.in_program))
        start = None
        if asked.resume is not None:
            enter(session, RunPhase.FIND)
            start = find_start(session, asked.resume, ownership)
        enter(session, RunPhase.BUILD)
        setup = build(session, None if start is None else start.data, stop_requested=watch.asked)
        if start is None:  # a checkpoint contains the weights
            enter(session, RunPhase.WEIGHTS)
            setup = replace(setup, notes=(*setup.notes, *start_from_weights(session, setup)))
        enter(session, RunPhase.AGREE)
        reproducibility.agree_record(session, setup, start)
        setup.replica.agree(reproducibility.stored_schedules(session, setup, start), setup.transport)
        if start is not None:
            enter(session, RunPhase.LOAD)
            raise_on_all_ranks(session.world, partial(setup.replica.load, start.content))
            start = replace(start, content=replace(start.content, tensors={}))  # frees the memory of the tensors
        enter(session, RunPhase.OPEN)
        position = Position() if start is None else start.position
        if start is None or start.directory is None:
            directory = _new_directory(session, setup, ownership)
        else:
            directory = _continued_directory(session, setup, start, start.directory, ownership)
        reporter = _reporter(session, directory, asked.style, position.global_step)
        try:
            enter(session, RunPhase.INTRODUCE)
            _introduce(session, setup, reporter, limit.sentence)
            _introduce_start(session, setup, reporter, start, asked.resume)
            reporter.say(f"run directory {directory.path}{', which is deleted if the trial succeeds' if asked.trial else ''}")
            watch.keeps(partial(kept_clause, directory))
            flight_records.keep(session, directory, reporter)
            enter(session, RunPhase.MEASURE)
            run_accounts = _begin_accounts(session, setup, directory, reporter, position.global_step)
            enter(session, RunPhase.TAKE_UP)
            checkpoints = RunCheckpoints(session, setup, directory, reporter)
            checkpoints.take_up(start)
            setup.replica.loop.writes_with(checkpoints.saver)
            trainer = Trainer(
                setup,
                Cadence.of(session.config, asked.steps),
                reporter,
                checkpoints.save,
                go_back=rollback(session, setup, directory, reporter, checkpoints, start),
                stop_requested=watch.asked,
                limit=limit.limit,
                observers=(checkpoints, *run_accounts.records, run_accounts.steps),
                end_after=asked.end_after,
            )
            outcome = _train(session, setup, trainer, checkpoints, position)
            enter(session, RunPhase.REPORT)
            run_accounts.finish(outcome)
            reason = _stop(session, watch, limit.reason, asked, outcome, reporter)
        finally:
            session.progress.stop_thread()
            reporter.close()
        return _end(session, asked, RunEnd(directory, outcome, reason), checkpoints)


@dataclass(frozen=True)
class _Accounts:
    """Accounts and trace of a run, recorded during training and reported at its end.

    Attributes:
        begun: global step at the start.
    """

    session: Session
    setup: TrainingSetup
    directory: RunDirectory
    reporter: Reporter
    begun: int
    steps: StepTimes
    trace: TraceReport | None
    records: tuple[DataAccount, ReadReport, RunHashes]

    def finish(self, outcome: Outcome) -> None:
        """Write the trace of a traced run; report and record all accounts. Collective."""
        if self.trace is not None:
            for line in self.trace.finish(self.directory.path, _about(self.session, self.setup), self.reporter.width):
                self.reporter.say(line)
        steps = self.begun, outcome.position.global_step
        accounts.finish_steps(self.session, self.setup.backend, self.steps, self.reporter, steps[1])
        accounts.finish_memory(self.session.world, self.setup.backend, self.reporter, steps)
        for record in self.records:
            record.finish(outcome.position)


def _begin_accounts(session: Session, setup: TrainingSetup, directory: RunDirectory, reporter: Reporter, begun: int) -> _Accounts:
    """Choose the progress mode, and create the accounts and the trace report. Collective."""
    reproducibility.keep_schedules(session, setup, directory)
    mode = set_progress(session, setup.replica.network, session.config.progress)
    if mode is not ProgressMode.TEST and session.world.size > 1:
        reporter.say(f"progress {mode}: {mode.in_words}")
    reporter.record("progress", {"mode": str(mode)})
    one_thread = setup.backend.kernels.arithmetic.on_host and session.threads.threads == 1
    steps, trace = StepTimes(session.progress, processor=time.thread_time if one_thread else None), None
    if session.progress.trace is not None:
        from hpctrain.run.trace_report import TraceReport  # here: only traced runs need it

        trace = TraceReport(session.world, session.progress, session.progress.trace)
    hashes = RunHashes(session, setup.replica, directory)
    records = DataAccount(session, reporter), ReadReport(session, setup, reporter), hashes
    return _Accounts(session, setup, directory, reporter, begun, steps, trace, records)


def _train(session: Session, setup: TrainingSetup, trainer: Trainer, checkpoints: RunCheckpoints, position: Position) -> Outcome:
    """Train, evaluate the final state unless the last epoch already did, test, and wait for the last checkpoint. Collective."""
    try:
        outcome = trainer.run(position)
        evaluation = outcome.evaluation
        test = None
        if not outcome.stopped:
            evaluation = trainer.evaluate(outcome.position) if evaluation is None else evaluation
            test = trainer.evaluate(outcome.position, final=True)
        enter(session, RunPhase.DRAIN)
        setup.replica.drain()
    except CommunicationTimeoutError:
        raise
    except Exception as error:
        if session.world.size > 1 and not isinstance(error, HpctrainError):
            raise
        # All ranks raise the error: the checkpoint in progress is the one to resume from.
        with session.progress.notes.meanwhile("a checkpoint"), contextlib.suppress(CheckpointError):
            checkpoints.saver.finish()
        raise
    session.progress.notes.phase(RunPhase.SAVE)
    checkpoints.complete()
    return replace(outcome, evaluation=evaluation, test=test)


def run_compute_only(session: Session, steps: int, style: ProgressStyle | None = None) -> None:
    """Time steps without communication, then communication alone; print and record both. The session has a tracer. Collective.

    Raises:
        ConfigError: no complete step ran.
    """
    from hpctrain.run import trace_report as compute_only
    from hpctrain.run.trace_report import TraceReport

    alone = compute_only.without_communication(session)
    setup = build(alone)
    setup.replica.agree(transport=setup.transport)
    ownership = RunOwnership()
    directory = _new_directory(alone, setup, ownership)
    reporter = _reporter(alone, directory, style)
    trace = alone.progress.trace
    assert trace is not None
    try:
        _introduce(alone, setup, reporter)
        reporter.say(f"run directory {directory.path}")
        about = _about(alone, setup)
        trace_report = TraceReport(alone.world, alone.progress, trace)
        trainer = Trainer(setup, Cadence.of(alone.config, steps), reporter, lambda at: None)
        trainer.run(Position())
        lines = trace_report.finish(directory.path, about, reporter.width)
        table = trace_report.table
        if table is None:
            raise ConfigError("No complete step ran, so there is no compute-only step; set epochs to at least 1.")
        exchange = compute_only.measure_exchange(session.groups, alone.progress, setup.replica.network)
        lines += compute_only.report_compute_only(alone, directory.path, table, exchange, about)
        for line in lines:
            reporter.say(line)
    finally:
        reporter.close()
        ownership.release()
    if alone.is_root and style != "none":
        print(f"files of this run: {directory.path}", flush=True)


def _new_directory(session: Session, setup: TrainingSetup, ownership: RunOwnership) -> RunDirectory:
    """Create a run directory on rank 0, take ownership of it, and return it on every rank. Collective."""
    config = session.config

    def make() -> str | None:
        if not session.is_root:
            return None
        directory = RunDirectory.create(
            Path(config.output), config.name, config=dump(config), versions=_versions(session, setup), git=session.revision
        )
        keep_choice(session.resolved, directory)
        return str(directory.path)

    directory = RunDirectory.open(Path(session.world.broadcast_object(raise_on_all_ranks(session.world, make))))
    ownership.take(session, directory.path)
    return replace(directory, ownership=ownership.claim)


def _continued_directory(
    session: Session, setup: TrainingSetup, start: Start, directory: RunDirectory, ownership: RunOwnership
) -> RunDirectory:
    """Return the directory of a resumed run, with the current configuration. Collective.

    Rank 0 removes the metrics of steps after `start`, and sets their checkpoints aside.
    """
    ownership.take(session, directory.path)
    directory = replace(directory, ownership=ownership.claim)
    position = start.position
    evaluates = position.epoch >= session.config.epochs and bool(setup.evaluated)

    def cut() -> None:
        if session.is_root:
            earlier = str(start.content.meta["config"])
            checkpoint.set_aside(directory.checkpoints, position.global_step)
            directory.cut_metrics(position.epoch, position.global_step, evaluates=evaluates)
            directory.follow_config(dump(session.config), position.global_step, earlier)
            keep_choice(session.resolved, directory)

    raise_on_all_ranks(session.world, cut)
    return directory


def _reporter(session: Session, directory: RunDirectory, style: ProgressStyle | None, done_steps: int = 0) -> Reporter:
    """Return rank 0's reporters. On other ranks, return a reporter that writes the rank's log file or nothing. Collective.

    Raises:
        ConfigError: a configured reporter cannot be made.
    """
    metrics = session.config.metrics

    kept = log.current_rank_log()
    logged = []
    if kept is not None:
        kept.keep_in(directory.log_path(session.world.rank))
        logged = [LogReporter(session.progress, interval_seconds=metrics.interval_seconds)]

    def make() -> Reporter:
        if not session.is_root:
            return logged[0] if logged else Reporter()
        others = [
            *logged,
            *(make_reporter(reporter.name, reporter.options, directory.path, done_steps) for reporter in metrics.all_reporters),
        ]
        return ConsoleReporter(directory, interval_seconds=metrics.interval_seconds, others=others, style=style)

    return raise_on_all_ranks(session.world, make)


def _introduce(session: Session, setup: TrainingSetup, reporter: Reporter, limit: str = "") -> None:
    """Report ranks, threads, kernels, model, data, and the sentence on the time limit of the run, if any. Collective."""
    config, network = session.config, setup.replica.network
    count = sum(math.prod(spec.shape) for spec in network.parameter_specs.values())
    flops = network.model.flops(TensorSpec((1, *network.image_shape)))
    grid = "" if session.resolved.choice else f" as {describe(session.recipe.plan)}"  # the line of the choice has the grid
    for line in session.resolved.lines:
        reporter.say(line)
    reporter.say(f"{counted(session.world.size, 'rank')}{grid}, launcher {session.launcher.name}")
    reporter.say(str(session.threads))
    cores, busy = cores_of_ranks(session.world, session.grid.node_of), busy_node(session.world, session.threads.load)
    if session.launcher.starts_mpi:
        reporter.say(cores)
    if busy:
        reporter.warn(busy)
    reporter.say(f"kernels {setup.backend.description}; averager {config.averager.name}")
    reporter.say(
        f"model {config.model.name}: {count:,} parameters, {flops / 1e6:,.1f} MFLOP forward per image of {network.image_shape}"
    )
    held_out = setup.data.held_out
    reporter.say(data_line(config, setup.loader.sampler.samples, 0 if held_out is None else held_out[0]))
    for note in filter(None, (describe_frozen(network), *setup.notes, limit)):
        (reporter.warn if note.startswith(WARNING) else reporter.say)(note)


def _introduce_start(session: Session, setup: TrainingSetup, reporter: Reporter, start: Start | None, resume: str | None) -> None:
    """Report the position of a resume, or initial weights."""
    config = session.config
    if start is not None:
        introduce(start, config, setup.loader.sampler.samples, reporter)
    elif resume is not None:
        reporter.say(f"nothing to resume: no run named {config.name} in {Path(config.output).absolute()} has a checkpoint yet")
    if start is None and config.init.whiten is not None:
        reporter.say(f"filters of {config.init.whiten} whiten patches of training images")
    if start is None and config.init.weights is not None:
        left_out = f", without {', '.join(config.init.ignore)}" if config.init.ignore else ""
        reporter.say(f"weights of {config.init.weights}{left_out}")


def _about(session: Session, setup: TrainingSetup) -> dict[str, object]:
    """Return the conditions of a measurement: versions, model, grid, threads."""
    config = session.config
    return {
        **_versions(session, setup),
        "model": config.model.name,
        "averager": config.averager.name,
        "batch": config.batch,
        "grid": describe(session.recipe.plan),
        "threads": session.threads.threads,
        "oversubscribed": oversubscribed(session.grid.node, session.world, session.threads.threads),
    }


def _stop(
    session: Session, watch: SignalWatch, limit: str | None, asked: TrainingRequest, outcome: Outcome, reporter: Reporter
) -> StopReason | None:
    """Return the signal or limit that ended the run, if any; record the position of an early end and its reason. Collective."""
    if not outcome.stopped:
        return None
    reason = None if outcome.steps_reached else stop_reason(session.world, watch, limit)
    requested = asked.steps_name if outcome.steps_reached else "on_epoch"
    by, position = requested if reason is None else str(reason), outcome.position
    reporter.record("stop", {"epoch": position.epoch + 1, "step": position.global_step, "by": by})
    return reason


def _end(session: Session, asked: TrainingRequest, end: RunEnd, checkpoints: RunCheckpoints) -> RunEnd:
    """End the run on all ranks, print how it ended on rank 0 unless the style is "none", and return the end. Collective."""
    enter(session, RunPhase.END)
    if session.is_root and asked.style != "none":
        for line in _end_lines(asked, end, session.config, checkpoints):
            echo_wrapped(line)
        if not asked.trial or end.reason is not None:
            print(f"files of this run: {end.directory.path}", flush=True)  # not wrapped, so that scripts can read the path
    return end


def _end_lines(asked: TrainingRequest, end: RunEnd, config: Config, checkpoints: RunCheckpoints) -> Iterator[str]:
    """Yield the lines on how the run ended, with its last accuracies and its best checkpoint."""
    directory, outcome, continuation = end.directory, end.outcome, asked.continuation(end.directory.path)
    epochs, position = config.epochs, outcome.position
    where = f"after step {position.global_step}, in epoch {min(position.epoch + 1, epochs)} of {epochs}"
    written = checkpoints.last or checkpoint.checkpoint_path(directory.checkpoints, position.global_step)
    if end.reason is not None:
        yield f"stopped by {end.reason} {where}"
        yield f"checkpoint {written}"
        yield f"continue with {continuation}"
        if not asked.in_program:
            yield f"exit code {STOPPED}"
    elif outcome.steps_reached:
        yield f"ended {where}, as requested by {asked.steps_name}"
        if outcome.evaluation is None:
            yield "no evaluation was made; evaluations are made only at ends of epochs"
        yield f"checkpoint {written}"
        yield f"continue with {asked.continuation(directory.path, all_steps=True)}"
    elif outcome.stopped:
        yield f"ended after epoch {position.epoch} of {epochs}, as requested by on_epoch"
        yield f"continue with {continuation}"
    if skipped := position.skipped:
        were = "step was" if skipped == 1 else "steps were"
        yield f"{skipped:,} of {position.global_step:,} {were} skipped because of values that were not finite"
    then = f" after epoch {outcome.evaluated_epochs} of {epochs}" if outcome.stopped else ""
    for split, sums in ((config.data.evaluated, outcome.evaluation), ("test", outcome.test)):
        if sums is not None:
            label, means = f"{split} accuracy{then}", sums.means()
            loss = loss_text(means["loss"])
            yield f"{label}: {means['top1']:.2%} (top5 {means['top5']:.2%}, loss {loss}, {sums.count:,} images)"
            if "ema_top1" in means:
                yield f"{label} of the averaged weights: {means['ema_top1']:.2%} (loss {loss_text(means['ema_loss'])})"
    if checkpoints.best is not None and (best := checkpoints.best.line(named=not asked.trial)) is not None:
        yield best


def _versions(session: Session, setup: TrainingSetup) -> dict[str, str]:
    software = software_versions(kernels=setup.backend.name, launcher=session.launcher.name, mpi=session.mpi_library)
    return software | dict(setup.backend.versions) | user_code.digests()
