"""Training loop of a rank: steps, evaluations, checkpoints, and the end of training. All ranks run the same loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.config.schema import Config
from hpctrain.core.errors import DivergedError
from hpctrain.core.text import loss_text
from hpctrain.data.loader import Batch, BatchSource
from hpctrain.data.pipeline import ImageSizes
from hpctrain.flight.recorder import RunPhase
from hpctrain.optim.schedules import LearningRateSchedule
from hpctrain.trace.tracer import Category
from hpctrain.training.accounts import ImageSizeReport, Observer, StepTrace
from hpctrain.training.metrics import Rate, Reporter, RunningSums, epoch_values
from hpctrain.training.replica import Replica
from hpctrain.training.snapshot import Position
from hpctrain.training.stopping import EarlyStop, TimeLimit


@dataclass(frozen=True, kw_only=True)
class TrainingObjects:
    """Objects of a rank that a training uses.

    Attributes:
        replica: replica to train.
        loader: this rank's share of the training samples.
        evaluated: this rank's share of each evaluated set, by the set's name for records and messages. The first set is evaluated
            during training. A second one is a test set, which is evaluated only at the end.
        schedule: learning rate as a function of steps of the configured batch.
        sizes: sizes of training images by epoch; None: they have one size.
    """

    replica: Replica
    loader: BatchSource
    evaluated: Mapping[str, BatchSource]
    schedule: LearningRateSchedule
    sizes: ImageSizes | None = None


@dataclass(frozen=True)
class Cadence:
    """Intervals of evaluations and checkpoints, and the end of a training; an interval of 0 means never.

    Args:
        evaluate_epochs: epochs between evaluations.
        checkpoint_epochs: epochs between checkpoints.
        checkpoint_steps: steps between checkpoints.
        steps: number of steps after which this run stops, for tests and trials; 0: no limit.
        early_stop: rule that ends the training early; None: there is none.
    """

    epochs: int
    evaluate_epochs: int = 1
    checkpoint_epochs: int = 1
    checkpoint_steps: int = 0
    steps: int = 0
    early_stop: EarlyStop | None = None

    @classmethod
    def of(cls, config: Config, steps: int = 0) -> Cadence:
        """Return the cadence of a configuration, which stops the run after `steps` steps; 0: no limit."""
        stop = config.early_stop
        return cls(
            epochs=config.epochs,
            evaluate_epochs=config.evaluate.every_epochs,
            checkpoint_epochs=config.checkpoint.every_epochs,
            checkpoint_steps=config.checkpoint.every_steps,
            steps=steps,
            early_stop=None if stop.patience is None else EarlyStop(stop.metric, stop.patience, min_delta=stop.min_delta),
        )


@dataclass
class Outcome:
    """Result of a training.

    Attributes:
        position: last position.
        evaluation: sums of the last evaluation; None if there was none.
        test: sums of the test at the end of training; None if there was none.
        evaluated_epochs: number of epochs trained before this evaluation.
        stopped: whether a request, a limit or `end_after` ended training before its last epoch.
        steps_reached: whether training ended because it reached the limit `Cadence.steps`.
    """

    position: Position
    evaluation: RunningSums | None
    evaluated_epochs: int
    stopped: bool
    steps_reached: bool
    test: RunningSums | None = None


class Trainer:
    """Training loop of this rank. Every public method is collective.

    Args:
        objects: objects of this rank; the averagers of the replica have agreed.
        save: function that writes a checkpoint at a position, after a drain.
        go_back: function from an error and the position where it was raised to the position from which training continues; it
            restores the state of that position, or raises. None: an error ends the training.
        stop_requested: function that returns whether this rank was asked to stop.
        observers: observers, called in this order; the same on every rank.
        end_after: function that receives the values of an epoch (see `epoch_values`) and returns whether to end the training,
            called after the evaluation and checkpoint of each epoch. Collective, with the same result on every rank. None: there
            is none.
    """

    def __init__(
        self,
        objects: TrainingObjects,
        cadence: Cadence,
        reporter: Reporter,
        save: Callable[[Position], None],
        *,
        go_back: Callable[[DivergedError, Position], Position] | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
        limit: TimeLimit | None = None,
        observers: Sequence[Observer] = (),
        end_after: Callable[[Mapping[str, Any]], bool] | None = None,
    ) -> None:
        replica = self._replica = objects.replica
        self._loader, self._schedule = objects.loader, objects.schedule
        sets = [*objects.evaluated.items(), ("test", None), ("test", None)]
        (self._evaluated, self._evaluation_loader), (_, self._test_loader) = sets[:2]
        self._cadence, self._early_stop = cadence, cadence.early_stop
        self._reporter, self._save, self._stop_requested = reporter, save, stop_requested
        self._limit = TimeLimit() if limit is None else limit
        self._go_back, self._end_after, self._ends = go_back, end_after, False
        self._notes, self._trace = replica.progress.notes, replica.progress.trace
        sizes = [] if objects.sizes is None else [ImageSizeReport(objects.sizes, reporter)]
        self._observers = [*sizes, *observers, *([] if self._trace is None else [StepTrace(self._trace)])]
        self._state = replica.loop
        self._rate = Rate()
        self._saved_step = -1
        self._steps_run = 0

    def run(self, position: Position) -> Outcome:
        """Train from `position` until the last epoch, early stopping, a limit, `end_after` or a stop request ends the training.

        Raises:
            DivergedError: a loss, parameter, gradient or statistic is not finite and the run cannot go back, or too many
                consecutive steps were skipped; raised on every rank at the same step.
            CorruptedStateError: values that ranks must hold alike differ; raised on every rank at the same step.
        """
        samples = self._loader.sampler.samples
        done = position.epoch * samples + position.sums.count
        self._reporter.start(self._cadence.epochs, samples, done, self._last_sample(position))
        self._start_at(position)
        self._check(schedules=True)
        self._notes.phase(RunPhase.ACCOUNT)
        for observer in self._observers:
            observer.begin(position)
        while True:
            try:
                return self._run_from(position)
            except DivergedError as error:
                if self._go_back is None:
                    raise
                self._notes.phase(RunPhase.GO_BACK)
                position = self._go_back(error, position)
                self._start_at(position)
                self._replica.require_alike()

    def _check(self, *, schedules: bool = False) -> None:
        """Check that all trained values are finite, and identical on all ranks that must hold them alike. Collective."""
        self._notes.phase(RunPhase.CHECK)
        self._replica.require_finite()
        self._replica.require_alike(schedules=schedules)

    def _start_at(self, position: Position) -> None:
        self._state.restore(position)
        self._saved_step = position.global_step
        self._replica.global_step = position.global_step
        # The learning rate of the previous step, for the record of an epoch that ended with the checkpoint.
        sampler = self._loader.sampler
        last = max(0, math.ceil(position.in_steps(sampler.samples, sampler.batch)) - 1)
        self._replica.lr = self._schedule.rate(last, position.plateau)
        self._state.kept_step = position.global_step or None
        self._loader.sampler.reorder(position.reorderings)

    def _run_from(self, position: Position) -> Outcome:
        """Train from `position` to the end without going back."""
        evaluation: RunningSums | None = None
        evaluated_epochs = 0
        stopped = False
        while not self._is_over(position) and not stopped:
            stopped = self._run_epoch(position) and not self._complete(position)
            if not stopped and (sums := self._end_epoch(position)) is not None:
                evaluation, evaluated_epochs = sums, position.epoch
            stopped = stopped or self._ends
        if stopped:
            if not self._ends:
                self._reporter.flush()
            self._save_once(position)
        elif position.epoch < self._cadence.epochs:
            assert self._early_stop is not None
            assert position.stagnation is not None
            self._reporter.say(self._early_stop.sentence(position.stagnation))
        self._check()
        return Outcome(position, evaluation, evaluated_epochs, stopped, stopped and self._enough)

    def evaluate(self, position: Position, *, final: bool = False) -> RunningSums | None:
        """Evaluate, record the sums and return them; None if there is no set to evaluate.

        Args:
            final: whether to evaluate the test set, on which no decision depends, instead of the set of evaluations in training.
        """
        loader = self._test_loader if final else self._evaluation_loader
        if loader is None:
            return None
        self._notes.phase(RunPhase.EVALUATE)
        samples = loader.sampler.samples * (1 if self._replica.average is None else 2)
        with self._limit.evaluating(), self._reporter.evaluation(samples) as advance:
            sums = self._replica.evaluate(loader, advance=advance)
        if not final:
            for observer in self._observers:
                observer.after_evaluation(position, sums)
            self._decide(position, sums.means())
        kind, split = ("test", "test") if final else ("evaluation", self._evaluated)
        record = {"epoch": position.epoch, "step": position.global_step, "set": split, **sums.means()}
        self._reporter.record(kind, record)
        self._rate.restart()
        return sums

    def _decide(self, position: Position, means: Mapping[str, float]) -> None:
        """Update the states of early stopping and of the learning rate after an evaluation. Collective."""
        stagnation, plateau = position.stagnation, self._schedule.observed(position.plateau, position.epoch, means)
        if self._early_stop is not None:
            stagnation = self._early_stop.after(stagnation, position.epoch, means)
        if self._early_stop is None and plateau is position.plateau:
            return
        # All ranks have these means. Rank 0's decision counts, in case their last bits differ.
        before = self._rate_at(position)
        position.stagnation, position.plateau = self._replica.groups.all_ranks.broadcast_object((stagnation, plateau))
        if self._rate_at(position) < before and not self._is_over(position):
            self._reporter.say(f"learning rate {before:.3g} -> {self._rate_at(position):.3g} after epoch {position.epoch}")

    def _run_epoch(self, position: Position) -> bool:
        """Train the rest of an epoch. Return whether it ended early on request."""
        self._rate.restart()
        for observer in self._observers:
            observer.before_epoch(position)
        batches = self._loader.epoch(position.epoch, position.samples)
        try:
            while not self._state.stop_requested:
                self._notes.phase("data loading")
                for observer in self._observers:
                    observer.before_batch()
                batch = next(batches, None)
                if batch is None:
                    break
                self._state.begin(position.epoch, position.global_step)
                usual = self._run_step(batch, position)
                for observer in self._observers:
                    observer.after_step(position, usual=usual)
        finally:
            batches.close()
        self._settle(position)
        return self._state.stop_requested

    def _run_step(self, batch: Batch, position: Position) -> bool:
        """Do one step, advance the position, and do what is due after it.

        Returns:
            Whether the step was usual (see `Observer.after_step`).
        """
        replica = self._replica
        # False for a shorter last batch of an epoch, and for images smaller than the network's.
        whole = batch.global_count == self._loader.sampler.batch and batch.image_shape in (None, replica.network.image_shape)
        for observer in self._observers:
            observer.before_step(batch, whole=whole)
        cause = replica.update(batch, self._rate_at(position))
        begin_ns = self._trace.clock_ns() if self._trace is not None else 0
        self._settle(position)  # the previous step's totals, which were summed during this step
        self._steps_run += 1
        stop = self._enough or self._stop_requested() or self._time_is_over(position, batch)
        replica.post(stop=stop, status=self._state.status_flag())
        position.global_step += 1
        position.samples += batch.global_count
        if cause is not None:
            self._reporter.record("skip", {"epoch": batch.epoch + 1, "step": cause.step, **cause.facts()})
            self._reporter.warn(f"step {cause.step} skipped: {cause}")
        exchanged = self._state.end(cause, replica.lr, replica.drain)
        position.skipped, position.skipped_in_a_row = self._state.skipped, self._state.skipped_in_a_row
        if exchanged and (saver := self._state.saver) is not None and saver.last_seconds:
            self._limit.wrote(saver.last_seconds)
        # State is read before a checkpoint of the same step is written: a run that resumes from it does not repeat the step.
        readers = [observer for observer in self._observers if observer.reads_state(position.global_step)]
        if readers:
            self._notes.phase(RunPhase.READ_STATE)
            self._settle(position)
        for observer in readers:
            observer.read_state(position)
        saved = self._save_in_epoch(position)
        if self._trace is not None:
            self._trace.add(Category.WORK, "bookkeeping", begin_ns, self._trace.clock_ns())
        return whole and not (exchanged or readers or saved)

    def _save_in_epoch(self, position: Position) -> bool:
        """Write a checkpoint if one is due after this step. Return the result of `_save_once`; False if none is due."""
        every = self._cadence.checkpoint_steps
        if not (self._enough or (every and position.global_step % every == 0)):
            return False
        self._settle(position)
        return not self._state.stop_requested and self._save_once(position)

    def _time_is_over(self, position: Position, batch: Batch) -> bool:
        """Return whether this rank's time limit requests the end of the run.

        Args:
            position: position before the step that is ending.
            batch: batch of this step.
        """
        if not self._limit.finite:
            return False
        cadence, epoch = self._cadence, position.epoch + 1
        left = self._loader.sampler.steps(position.samples + batch.global_count)
        last, ends = epoch == cadence.epochs, left <= 1
        evaluates = int(ends and self._evaluation_loader is not None and _due(epoch, cadence.evaluate_epochs, last))
        evaluates += ends and last and self._test_loader is not None
        if last and not left and not evaluates:
            return False  # ending takes no longer than stopping
        steps = cadence.checkpoint_steps
        saves = (ends and _due(epoch, cadence.checkpoint_epochs, last)) or (steps > 0 and (position.global_step + 1) % steps == 0)
        return self._limit.over(saves=saves, evaluates=evaluates)

    def _complete(self, position: Position) -> bool:
        """Return whether a request to stop came too late: the last epoch has ended, and no evaluation is left."""
        whole = position.epoch == self._cadence.epochs - 1 and position.samples == self._loader.sampler.samples
        return whole and self._evaluation_loader is None and not self._enough

    def _last_sample(self, position: Position) -> int:
        """Return the sample at which this run ends unless it is stopped, counted over all epochs."""
        sampler, steps = self._loader.sampler, self._cadence.steps
        epoch, first = position.epoch, position.samples
        while steps and epoch < self._cadence.epochs:
            if steps < sampler.steps(first):
                return epoch * sampler.samples + first + steps * sampler.batch
            steps -= sampler.steps(first)
            epoch, first = epoch + 1, 0
        return (epoch if self._cadence.steps else self._cadence.epochs) * sampler.samples

    def _rate_at(self, position: Position) -> float:
        """Return the learning rate of the step at a position.

        It follows from the number of samples, so that a change of the batch causes no jump.
        """
        sampler = self._loader.sampler
        return self._schedule.rate(position.in_steps(sampler.samples, sampler.batch), position.plateau)

    @property
    def _enough(self) -> bool:
        """Whether this run has taken the requested number of steps."""
        return 0 < self._cadence.steps <= self._steps_run

    def _settle(self, position: Position) -> None:
        """Wait for the pending sums of a step, if any, and report them."""
        totals = self._replica.settle()
        if totals is None:
            return
        position.sums.add(totals)
        self._rate.add(totals.count)
        self._reporter.step(position.epoch + 1, position.global_step, position.sums, self._replica.lr, self._rate.per_second())

    def _end_epoch(self, position: Position) -> RunningSums | None:
        values = position.sums.means() | {"images_per_second": self._rate.per_second()}
        epoch = position.epoch + 1
        record = {"epoch": epoch, "step": position.global_step, "images": position.sums.count, "lr": self._replica.lr, **values}
        self._reporter.record("epoch", record)
        words = [f"epoch {epoch}/{self._cadence.epochs}: train loss {loss_text(values['loss'])}, top1 {values['top1']:.2%}"]
        position.epoch, position.samples, position.sums = position.epoch + 1, 0, RunningSums()
        self._notes.phase(RunPhase.ACCOUNT)
        for observer in self._observers:
            observer.after_epoch(position)
        evaluation = None
        if _due(position.epoch, self._cadence.evaluate_epochs, self._is_over(position)):
            evaluation = self.evaluate(position)
        if evaluation is not None:
            means = evaluation.means()
            words.append(f"{self._evaluated} loss {loss_text(means['loss'])}, top1 {means['top1']:.2%}")
            if "ema_top1" in means:
                words[-1] += f" (averaged weights {loss_text(means['ema_loss'])}, {means['ema_top1']:.2%})"
        if values["images_per_second"] > 0.0:  # 0 if the run resumed at the end of the epoch
            words.append(f"{values['images_per_second']:,.0f} images/s")
        self._reporter.say("; ".join(words))
        if _due(position.epoch, self._cadence.checkpoint_epochs, self._is_over(position)):
            self._save_once(position)
        if self._end_after is not None:
            ends = self._end_after(epoch_values(record, None if evaluation is None else evaluation.means()))
            self._ends = ends and not self._is_over(position)
        return evaluation

    def _is_over(self, position: Position) -> bool:
        """Return whether the training is complete at a position."""
        stops = self._early_stop is not None and self._early_stop.ends(position.stagnation)
        return position.epoch >= self._cadence.epochs or stops

    def _save_once(self, position: Position) -> bool:
        """Write a checkpoint at a position unless one exists already. Return whether one was written, begun or skipped."""
        if self._saved_step == position.global_step:
            return False
        begin_ns = self._trace.clock_ns() if self._trace is not None else 0
        self._check()
        self._notes.phase(RunPhase.SAVE)
        saver = self._state.saver
        with self._limit.saving(whole=saver is None or not saver.asynchronous):
            self._save(position)
        self._saved_step = position.global_step
        if saver is None or not saver.skipped:
            self._state.keeps(position.global_step)
        self._rate.restart()
        if self._trace is not None:
            self._trace.add(Category.WORK, "checkpoint", begin_ns, self._trace.clock_ns())
        return True


def _due(number: int, every: int, last: bool) -> bool:
    return bool(every) and (last or number % every == 0)
