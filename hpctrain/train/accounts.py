"""Observers of a training, and the measurements they make: times of steps, and waits for data and for messages.

The trainer calls a list of observers at fixed points of the training (see `Observer`). `OperatorSample` records the operators of
a few early steps only, on a clock of this rank.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from hpctrain.comm.progress import ProgressEngine
from hpctrain.data.loader import Batch
from hpctrain.data.pipeline import ImageSizes
from hpctrain.trace.tracer import Category, Events, Tracer
from hpctrain.train.metrics import Reporter, RunningSums
from hpctrain.train.replica import Replica
from hpctrain.train.snapshot import Position


class Observer:
    """Base of observers, which follow a training without changing it: measurements, records and reports.

    At each of the following points of the training, every rank calls the method of all observers in the same order. A method may
    communicate unless it is marked as local. The default methods do nothing.
    """

    def begin(self, position: Position) -> None:
        """Handle the start of a training at `position`.

        The replica is settled: its values are finite, and values that ranks must hold alike are equal.
        """

    def before_epoch(self, position: Position) -> None:
        """Handle the start of an epoch, or of the rest of an epoch, at `position`. Local."""

    def before_batch(self) -> None:
        """Handle the request for the next batch. Local."""

    def before_step(self, batch: Batch, *, whole: bool) -> None:
        """Handle the start of a step. Local.

        Args:
            batch: this rank's samples of the step.
            whole: whether the batch has the configured size, and the images have the network's size.
        """

    def after_step(self, position: Position, *, usual: bool) -> None:
        """Handle the end of a step. Local.

        Args:
            position: position after the step.
            usual: whether the batch was whole and the step included no checkpoint, no exchange of states and no `read_state`.
        """

    def reads_state(self, step: int) -> bool:
        """Return whether to call `read_state` after `step` steps. The result is the same on every rank. Local."""
        return False

    def read_state(self, position: Position) -> None:
        """Read the state of the replica, whose sums are settled. Called between steps if `reads_state` returned True."""

    def after_epoch(self, position: Position) -> None:
        """Handle the end of an epoch, before its evaluation.

        Args:
            position: position after the epoch.
        """

    def after_evaluation(self, position: Position, sums: RunningSums) -> None:
        """Handle an evaluation at `position`.

        Args:
            sums: sums over all ranks.
        """

    def finish(self, position: Position) -> None:
        """Handle the end of a training at `position`, after its last checkpoint was written. Not called after an error."""


@dataclass(frozen=True)
class DataWait:
    """Durations of steps and of waits for data, summed over steps of one rank.

    Attributes:
        steps: number of steps.
        seconds: time from the request for a batch to the end of its step.
        waited_seconds: time from the request for a batch to its arrival.
    """

    steps: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0


class DataWaits(Observer):
    """Sums of the durations of this rank's steps and of its waits for data. The clock is read three times per step.

    Args:
        clock: function that returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begin = self._came = self._seconds = self._waited_seconds = 0.0
        self._steps = 0

    def before_batch(self) -> None:
        self._begin = self._clock()

    def before_step(self, batch: Batch, *, whole: bool) -> None:
        self._came = self._clock()

    def after_step(self, position: Position, *, usual: bool) -> None:
        self._steps += 1
        self._seconds += self._clock() - self._begin
        self._waited_seconds += self._came - self._begin

    def take(self) -> DataWait:
        """Return the sums since the last call, and reset them."""
        sums = DataWait(self._steps, self._seconds, self._waited_seconds)
        self._steps, self._seconds, self._waited_seconds = 0, 0.0, 0.0
        return sums


class StepTrace(Observer):
    """Records two events per step in a trace: the loading of the batch, and the whole step including the loading."""

    def __init__(self, trace: Tracer) -> None:
        self._trace = trace
        self._begin_ns = self._step = 0

    def before_batch(self) -> None:
        self._begin_ns = self._trace.clock_ns()

    def before_step(self, batch: Batch, *, whole: bool) -> None:
        self._step = batch.step
        self._trace.add(Category.LOADING, "data loading", self._begin_ns, self._trace.clock_ns())

    def after_step(self, position: Position, *, usual: bool) -> None:
        self._trace.add(Category.STEP, "step", self._begin_ns, self._trace.clock_ns(), "", self._step)


class ImageSizeReport(Observer):
    """Reports the size of the images in the first epoch of a run and at each change."""

    def __init__(self, sizes: ImageSizes, reporter: Reporter) -> None:
        self._sizes, self._reporter = sizes, reporter
        self._reported = False

    def before_epoch(self, position: Position) -> None:
        size, epoch = self._sizes.at(position.epoch), position.epoch + 1
        begins = self._sizes.changes_at(position.epoch) and not position.samples
        if begins:
            self._reporter.record("image_size", {"epoch": epoch, "step": position.global_step, "size": size})
        if begins or not self._reported:
            self._reporter.say(f"images of {size} px from epoch {epoch}")
            self._reported = True


# The first steps of a run still measure orders of operations, and the very first one compiles programs.
_SETTLING_STEPS = 6
_MOST_STEPS = 10_000


@dataclass(frozen=True)
class MeasuredStep:
    """Medians over the steps of a rank.

    Attributes:
        seconds: duration of a step.
        exposed_seconds: time of a step spent waiting for messages.
        steps: number of steps that were measured.
        messages_seconds: time that the program spends on messages outside of waits, for posting and progress.
    """

    seconds: float
    exposed_seconds: float
    steps: int
    messages_seconds: float = 0.0


class StepTimes(Observer):
    """Times of the latest usual steps (see `Observer.after_step`). A step ends when the next one requests its batch.

    Args:
        progress: engine that measures the waits and the work on messages.
        clock: function that returns seconds.
    """

    def __init__(self, progress: ProgressEngine, clock: Callable[[], float] = time.perf_counter) -> None:
        self._progress = progress
        self._clock = clock
        self._seconds, self._waited, self._messages = array("d"), array("d"), array("d")
        self._steps = 0
        self._begin_seconds = self._begin_waited = self._begin_messages = 0.0

    def before_epoch(self, position: Position) -> None:
        self._begin(self._clock())

    def _begin(self, now: float) -> None:
        self._begin_seconds, self._begin_waited = now, self._progress.waited_seconds
        self._begin_messages = self._progress.account.seconds

    def after_step(self, position: Position, *, usual: bool) -> None:
        now, waited, messages = self._clock(), self._progress.waited_seconds, self._progress.account.seconds
        if usual:
            self._add(now - self._begin_seconds, waited - self._begin_waited, messages - self._begin_messages)
        self._begin(now)

    def _add(self, seconds: float, waited_seconds: float, messages_seconds: float) -> None:
        self._steps += 1
        if self._steps <= _SETTLING_STEPS:
            return
        if len(self._seconds) < _MOST_STEPS:
            self._seconds.append(seconds)
            self._waited.append(waited_seconds)
            self._messages.append(messages_seconds)
            return
        place = self._steps % _MOST_STEPS
        self._seconds[place], self._waited[place], self._messages[place] = seconds, waited_seconds, messages_seconds

    def measured(self) -> MeasuredStep | None:
        """Return the medians of the steps so far, without the first few; None if no step was measured."""
        if not self._seconds:
            return None
        return MeasuredStep(median(self._seconds), median(self._waited), len(self._seconds), median(self._messages))


_FIRST = 6  # steps before the sample: programs are compiled, orders are measured, caches fill
_STEPS = 5
_ROOM = 1 << 15  # events; a step of 2,000 operators has less than a fifth of it


class OperatorSample(Observer):
    """Records the operators of a few steps of a replica.

    Args:
        threads: number of compute threads of this rank. With one thread, its processor time is recorded, which other processes on
            the same core do not lengthen. With several threads, elapsed time is recorded.

    Attributes:
        complete: whether all steps of the sample were recorded.
    """

    def __init__(self, replica: Replica, threads: int) -> None:
        self._replica = replica
        self._trace = Tracer(_ROOM, clock_ns=time.thread_time_ns if threads == 1 else time.perf_counter_ns)
        self._seen = self._taken = 0
        self.complete = False

    def before_step(self, batch: Batch, *, whole: bool) -> None:
        self._seen += 1
        if self.complete or self._seen <= _FIRST:
            return
        self.complete = self._taken == _STEPS
        wanted = whole and not self.complete
        self._replica.record_operators(self._trace if wanted else None)
        self._taken += wanted

    def events(self) -> Events:
        """Return the events recorded so far."""
        return self._trace.events()
