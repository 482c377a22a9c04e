"""The training loop: steps, evaluation, checkpoints, and the end. The same on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpctrain.core.errors import DivergedError
from hpctrain.data.loader import Batch, BatchSource
from hpctrain.data.pipeline import ImageSizes
from hpctrain.flight.recorder import RunPhase
from hpctrain.optim.schedules.base import LearningRateSchedule
from hpctrain.trace.tracer import Category
from hpctrain.train.accounts import DataWaits, OperatorSample, StepTimes
from hpctrain.train.finiteness import Cause
from hpctrain.train.metrics import Rate, Reporter, RunningSums
from hpctrain.train.progress_bar import folded, loss_text
from hpctrain.train.replica import Replica, too_many_skips
from hpctrain.train.saving import Saver
from hpctrain.train.snapshot import Position
from hpctrain.train.step import traced_steps
from hpctrain.train.stopping import EarlyStop, TimeLimit


@dataclass(frozen=True)
class Cadence:
    """How often what happens; 0 means never.

    epochs: to train in all. steps: to stop after so many steps of this run, for tests and trials.
    most_skips: steps, one after another, that may change nothing as they are not finite; one more ends the run.
    hash_steps: from one record of hashes to the next.
    """

    epochs: int
    evaluate_epochs: int = 1
    checkpoint_epochs: int = 1
    checkpoint_steps: int = 0
    steps: int = 0
    most_skips: int = 10
    hash_steps: int = 0


@dataclass
class Outcome:
    """How training ended.

    evaluation: of the last evaluation, if any; evaluated_epochs: how many had been trained then.
    stopped: before its last epoch, on request; steps_reached: the request was the number of steps that this run was given.
    """

    position: Position
    evaluation: RunningSums | None
    evaluated_epochs: int
    stopped: bool
    steps_reached: bool


class Trainer:
    """Drives training on this rank. Every public method is collective.

    Args:
        replica: what is trained; its averagers have agreed. loader: its share of the training set. test_loader: of the test set.
        schedule: learning rate by steps of the configured batch. save: writes a checkpoint at a position (drained before).
        go_back: gives the state that training goes on from after an error, in place of the position where it came, or raises;
            None: it ends.
        stop_requested: this rank was asked to stop. limit: of its time; None: it has none.
        sample: records operators of a few steps; None: none are recorded.
        epoch_ended: all called with the position behind every epoch, on every rank, before its evaluation; may communicate.
        saver: what `save` begins goes on in it; None: nothing does.
        evaluated: called with the position and the sums of every evaluation, on every rank.
        early_stop: ends the training before its last epoch by its evaluations; None: nothing does.
        sizes: of the loader's images by epoch, to be told; None: they have one size.
        waits: adds up how long steps wait for data; None: nobody asks.
        hashed: called with the position at the begin of a training and behind steps whose state is to be hashed, settled, on
            every rank; may communicate, and drains.

    Attributes:
        step_times: of this rank's steps so far.
    """

    def __init__(
        self,
        *,
        replica: Replica,
        loader: BatchSource,
        test_loader: BatchSource | None,
        schedule: LearningRateSchedule,
        cadence: Cadence,
        reporter: Reporter,
        save: Callable[[Position], None],
        go_back: Callable[[DivergedError, Position], Position] | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
        limit: TimeLimit | None = None,
        sample: OperatorSample | None = None,
        epoch_ended: Sequence[Callable[[Position], None]] = (),
        saver: Saver | None = None,
        evaluated: Callable[[Position, RunningSums], None] = lambda position, sums: None,
        early_stop: EarlyStop | None = None,
        sizes: ImageSizes | None = None,
        waits: DataWaits | None = None,
        hashed: Callable[[Position], None] = lambda position: None,
    ) -> None:
        self._replica, self._loader, self._test_loader = replica, loader, test_loader
        self._schedule, self._cadence = schedule, cadence
        self._reporter, self._save, self._stop_requested = reporter, save, stop_requested
        self._limit = TimeLimit() if limit is None else limit
        self._go_back, self._early_stop = go_back, early_stop
        self._waits = DataWaits() if waits is None else waits
        self._notes = replica.progress.notes
        self._trace = replica.progress.trace
        self._sample, self._saver, self._epoch_ended, self._evaluated = sample, saver, epoch_ended, evaluated
        self._hashed = hashed
        self._sizes = sizes
        self._news = 0
        self._rate = Rate()
        self.step_times = StepTimes(replica.progress)
        self._stop = False
        self._saved_step = -1
        self._steps_run = 0

    def run(self, position: Position) -> Outcome:
        """Train from `position` to the last epoch, or until some rank is asked to stop.

        Raises:
            DivergedError: a loss, parameter, gradient or statistic that is not finite, on every rank at the same step, and
                nothing to go back to; or too many steps were skipped, one after another.
            CorruptedStateError: what ranks must hold alike differs, on every rank at the same step.
        """
        samples = self._loader.sampler.samples
        done = position.epoch * samples + position.sums.count
        self._reporter.start(self._cadence.epochs, samples, done, self._last_sample(position))
        self._start_at(position)
        self._check(schedules=True)
        if not position.global_step:
            self._hash(position)  # so that runs that begin with other weights are told from those that part later
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
        """Check that all that is trained is finite, and the same wherever ranks must hold it alike. Collective."""
        self._notes.phase(RunPhase.CHECK)
        self._replica.require_finite()
        self._replica.require_alike(schedules=schedules)

    def _hash(self, position: Position) -> None:
        self._notes.phase(RunPhase.HASH)
        self._hashed(position)

    def _start_at(self, position: Position) -> None:
        self._saved_step = position.global_step
        self._replica.global_step, self._replica.lr = position.global_step, self._rate_before(position)
        self._replica.kept_step = position.global_step or None
        self._loader.sampler.reorder(position.reorderings)

    def _run_from(self, position: Position) -> Outcome:
        """Train from `position` on, as `run` says, but without going back."""
        evaluation: RunningSums | None = None
        evaluated_epochs = 0
        stopped = False
        while not self._is_over(position) and not stopped:
            stopped = self._run_epoch(position) and not self._complete(position)
            if not stopped and (sums := self._end_epoch(position)) is not None:
                evaluation, evaluated_epochs = sums, position.epoch
        if stopped:
            self._reporter.flush()
            self._save_once(position)
        elif position.epoch < self._cadence.epochs:
            assert self._early_stop is not None
            assert position.stagnation is not None
            self._reporter.say(self._early_stop.sentence(position.stagnation))
        self._check()
        return Outcome(position, evaluation, evaluated_epochs, stopped, stopped and self._enough)

    def evaluate(self, position: Position) -> RunningSums | None:
        """Sums over the test set, recorded; None where there is none."""
        if self._test_loader is None:
            return None
        self._notes.phase(RunPhase.EVALUATE)
        samples = self._test_loader.sampler.samples * (1 if self._replica.average is None else 2)
        with self._limit.evaluating(), self._reporter.evaluation(samples) as advance:
            sums = self._replica.evaluate(self._test_loader, advance=advance)
        self._evaluated(position, sums)
        if self._early_stop is not None:
            state = self._early_stop.after(position.stagnation, position.epoch, sums.means())
            # All ranks have these sums, and rank 0's word counts should their last bits differ.
            position.stagnation = self._replica.groups.all_ranks.broadcast_object(state)
        self._reporter.record("evaluation", {"epoch": position.epoch, "step": position.global_step, **sums.means()})
        self._rate.restart()
        return sums

    def _run_epoch(self, position: Position) -> bool:
        """The rest of an epoch; True where it ended early, on request."""
        self._rate.restart()
        self.step_times.begin()
        self._tell_size(position)
        self._notes.phase("data loading")
        batches = self._waits.watched(traced_steps(self._loader.epoch(position.epoch, position.samples), self._trace))
        try:
            for batch in batches:
                self._notes.step(position.epoch + 1, position.global_step + 1)
                self._run_step(batch, position)
                self.step_times.end_step()
                if self._stop:
                    break
                self._notes.phase("data loading")
        finally:
            batches.close()
        self._settle(position)
        return self._stop

    def _tell_size(self, position: Position) -> None:
        """Say and record from when on images have which size, where it changes; say it in the first epoch of a run, too."""
        if self._sizes is None:
            return
        size, epoch = self._sizes.at(position.epoch), position.epoch + 1
        begins = self._sizes.changes_at(position.epoch) and not position.samples
        if begins:
            self._reporter.record("image_size", {"epoch": epoch, "step": position.global_step, "size": size})
        if begins or not self._steps_run:
            self._reporter.say(f"images of {size} px from epoch {epoch}")

    def _run_step(self, batch: Batch, position: Position) -> None:
        network = self._replica.network
        # Neither an epoch's last one, nor of smaller images than those that the network was made for.
        whole = batch.global_count == self._loader.sampler.batch and batch.image_shape in (None, network.image_shape)
        if not whole:
            self.step_times.leave_out()
        if self._sample is not None:
            self._sample.begin_step(whole=whole)
        skipped = self._replica.update(batch, self._rate_at(position))
        begin_ns = self._trace.clock_ns() if self._trace is not None else 0
        self._settle(position)  # the previous step's totals; they travelled under this one
        self._steps_run += 1
        news = 0 if self._saver is None else self._saver.news()
        stop = self._enough or self._stop_requested() or self._time_is_over(position, batch)
        self._replica.post(stop=stop, news=news)
        position.global_step += 1
        position.samples += batch.global_count
        self._count_skips(skipped, position)
        self._hear()
        if _due(position.global_step, self._cadence.hash_steps, last=False):
            # Before a checkpoint of the same step, from which a run may go on without doing the step again.
            self._settle(position)
            self._hash(position)
            self.step_times.leave_out()
        every = self._cadence.checkpoint_steps
        if self._enough or (every and position.global_step % every == 0):
            self._settle(position)
            if not self._stop:
                self._save_once(position)
        if self._trace is not None:
            self._trace.add(Category.WORK, "bookkeeping", begin_ns, self._trace.clock_ns())

    def _time_is_over(self, position: Position, batch: Batch) -> bool:
        """Whether this rank's limit asks for the end. position: before the step of `batch`, which ends."""
        if not self._limit.finite:
            return False
        cadence, epoch = self._cadence, position.epoch + 1
        left = self._loader.sampler.steps(position.samples + batch.global_count)
        last, ends = epoch == cadence.epochs, left <= 1
        evaluates = ends and self._test_loader is not None and _due(epoch, cadence.evaluate_epochs, last)
        if last and not left and not evaluates:
            return False  # to end takes no longer than to stop
        steps = cadence.checkpoint_steps
        saves = (ends and _due(epoch, cadence.checkpoint_epochs, last)) or (steps > 0 and (position.global_step + 1) % steps == 0)
        return self._limit.over(saves=saves, evaluates=evaluates)

    def _complete(self, position: Position) -> bool:
        """The last epoch has ended, and nothing is left to be evaluated: a request to stop came too late."""
        whole = position.epoch == self._cadence.epochs - 1 and position.samples == self._loader.sampler.samples
        return whole and self._test_loader is None and not self._enough

    def _count_skips(self, cause: Cause | None, position: Position) -> None:
        """Count and report the step behind which a position stands, if it has changed nothing.

        Raises:
            DivergedError: one step more than may be skipped, one after another.
        """
        if cause is None:
            position.skipped_in_a_row = 0
            return
        position.skipped += 1
        position.skipped_in_a_row += 1
        self._reporter.record("skip", {"epoch": position.epoch + 1, "step": cause.step, **cause.facts()})
        self._reporter.say(f"step {cause.step} skipped: {cause}")
        if position.skipped_in_a_row > self._cadence.most_skips:
            raise too_many_skips(position.skipped_in_a_row, cause, self._replica.lr)

    def _last_sample(self, position: Position) -> int:
        """Where this run will end if nobody stops it: samples, counted over all epochs."""
        sampler, steps = self._loader.sampler, self._cadence.steps
        epoch, first = position.epoch, position.samples
        while steps and epoch < self._cadence.epochs:
            if steps < sampler.steps(first):
                return epoch * sampler.samples + first + steps * sampler.batch
            steps -= sampler.steps(first)
            epoch, first = epoch + 1, 0
        return (epoch if self._cadence.steps else self._cadence.epochs) * sampler.samples

    def _rate_at(self, position: Position) -> float:
        """The learning rate of the step that begins at a position: by samples, so that another batch makes no jump in it."""
        sampler = self._loader.sampler
        return self._schedule.lr(position.in_steps(sampler.samples, sampler.batch))

    def _rate_before(self, position: Position) -> float:
        """The learning rate of the step before a position: what is recorded of an epoch that ended with a checkpoint's step."""
        sampler = self._loader.sampler
        return self._schedule.lr(max(0, math.ceil(position.in_steps(sampler.samples, sampler.batch)) - 1))

    @property
    def _enough(self) -> bool:
        """This run has done the steps that it was given."""
        return 0 < self._cadence.steps <= self._steps_run

    def _settle(self, position: Position) -> None:
        """Read the sums on their way, if any, and whether to go on."""
        totals = self._replica.settle()
        if totals is None:
            return
        position.sums.add(totals)
        self._rate.add(totals.count)
        self._reporter.step(position.epoch + 1, position.global_step, position.sums, self._replica.lr, self._rate.per_second())
        self._stop = self._stop or totals.stop > 0
        self._news = max(self._news, totals.news)

    def _hear(self) -> None:
        """Ranks exchange how the writing of a checkpoint goes on, where there is something to tell."""
        if self._saver is not None and self._news >= self._saver.size:
            self._notes.phase(RunPhase.STATUS)
            self._replica.drain()
            self._saver.hear()
            self.step_times.leave_out()
            if self._saver.last_seconds:
                self._limit.wrote(self._saver.last_seconds)
        self._news = 0

    def _end_epoch(self, position: Position) -> RunningSums | None:
        values = position.sums.means() | {"images_per_second": self._rate.per_second()}
        epoch = position.epoch + 1
        record = {"epoch": epoch, "step": position.global_step, "images": position.sums.count, "lr": self._replica.lr, **values}
        self._reporter.record("epoch", record)
        words = [f"epoch {epoch}/{self._cadence.epochs}: train loss {loss_text(values['loss'])}, top1 {values['top1']:.2%}"]
        position.epoch, position.samples, position.sums = position.epoch + 1, 0, RunningSums()
        self._notes.phase(RunPhase.ACCOUNT)
        for tell in self._epoch_ended:
            tell(position)
        evaluation = None
        if _due(position.epoch, self._cadence.evaluate_epochs, self._is_over(position)):
            evaluation = self.evaluate(position)
        if evaluation is not None:
            means = evaluation.means()
            words.append(f"test loss {loss_text(means['loss'])}, top1 {means['top1']:.2%}")
            if "ema_top1" in means:
                words[-1] += f" (averaged weights {loss_text(means['ema_loss'])}, {means['ema_top1']:.2%})"
        if values["images_per_second"] > 0.0:  # not where a checkpoint already had the whole epoch
            words.append(f"{values['images_per_second']:,.0f} images/s")
        for line in folded(words):
            self._reporter.say(line)
        if _due(position.epoch, self._cadence.checkpoint_epochs, self._is_over(position)):
            self._save_once(position)
        return evaluation

    def _is_over(self, position: Position) -> bool:
        """Whether there is nothing left to train behind a position."""
        stops = self._early_stop is not None and self._early_stop.ends(position.stagnation)
        return position.epoch >= self._cadence.epochs or stops

    def _save_once(self, position: Position) -> None:
        if self._saved_step != position.global_step:
            begin_ns = self._trace.clock_ns() if self._trace is not None else 0
            self._check()
            self._notes.phase(RunPhase.SAVE)
            with self._limit.saving(whole=self._saver is None or not self._saver.asynchronous):
                self._save(position)
            self._saved_step = self._replica.kept_step = position.global_step
            self._rate.restart()
            self.step_times.leave_out()
            if self._trace is not None:
                self._trace.add(Category.WORK, "checkpoint", begin_ns, self._trace.clock_ns())


def _due(number: int, every: int, last: bool) -> bool:
    return bool(every) and (last or number % every == 0)
