"""Observers of a training, and the accounts that they keep: how long steps take, wait for data and for messages.

The trainer calls a list of observers at each place where something may be measured, recorded or reported. Operators are recorded
for a few early steps alone, as a trace records them, on a clock of this rank's own.
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
    """The base of what follows a training without changing it: accounts, records, reports.

    The trainer calls each method of all observers, in their order, at the same place of the training on every rank. A method may
    communicate unless it is marked as local. By default none does anything.
    """

    def begin(self, position: Position) -> None:
        """Follow the start of a training at a position. The replica is settled, and known to be finite and alike on all ranks."""

    def before_epoch(self, position: Position) -> None:
        """Follow the start of an epoch, or of its rest, at a position. Local."""

    def before_batch(self) -> None:
        """Follow the request for the next batch. Local."""

    def before_step(self, batch: Batch, *, whole: bool) -> None:
        """Follow the start of a step. Local. whole: its batch has the configured size, and images of the network's."""

    def after_step(self, position: Position, *, usual: bool) -> None:
        """Follow the end of a step at a position. Local. usual: with a whole batch, and without a checkpoint or the like."""

    def reads_state(self, step: int) -> bool:
        """Return whether `read_state` is to be called after `step` steps. The same on every rank. Local."""
        return False

    def read_state(self, position: Position) -> None:
        """Read the state of the replica, whose sums are settled; called between steps where `reads_state` is true."""

    def after_epoch(self, position: Position) -> None:
        """Follow the end of an epoch, which is not evaluated yet. position: after it."""

    def after_evaluation(self, position: Position, sums: RunningSums) -> None:
        """Follow an evaluation at a position. sums: over all ranks."""

    def finish(self, position: Position) -> None:
        """Follow the end of a training at a position, with its last checkpoint written. Not called after an error."""


@dataclass(frozen=True)
class DataWait:
    """Sums over steps of one rank. seconds: from asking for a batch to the step's end; waited_seconds: until the batch came."""

    steps: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0


class DataWaits(Observer):
    """Adds up how long the steps of this rank take, and how long they wait for data: three clock readings a step.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begin = self._came = 0.0
        self._sums = DataWait()

    def before_batch(self) -> None:
        self._begin = self._clock()

    def before_step(self, batch: Batch, *, whole: bool) -> None:
        self._came = self._clock()

    def after_step(self, position: Position, *, usual: bool) -> None:
        sums, seconds, waited = self._sums, self._clock() - self._begin, self._came - self._begin
        self._sums = DataWait(sums.steps + 1, sums.seconds + seconds, sums.waited_seconds + waited)

    def take(self) -> DataWait:
        """Return the sums since the last call."""
        sums, self._sums = self._sums, DataWait()
        return sums


class StepTrace(Observer):
    """Records the loading of each batch, and each step from asking for its batch to its end."""

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
    """Reports from which epoch on images have which size: where it changes, and in the first epoch of a run."""

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


# Orders are measured again in the first steps of a run, and programs are made in the very first.
_SETTLING_STEPS = 6
_MOST_STEPS = 10_000


@dataclass(frozen=True)
class MeasuredStep:
    """Medians over a rank's steps. exposed_seconds: of waits for messages. steps: that the medians are of.

    messages_seconds: of posting and progress, the program's own time for messages outside of waits.
    """

    seconds: float
    exposed_seconds: float
    steps: int
    messages_seconds: float = 0.0


class StepTimes(Observer):
    """Times of usual steps, the latest ones. A step ends where the next one asks for its batch.

    Args:
        progress: whose waits count, and what its messages took. clock: in seconds.
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
        """Return medians of the steps so far, without the first few; None if there is none."""
        if not self._seconds:
            return None
        return MeasuredStep(median(self._seconds), median(self._waited), len(self._seconds), median(self._messages))


_FIRST = 6  # programs are made, orders are measured, caches fill
_STEPS = 5
_ROOM = 1 << 15  # events; a step of 2,000 operators has less than a fifth of it


class OperatorSample(Observer):
    """Records the operators of some steps of a replica, and nothing of any other.

    Args:
        threads: that the rank computes with. One thread's processor time is recorded, which no other process that shares the
            core lengthens; of several threads, the time that passes.

    Attributes:
        complete: all steps were recorded.
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
        """Return the events of the steps that were recorded so far."""
        return self._trace.events()
