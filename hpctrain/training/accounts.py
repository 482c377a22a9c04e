"""Observers of a training, and the measurements they make: times of steps, and waits for data and for messages.

The trainer calls a list of observers at fixed points of the training (see `Observer`). `OperatorSample` records the operators of
a few early steps only, on a clock of this rank.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.comm.progress import ProgressEngine
from hpctrain.data.loader import Batch
from hpctrain.data.pipeline import ImageSizes
from hpctrain.trace.tracer import Category, Tracer
from hpctrain.training.metrics import Reporter, RunningSums
from hpctrain.training.replica import Replica
from hpctrain.training.snapshot import Position


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
# Minimum number and duration of the steps in `StepTimes.after_sample`.
_SAMPLED_STEPS, _SAMPLED_SECONDS = 10, 0.5
# Minimum number of steps in later epochs; with fewer, those of the first epoch count, too.
_FEWEST_LATER = 20


@dataclass(frozen=True)
class MeasuredStep:
    """Means over those steps of a rank whose durations are in the middle half.

    Attributes:
        seconds: duration of a step.
        exposed_seconds: time of a step spent waiting for messages, without updates.
        steps: number of steps that were measured.
        messages_seconds: time that the program spends on messages outside of waits, for posting and progress.
        data_seconds: time of a step spent waiting for its batch.
        update_seconds: time of updates.
        busy_seconds: processor time of the program outside of waits, including messages and updates.
        others_seconds: processor time of the process's other threads.
    """

    seconds: float
    exposed_seconds: float
    steps: int
    messages_seconds: float = 0.0
    data_seconds: float = 0.0
    update_seconds: float = 0.0
    busy_seconds: float = 0.0
    others_seconds: float = 0.0


def processor_seconds() -> tuple[float, float]:
    """Return the processor time of the calling thread, and of all other threads of the process."""
    own = time.thread_time()
    return own, time.process_time() - own


class StepTimes(Observer):
    """Times of the latest usual steps (see `Observer.after_step`). A step lasts from the end of the previous one to its own end.

    The first epoch of a run reads data files, later ones often memory, which changes the work of the loader. If most of the steps
    are in later epochs, and at least 20, only these count.

    Args:
        progress: engine that measures the waits and the work on messages.
        clock: function that returns seconds.
        processor: `processor_seconds`, for ranks with one compute thread. None: use the elapsed time outside
            of waits instead.
    """

    def __init__(
        self,
        progress: ProgressEngine,
        clock: Callable[[], float] = time.perf_counter,
        processor: Callable[[], tuple[float, float]] | None = None,
    ) -> None:
        self._progress, self._clock, self._processor = progress, clock, processor
        self._latest: deque[Sequence[float]] = deque(maxlen=_MOST_STEPS)
        self._after_sample: list[Sequence[float]] = []
        self._after_sample_seconds = 0.0
        self._epochs = self._steps = self._later_steps = 0
        self._data_begin = self._data_cpu_begin = self._data_seconds = self._data_cpu_seconds = 0.0
        self._before = self._read()

    def before_epoch(self, position: Position) -> None:
        self._epochs += 1
        self._before = self._read()

    def before_batch(self) -> None:
        self._data_begin = self._clock()
        self._data_cpu_begin = 0.0 if self._processor is None else self._processor()[0]

    def before_step(self, batch: Batch, *, whole: bool) -> None:
        self._data_seconds += self._clock() - self._data_begin
        self._data_cpu_seconds += 0.0 if self._processor is None else self._processor()[0] - self._data_cpu_begin

    def after_step(self, position: Position, *, usual: bool) -> None:
        now, before = self._read(), self._before
        self._before = now
        if not usual:
            return
        self._steps += 1
        if self._steps <= _SETTLING_STEPS:
            return
        row = [end - begin for end, begin in zip(now, before, strict=True)]
        self._latest.append(row)
        self._later_steps += self._epochs > 1
        few = len(self._after_sample) < _SAMPLED_STEPS or self._after_sample_seconds < _SAMPLED_SECONDS
        if few and self._steps > _SETTLING_STEPS + _STEPS:
            self._after_sample.append(row)
            self._after_sample_seconds += row[0]

    def _read(self) -> tuple[float, ...]:
        """Return the sums so far, in the order of the attributes of `MeasuredStep`, without the number of steps."""
        now, account = self._clock(), self._progress.account
        waited = self._progress.waited_seconds - account.waited_updates_ns * 1e-9
        polling = (account.waited_cpu_ns - account.waited_updates_ns) * 1e-9
        if self._processor is None:
            own, others = now - waited - self._data_seconds, 0.0
        else:
            own, others = self._processor()
            own -= polling + self._data_cpu_seconds
        return now, waited, account.seconds, self._data_seconds, account.updates_ns * 1e-9, own, others

    def measured(self) -> MeasuredStep | None:
        """Return the means of the steps so far, without the first few; None if no step was measured."""
        rows, later = list(self._latest), min(self._later_steps, len(self._latest))
        return _middle(rows[-later:] if later >= _FEWEST_LATER and 2 * later > len(rows) else rows)

    def after_sample(self) -> MeasuredStep | None:
        """Return the means of the first steps after those of `OperatorSample`; None without such steps."""
        return _middle(self._after_sample)


def _middle(rows: Sequence[Sequence[float]]) -> MeasuredStep | None:
    """Return the means of the rows whose first values are in the middle half, so that parts of a step add up to it."""
    if not rows:
        return None
    table = np.array(rows)
    cut = len(rows) // 4
    chosen = table[np.argsort(table[:, 0], kind="stable")[cut : len(rows) - cut]]
    seconds, exposed, *others = chosen.mean(axis=0).tolist()
    return MeasuredStep(seconds, exposed, len(rows), *others)


_FIRST = 6  # steps before the sample: programs are compiled, orders are measured, caches fill
_STEPS = 5
_ROOM = 1 << 15  # events; a step of 2,000 operators has less than a fifth of it


class OperatorSample(Observer):
    """Records the operators of a few steps of a replica.

    Args:
        threads: number of compute threads of this rank. With one thread, its processor time is recorded, which other processes on
            the same core do not lengthen. With several threads, elapsed time is recorded. Both without waits for messages.

    Attributes:
        complete: whether all steps of the sample were recorded.
    """

    def __init__(self, replica: Replica, threads: int) -> None:
        self._replica = replica
        progress = replica.progress

        def processor_ns() -> int:
            return time.thread_time_ns() - progress.account.waited_cpu_ns

        def elapsed_ns() -> int:
            return time.perf_counter_ns() - round(progress.waited_seconds * 1e9)

        self._trace = Tracer(_ROOM, clock_ns=processor_ns if threads == 1 else elapsed_ns)
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

    def operator_seconds(self) -> float | None:
        """Return the time of operators, loss and checks of a step, without hooks; None if the sample is not complete."""
        if not self.complete:
            return None
        events = self._trace.events()
        seconds = 0.0
        for category in (Category.FORWARD, Category.PARAMETERS, Category.INPUT, Category.WORK):
            of_category = events.of(category)
            lengths = (of_category.stop_ns - of_category.start_ns) * 1e-9
            for name in np.unique(of_category.name):
                of_name = lengths[of_category.name == name]
                seconds += float(np.median(of_name)) * len(of_name) / _STEPS
        return seconds
