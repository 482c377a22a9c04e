"""The best checkpoint of a run: what evaluations have said of each one, which is kept for that, and what is told of it.

Beside the newest checkpoints stays the one that was the best when the oldest of them was written. So the best of all is there,
and whichever of the newest a run goes on from, what was the best until then is there as well: it goes on as if nothing had been.
That is one file more than `checkpoint.keep` at most, as a better one is among the newest for a while.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpctrain.config.schema import CheckpointConfig, Config
from hpctrain.core.errors import CheckpointError
from hpctrain.storage import best_record, checkpoint
from hpctrain.storage.best_record import BestRecord
from hpctrain.storage.bookkeeping import Bookkeeping
from hpctrain.train.metrics_rest import Reporter, RunningSums
from hpctrain.train.progress_text import loss_text
from hpctrain.train.snapshot import Position

#: of a checkpoint's metadata: what evaluations have said of the checkpoints that were there, and of itself
META = "evaluations"

NONE = "none"
_LOSS = "loss"
#: measures of that beginning are those of the average of weights
EMA = "ema_"
_LABELS = {"top1": "test accuracy", "top5": "top5 test accuracy", _LOSS: "test loss"}
_LABELS |= {f"{EMA}{measure}": f"{label} of the averaged weights" for measure, label in _LABELS.items()}
#: keys whose change gives the same parameters another evaluation
_OTHER_EVALUATION = ("data.test", "data.evaluate_augment")
_OTHER_LOSS = "loss.label_smoothing"


@dataclass(frozen=True)
class StepEvaluation:
    """The means over the test set after `step` steps and `epoch` epochs; None: not finite, or none. Accuracies are fractions."""

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
        """The evaluation at a position."""
        means = {name: value if math.isfinite(value) else None for name, value in sums.means().items()}
        return cls(position.global_step, position.epoch, **means)

    def value(self, measure: str) -> float | None:
        """The value of a measure: "top1", "top5" or "loss", or that with "ema_" before it."""
        value: float | None = getattr(self, measure)
        return value

    def to_meta(self) -> dict[str, Any]:
        """The fields as a checkpoint's metadata has them: older programs do not know those of averages."""
        return {name: value for name, value in asdict(self).items() if value is not None or not name.startswith(EMA)}

    def text(self, measure: str) -> str:
        """The value of a measure that is not None, for people: "test accuracy 91.93%"."""
        value = self.value(measure)
        assert value is not None, "only finite values are told"
        return f"{_LABELS[measure]} {loss_text(value) if is_loss(measure) else f'{value:.2%}'}"


def is_loss(measure: str) -> bool:
    """Whether less is better."""
    return measure.removeprefix(EMA) == _LOSS


def best_of(evaluations: Iterable[StepEvaluation], measure: str, steps: Collection[int]) -> StepEvaluation | None:
    """The best one of some steps, the earlier one of two that are equal; None where there is none, or measure is "none"."""
    if measure == NONE:
        return None
    sign = -1.0 if is_loss(measure) else 1.0
    values = [(value, each) for each in evaluations if each.step in steps and (value := each.value(measure)) is not None]
    return max(values, key=lambda entry: (sign * entry[0], -entry[1].step), default=(0.0, None))[1]


def spared(evaluations: Collection[StepEvaluation], measure: str, by_age: Sequence[int], keep: int) -> set[int]:
    """Steps whose checkpoints stay, however old they are: the best, and the best as of the oldest of the `keep` newest ones.

    Args:
        by_age: steps of all checkpoints that there are, the one written first at first.
    """
    oldest = min(by_age[-keep:], default=-1)
    until = [step for step in by_age if step <= oldest]
    return {best.step for steps in (by_age, until) if (best := best_of(evaluations, measure, steps)) is not None}


def nothing_to_choose(config: Config, steps_per_epoch: int) -> str | None:
    """Why a run that was asked for its best checkpoint cannot know it, or has one candidate alone; None where it can choose."""
    settings = config.checkpoint
    if "best" not in settings.model_fields_set or settings.best == NONE or not config.epochs:
        return None
    if config.data.test is None:
        reason = "data.test is not set, so that nothing is evaluated"
    elif not settings.every_epochs and not settings.every_steps:
        reason = "checkpoint.every_epochs and every_steps are 0, so that no checkpoints are written"
    elif not config.evaluate.every_epochs:
        reason = "evaluate.every_epochs is 0, so that the end of the run alone is evaluated"
    elif config.epochs > 1 and not any(_is_candidate(config, epoch, steps_per_epoch) for epoch in range(1, config.epochs)):
        reason = f"no epoch before the last of {config.epochs} has both an evaluation and a checkpoint"
    else:
        return None
    return f"checkpoint.best is {settings.best}, but {reason}: the newest checkpoints are kept and no other"


def _is_candidate(config: Config, epoch: int, steps_per_epoch: int) -> bool:
    """Whether the end of an epoch, not the last one, has an evaluation and a checkpoint."""
    settings = config.checkpoint
    saves = settings.every_epochs and epoch % settings.every_epochs == 0
    saves = saves or (settings.every_steps and epoch * steps_per_epoch % settings.every_steps == 0)
    return bool(saves) and epoch % config.evaluate.every_epochs == 0


class BestCheckpoint:
    """Keeps the best checkpoint of a run, on the one rank that writes files. Nothing here communicates.

    Args:
        directory: of checkpoints. reporter: is told what cannot be kept.
    """

    def __init__(self, directory: Path, config: CheckpointConfig, reporter: Reporter) -> None:
        self._directory, self._measure, self._keep, self._reporter = directory, config.best, config.keep, reporter
        self._evaluations: dict[int, StepEvaluation] = {}
        self._bookkeeping = Bookkeeping()
        self._unsettled = False
        self._unchecked_start: Path | None = None

    def evaluated(self, position: Position, sums: RunningSums) -> None:
        """Take note of an evaluation; a second one of a step, as of a run that was finished, changes nothing."""
        if position.global_step not in self._evaluations:
            self._evaluations[position.global_step] = StepEvaluation.of(position, sums)
            self._unsettled = True
        self._leave_out_lost()

    def to_meta(self, step: int) -> dict[str, Any]:
        """For the metadata of a checkpoint of `step`, before which none is being written: what is known of all there are."""
        self._leave_out_lost()
        there = {step, *self._steps()}
        self._evaluations = {number: each for number, each in self._evaluations.items() if number in there}
        entries = [self._evaluations[number].to_meta() for number in sorted(self._evaluations)]
        return {META: entries} if entries else {}

    def retention(self, step: int) -> Callable[[], None]:
        """Return a function that deletes old checkpoints, judged by the evaluations known now.

        Call it, in any thread, once the next checkpoint, that of `step`, is on the disk. It keeps the checkpoint of `step` in any
        case, and raises a CheckpointError if old ones cannot be deleted.
        """
        evaluations = tuple(self._evaluations.values())
        return lambda: self._retain(evaluations, {step})

    def settle(self) -> None:
        """At the end of a run: an evaluation that came after its checkpoint counts, too.

        Raises:
            CheckpointError: old checkpoints cannot be deleted.
        """
        if self._unsettled:
            self._retain(tuple(self._evaluations.values()))

    def go_on(self, start: Path, meta: Mapping[str, Any], changed: Collection[str] = (), *, evaluates: bool = False) -> None:
        """Go on from a checkpoint, once those behind it are set aside. Reads the best one, to see whether it is whole.

        Args:
            start: the checkpoint, which is known to be whole. meta: its metadata. changed: keys that have other values now.
            evaluates: its own evaluation may come first, as it was written before it; the best until then may be gone by rights.
        """
        entries = [StepEvaluation(**entry) for entry in meta.get(META, ())]
        others = [key for key in (*_OTHER_EVALUATION, *([_OTHER_LOSS] if is_loss(self._measure) else [])) if key in changed]
        if others and best_of(entries, self._measure, {each.step for each in entries}) is not None:
            self._reporter.say(f"the best checkpoint is sought from here on, as {' and '.join(others)} changed")
        self._evaluations = {} if others else {each.step: each for each in entries}
        self._unsettled, self._unchecked_start = False, start
        if not evaluates:
            self._leave_out_lost()
        self._write_record(tuple(self._evaluations.values()))

    def line(self) -> str | None:
        """The best checkpoint, for the end of a run; None where there is none."""
        paths = dict(checkpoint.checkpoints(self._directory))
        best = best_of(self._evaluations.values(), self._measure, paths)
        return None if best is None else f"best {best.text(self._measure)} after epoch {best.epoch}: {paths[best.step]}"

    def _steps(self) -> set[int]:
        return {step for step, _ in checkpoint.checkpoints(self._directory)}

    def _leave_out_lost(self) -> None:
        """Once after the run has gone on: forget evaluations of best checkpoints that are gone or damaged, and tell each."""
        start, self._unchecked_start = self._unchecked_start, None
        if start is None:
            return
        while (best := best_of(self._evaluations.values(), self._measure, self._evaluations)) is not None:
            lost = self._fault(best.step, start)
            if lost is None:
                return
            del self._evaluations[best.step]
            what = f"the best checkpoint, of step {best.step} ({best.text(self._measure)} after epoch {best.epoch}),"
            self._reporter.say(f"warning: {what} {lost}; the best of the others is kept")

    def _fault(self, step: int, start: Path) -> str | None:
        """The end of a sentence on the checkpoint of a step that cannot be used; None where it can."""
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
        """Delete old checkpoints, but not the best; the record of it comes first, so that it names what stays.

        Raises:
            CheckpointError: they cannot be deleted.
        """
        self._write_record(evaluations)
        try:
            by_age = [step for step, _ in checkpoint.by_age(self._directory)]
            stay = spared(evaluations, self._measure, by_age, self._keep) | set(written)
            checkpoint.prune(self._directory, self._keep, stay)
        except FileNotFoundError:  # another process is deleting them as well; the next checkpoint deletes what is left
            return
        except OSError as error:
            raise CheckpointError(
                f"Old checkpoints in {self._directory} cannot be deleted ({error.strerror}); allow it."
            ) from error

    def _write_record(self, evaluations: Sequence[StepEvaluation]) -> None:
        paths = dict(checkpoint.checkpoints(self._directory))
        best = best_of(evaluations, self._measure, paths)
        record = None
        if best is not None and (value := best.value(self._measure)) is not None:
            record = BestRecord(paths[best.step].name, best.step, best.epoch, self._measure, value)
        self._bookkeeping.attempt("record of the best checkpoint", lambda: best_record.write(self._directory, record))
