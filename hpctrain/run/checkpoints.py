"""Checkpoints of a run: their content, the ranks that write them, which ones are kept, and the rollback to the newest.

In addition to the `checkpoint.keep` newest checkpoints, two others are kept: the best one, and the one that was the best when the
oldest of the newest checkpoints was written. The latter is the best checkpoint after a resume from any of the newest ones. These
add at most one checkpoint to the newest: a best checkpoint that is not one of the newest was also the best at that earlier time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.assembly.images import EVALUATION_IMAGES
from hpctrain.assembly.recipe import describe
from hpctrain.comm.base import raise_on_all_ranks
from hpctrain.config.load import dump
from hpctrain.config.schema import CheckpointConfig
from hpctrain.core import user_code
from hpctrain.core.errors import CheckpointError, DivergedError
from hpctrain.core.text import loss_text
from hpctrain.data.image_file import ImageForm
from hpctrain.data.sampler import Reordering
from hpctrain.job.automatic_choice import CHOICE_META
from hpctrain.job.session import Session
from hpctrain.run import reproducibility
from hpctrain.run.build import TrainingSetup
from hpctrain.run.resume import Start, find_start
from hpctrain.runs import directory as best_record
from hpctrain.runs.directory import BestRecord, RunDirectory, require_owned, restore_files, small_files
from hpctrain.runs.owner import read_marker
from hpctrain.runs.records import Bookkeeping, reason
from hpctrain.storage import checkpoint
from hpctrain.training.accounts import Observer
from hpctrain.training.metrics import Reporter, RunningSums
from hpctrain.training.saving import Saver, one_file, shards
from hpctrain.training.snapshot import Position

#: key of a checkpoint's metadata: evaluations of the existing checkpoints and of itself
EVALUATIONS = "evaluations"

NONE = "none"
_LOSS = "loss"
#: prefix of measures of the averaged weights
EMA = "ema_"
#: label of a measure on the evaluated set {}
_LABELS = {"top1": "{} accuracy", "top5": "top5 {} accuracy", _LOSS: "{} loss"}
_LABELS |= {f"{EMA}{measure}": f"{label} of the averaged weights" for measure, label in _LABELS.items()}
#: key whose change alters the loss of the same parameters
_OTHER_LOSS = "loss.label_smoothing"


@dataclass(frozen=True)
class StepEvaluation:
    """Means over the evaluated set after a training step.

    Attributes:
        epoch: number of finished epochs.
        loss, top1, top5: loss, and accuracies as fractions; None if not finite.
        ema_loss, ema_top1, ema_top5: the same measures of the averaged weights; None if not finite or not evaluated.
    """

    step: int
    epoch: int
    loss: float | None
    top1: float | None
    top5: float | None
    ema_loss: float | None = None
    ema_top1: float | None = None
    ema_top5: float | None = None

    @classmethod
    def of(cls, position: Position, sums: RunningSums) -> StepEvaluation:
        """Return the evaluation of the state at a position, from the sums over the evaluated set."""
        means = {name: value if math.isfinite(value) else None for name, value in sums.means().items()}
        return cls(position.global_step, position.epoch, **means)

    def value(self, measure: str) -> float | None:
        """Return the value of a measure: "top1", "top5" or "loss", with "ema_" in front for the averaged weights."""
        value: float | None = getattr(self, measure)
        return value

    def to_meta(self) -> dict[str, Any]:
        """Return the fields by name, for a checkpoint's metadata."""
        return asdict(self)

    def text(self, measure: str, evaluated: str) -> str:
        """Return a measure on the set `evaluated`, whose value must not be None, as text: "test accuracy 91.93%"."""
        value = self.value(measure)
        assert value is not None, "only finite values have a text"
        return f"{_LABELS[measure].format(evaluated)} {loss_text(value) if is_loss(measure) else f'{value:.2%}'}"


def is_loss(measure: str) -> bool:
    """Return whether lower values of the measure are better."""
    return measure.removeprefix(EMA) == _LOSS


def best_evaluation(evaluations: Iterable[StepEvaluation], measure: str, steps: Collection[int]) -> StepEvaluation | None:
    """Return the best evaluation among some steps; None if there is none, or if the measure is "none".

    Of equal evaluations, the earliest is returned.
    """
    if measure == NONE:
        return None
    sign = -1.0 if is_loss(measure) else 1.0
    values = [(value, each) for each in evaluations if each.step in steps and (value := each.value(measure)) is not None]
    return max(values, key=lambda entry: (sign * entry[0], -entry[1].step), default=(0.0, None))[1]


def spared(evaluations: Collection[StepEvaluation], measure: str, by_age: Sequence[int], keep: int) -> set[int]:
    """Return the steps whose checkpoints are kept at any age.

    They are the best step, and the best of the steps up to the oldest of the `keep` newest checkpoints.

    Args:
        by_age: steps of all existing checkpoints, in the order in which they were written.
    """
    oldest = min(by_age[-keep:], default=-1)
    until = [step for step in by_age if step <= oldest]
    return {best.step for steps in (by_age, until) if (best := best_evaluation(evaluations, measure, steps)) is not None}


class BestCheckpoint:
    """Keeper of the best checkpoint of a run, on the rank that writes files. Its methods do not communicate.

    Args:
        directory: directory of the checkpoints.
        evaluated: split that is evaluated, "validation" or "test".
    """

    def __init__(self, directory: Path, config: CheckpointConfig, reporter: Reporter, evaluated: str = "test") -> None:
        self._directory, self._measure, self._keep, self._reporter = directory, config.best, config.keep, reporter
        self._evaluated = evaluated
        self._evaluations: dict[int, StepEvaluation] = {}
        self._bookkeeping = Bookkeeping()
        self._unsettled = False
        self._unchecked_start: Path | None = None

    def evaluated(self, position: Position, sums: RunningSums) -> None:
        """Note an evaluation. A second one of the same step, as after resuming a finished run, is ignored."""
        if position.global_step not in self._evaluations:
            self._evaluations[position.global_step] = StepEvaluation.of(position, sums)
            self._unsettled = True
        self._leave_out_lost()

    def to_meta(self, step: int) -> dict[str, Any]:
        """Return the evaluations of all existing checkpoints, as metadata of the checkpoint of `step`.

        No other checkpoint may be in progress.
        """
        self._leave_out_lost()
        existing = {step, *self._steps()}
        self._evaluations = {number: each for number, each in self._evaluations.items() if number in existing}
        entries = [self._evaluations[number].to_meta() for number in sorted(self._evaluations)]
        return {EVALUATIONS: entries} if entries else {}

    def retention(self, step: int) -> Callable[[], None]:
        """Return a function that deletes old checkpoints according to the evaluations so far.

        Call the function, in any thread, after the checkpoint of `step` is written; it keeps that checkpoint in any case. It
        raises a CheckpointError if old checkpoints cannot be deleted.
        """
        evaluations = tuple(self._evaluations.values())
        return lambda: self._retain(evaluations, {step})

    def settle(self) -> None:
        """Delete old checkpoints according to all evaluations. Call at the end of a run.

        Evaluations after the last checkpoint can change which checkpoint is the best.

        Raises:
            CheckpointError: old checkpoints cannot be deleted.
        """
        if self._unsettled:
            self._retain(tuple(self._evaluations.values()))

    def go_on(self, start: Path, meta: Mapping[str, Any], changed: Collection[str] = (), *, evaluates: bool = False) -> None:
        """Resume from a checkpoint, after later ones were set aside, and read the best checkpoint to verify that it is intact.

        Args:
            start: checkpoint to resume from, already verified.
            meta: its metadata.
            changed: keys of the configuration whose values differ from those in the checkpoint.
            evaluates: whether the run first evaluates `start`, which was written before its evaluation. If so, the best
                checkpoint is verified after that evaluation, because the run may have deleted it in favour of `start`.
        """
        entries = [StepEvaluation(**entry) for entry in meta.get(EVALUATIONS, ())]
        decisive = ["data.validation", *(["data.test"] if self._evaluated == "test" else []), "data.evaluate_augment"]
        others = [key for key in (*decisive, *([_OTHER_LOSS] if is_loss(self._measure) else [])) if key in changed]
        if others and best_evaluation(entries, self._measure, {each.step for each in entries}) is not None:
            self._reporter.say(f"the best checkpoint is chosen among new ones only, as {' and '.join(others)} changed")
        self._evaluations = {} if others else {each.step: each for each in entries}
        self._unsettled, self._unchecked_start = False, start
        if not evaluates:
            self._leave_out_lost()
        self._write_record(tuple(self._evaluations.values()))

    def line(self, *, named: bool = True) -> str | None:
        """Return a line on the best checkpoint for the end of a run, with its path if `named`; None if there is none."""
        paths = dict(checkpoint.checkpoints(self._directory))
        best = best_evaluation(self._evaluations.values(), self._measure, paths)
        if best is None:
            return None
        path = f": {paths[best.step]}" if named else ""
        return f"best {self._text(best)} after epoch {best.epoch}{path}"

    def _text(self, evaluation: StepEvaluation) -> str:
        return evaluation.text(self._measure, self._evaluated)

    def _steps(self) -> set[int]:
        return {step for step, _ in checkpoint.checkpoints(self._directory)}

    def _leave_out_lost(self) -> None:
        """Drop and report evaluations of missing or damaged best checkpoints. Only the first call after a resume does so."""
        start, self._unchecked_start = self._unchecked_start, None
        if start is None:
            return
        while (best := best_evaluation(self._evaluations.values(), self._measure, self._evaluations)) is not None:
            lost = self._fault(best.step, start)
            if lost is None:
                return
            del self._evaluations[best.step]
            what = f"the best checkpoint, of step {best.step} ({self._text(best)} after epoch {best.epoch}),"
            self._reporter.warn(f"warning: {what} {lost}; the best of the remaining checkpoints is kept")

    def _fault(self, step: int, start: Path) -> str | None:
        """Return why the checkpoint of a step cannot be used, as the end of a sentence; None if it can."""
        path = dict(checkpoint.checkpoints(self._directory)).get(step)
        if path is None:
            return "is not there any more"
        try:
            if path.resolve() != start.resolve():
                checkpoint.read(path)
        except CheckpointError as error:
            return f"cannot be used ({str(error).rstrip('.')})"
        return None

    def _retain(self, evaluations: Sequence[StepEvaluation], written: Collection[int] = ()) -> None:
        """Delete old checkpoints except the best.

        The record of the best is written first, so that it names a checkpoint that is kept.

        Raises:
            CheckpointError: old checkpoints cannot be deleted.
        """
        self._write_record(evaluations)
        try:
            by_age = [step for step, _ in checkpoint.by_age(self._directory)]
            stay = spared(evaluations, self._measure, by_age, self._keep) | set(written)
            checkpoint.prune(self._directory, self._keep, stay)
        except FileNotFoundError:  # another process is deleting them too; remaining ones are deleted with the next checkpoint
            return
        except OSError as error:
            raise CheckpointError(f"Cannot delete old checkpoints in {self._directory} ({reason(error)}).") from error

    def _write_record(self, evaluations: Sequence[StepEvaluation]) -> None:
        paths = dict(checkpoint.checkpoints(self._directory))
        best = best_evaluation(evaluations, self._measure, paths)
        record = None
        if best is not None and (value := best.value(self._measure)) is not None:
            record = BestRecord(paths[best.step].name, best.step, best.epoch, self._measure, value)
        self._bookkeeping.attempt("record of the best checkpoint", lambda: best_record.write_best(self._directory, record))


#: minimum bytes of parameters for which several nodes write a sharded checkpoint. The optimiser's state adds to them: with
#: momentum a quarter of a gigabyte in all, which one rank takes about a second to gather, and longer to write
_LARGE_BYTES = 1 << 27


def _nothing() -> None:
    return None


class RunCheckpoints(Observer):
    """Observer that writes the checkpoints of a run into its directory, and keeps the best.

    All methods except `after_evaluation` are collective.

    Attributes:
        saver: writer of the checkpoints.
        best: keeper of the best checkpoint, on the rank that writes files; None on other ranks.
        last: path of the checkpoint that was begun last; None before the first.
    """

    def __init__(self, session: Session, setup: TrainingSetup, directory: RunDirectory, reporter: Reporter) -> None:
        config = session.config
        self._session, self._setup, self._directory = session, setup, directory
        self.saver = Saver(
            session.world,
            session.progress.notes,
            reporter,
            asynchronous=config.checkpoint.asynchronous,
            deadline_seconds=config.deadline_seconds,
        )
        evaluated = config.data.evaluated or "test"
        self.best = BestCheckpoint(directory.checkpoints, config.checkpoint, reporter, evaluated) if session.is_root else None
        self.last: Path | None = None
        self._sequence, self._identity = 0, None if (marker := read_marker(directory.path)) is None else marker.identity
        self._files = small_files(directory) if session.is_root else {}

    def take_up(self, start: Start | None) -> None:
        """Restore the evaluations of earlier checkpoints from the one that the run resumes from; no effect for a new run."""
        if start is None or start.directory is None:
            return
        best, complete = self.best, start.position.samples == self._setup.loader.sampler.samples
        path, meta, changed = start.path, start.content.meta, [change.key for change in start.changes]

        def take() -> None:
            if best is not None:
                best.go_on(path, meta, changed, evaluates=complete)

        raise_on_all_ranks(self._session.world, take)

    def after_evaluation(self, position: Position, sums: RunningSums) -> None:
        """Note an evaluation. It affects which checkpoints are kept."""
        if self.best is not None:
            self.best.evaluated(position, sums)

    def complete(self) -> None:
        """Wait until the last checkpoint is written, and delete old ones.

        Raises:
            CheckpointError: the checkpoint cannot be written, or old ones cannot be deleted.
        """
        self.saver.finish()
        raise_on_all_ranks(self._session.world, _nothing if self.best is None else self.best.settle)

    def save(self, position: Position) -> None:
        """Write a checkpoint, or begin to write it if `checkpoint.asynchronous` is set. Collective.

        Raises:
            CheckpointError: the checkpoint cannot be written.
        """
        step = position.global_step
        if not self.saver.ready(step):
            return
        config, world, replica = self._session.config.checkpoint, self._session.world, self._setup.replica
        sharded = is_sharded(self._session, self._setup)
        self.last = checkpoint.checkpoint_path(self._directory.checkpoints, step, sharded=sharded)
        retain = _nothing if self.best is None else self.best.retention(step)
        meta = self._meta(position)
        if sharded:
            self.saver.begin(shards(world, *replica.own_parts(position, meta), step, self.last, retain, self._prepare))
        else:
            content = replica.state(position, meta, keep=world.rank == 0, copied=config.asynchronous)
            self.saver.begin(one_file(world, content, step, self.last, retain, self._prepare))

    def _prepare(self) -> None:
        """Raise unless this job still owns the run, and restore the run's small files on rank 0, which `--resume` needs.

        Each rank calls it before it writes.
        """
        require_owned(self._directory)
        restore_files(self._directory, self._files)

    def _meta(self, position: Position) -> dict[str, Any]:
        """Return the metadata of a checkpoint. Collective."""
        session, setup = self._session, self._setup
        evaluated = next(iter(setup.evaluated.values()), None)
        meta: dict[str, Any] = {
            "epoch": position.epoch,
            "samples": position.samples,
            "global_step": position.global_step,
            "seed": session.config.seed,
            "config": dump(session.config),
            "data": setup.data.to_meta(),
            **({} if evaluated is None else {EVALUATION_IMAGES: asdict(ImageForm.of(evaluated.file))}),
            "ranks": session.world.size,
            "grid": describe(session.recipe.plan),
            **reproducibility.keep_schedules(session, setup, self._directory),
        }
        if session.config.exact.shards is not None:
            meta[reproducibility.EXACT_META] = reproducibility.reproducibility_record(
                setup.replica.network.kernels, session.threads
            )
        if self.best is not None:
            meta |= self.best.to_meta(position.global_step)
            meta |= self._place()
        if session.resolved.choice is not None:
            meta[CHOICE_META] = session.resolved.choice.to_meta()
        if digests := user_code.digests():
            meta["code"] = digests
        return meta

    def _place(self) -> dict[str, Any]:
        """Return the next checkpoint's sequence number and its run's identity, as metadata. Call it on the rank that writes."""
        self._sequence = max(1 + self._sequence, checkpoint.next_sequence(self._directory.checkpoints))
        marker = read_marker(self._directory.path)
        self._identity = self._identity if marker is None else marker.identity
        return {checkpoint.SEQUENCE: self._sequence, **({} if self._identity is None else {checkpoint.RUN: self._identity})}


def is_sharded(session: Session, setup: TrainingSetup) -> bool:
    """Return whether the checkpoints of a run consist of one shard per rank. All ranks return the same."""
    layout = session.config.checkpoint.layout
    if layout != "auto":
        return layout == "sharded"
    network = setup.replica.network
    count = sum(math.prod(spec.shape) for spec in network.parameter_specs.values())
    return max(session.grid.node_of) > 0 and count * np.dtype(network.parameter_dtype).itemsize >= _LARGE_BYTES


class Rollback:
    """Callback of `Trainer` that takes a diverged run back to its newest checkpoint. Every call is collective.

    Args:
        directory: directory of the run, which has a checkpoint from its first step on.
        checkpoints: checkpoints of the run; one in progress is completed first.
        most: maximum number of rollbacks to one checkpoint.
    """

    def __init__(
        self,
        session: Session,
        setup: TrainingSetup,
        directory: RunDirectory,
        reporter: Reporter,
        checkpoints: RunCheckpoints,
        most: int,
    ) -> None:
        self._session, self._setup, self._directory, self._reporter = session, setup, directory, reporter
        self._checkpoints = checkpoints
        self._most = most
        self._step, self._times = -1, 0

    def __call__(self, error: DivergedError, position: Position) -> Position:
        """Restore the newest checkpoint and return its position, with a new order of samples.

        Raises:
            DivergedError: the run has returned to this checkpoint too often.
            CheckpointError: no checkpoint can be read.
        """
        self._checkpoints.saver.settle()
        start = find_start(self._session, str(self._directory.path))
        assert start is not None, "a directory was named"
        target = start.position
        self._times = self._times + 1 if target.global_step == self._step else 1
        self._step = target.global_step
        if self._times > self._most:
            raise DivergedError(
                f"{error} The run has gone back to step {self._step} {self._most} times, each time with another order of "
                f"samples, without reaching its next checkpoint; follow the advice above, or raise on_nonfinite.most.",
                ranks=error.ranks,
            ).of_all_ranks()
        raise_on_all_ranks(self._session.world, partial(self._setup.replica.load, start.content))
        number = 1 + max((change.number for change in (*position.reorderings, *target.reorderings)), default=0)
        target = replace(target, reorderings=(*target.reorderings, Reordering(target.epoch, target.samples, number)))
        self._cut_records(target)
        self._checkpoints.take_up(start)
        self._report(error, position.global_step, target, number)
        return target

    def _cut_records(self, target: Position) -> None:
        """On rank 0, remove records and set aside checkpoints of steps after `target`. Collective."""

        def cut() -> None:
            if self._session.is_root:
                require_owned(self._directory)
                checkpoint.set_aside(self._directory.checkpoints, target.global_step)
                self._directory.cut_metrics(target.epoch, target.global_step, goes_back=True)

        raise_on_all_ranks(self._session.world, cut)

    def _report(self, error: DivergedError, from_step: int, target: Position, number: int) -> None:
        epoch, step = target.epoch + 1, target.global_step
        record = {"epoch": epoch, "step": step, "from_step": from_step, "samples": target.samples, "order": number}
        self._reporter.record("rollback", {**record, "error": str(error)})
        self._reporter.warn(
            f"went back from step {from_step} to step {step}, continuing with order {number} of the samples: {error}"
        )


def rollback(
    session: Session,
    setup: TrainingSetup,
    directory: RunDirectory,
    reporter: Reporter,
    checkpoints: RunCheckpoints,
    start: Start | None,
) -> Rollback | None:
    """Return the rollback of a run, or None if `on_nonfinite.action` is not "rollback". Collective.

    Args:
        checkpoints: checkpoints of the run; if there is none yet, the initial state is saved.
        start: start of a resumed run; None for a new run.
    """
    answer = session.config.on_nonfinite
    if answer.action != "rollback":
        return None
    if start is None or start.directory is None:
        checkpoints.save(Position() if start is None else start.position)
    return Rollback(session, setup, directory, reporter, checkpoints, answer.most)
