"""Observers of a training, whose methods the trainer calls at fixed points: traces, image sizes, and times of steps."""

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
        """Read the state of the replica, whose sums are settled, between two steps after `reads_state` returned True."""

    def after_epoch(self, position: Position) -> None:
        """Handle the end of an epoch, before its evaluation. `position` is that after the epoch."""

    def after_evaluation(self, position: Position, sums: RunningSums) -> None:
        """Handle an evaluation at `position`, with the sums over all ranks. It is not called for the test at the end."""

    def finish(self, position: Position) -> None:
        """Handle the end of a training at `position`, after its last checkpoint was written, but not after an error."""


class StepTrace(Observer):
    """Observer that records two events per step in a trace: the loading of the batch, and the whole step with the loading."""

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
    """Observer that reports the size of the images in the first epoch of a run and at each change."""

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
# Minimum number of steps in later epochs; with fewer, those of the first epoch count, too.
_FEWEST_LATER = 20


@dataclass(frozen=True)
class StepParts:
    """Mean durations of a step and of the parts that add up to it, without the shortest and the longest quarter of the steps.

    Attributes:
        steps: number of steps that were measured.
        seconds: whole step.
        work_seconds: computation, updates, and the program's work between operators.
        messages_seconds: posting and progress of messages, outside of waits.
        exposed_seconds: waits for messages, without updates.
        data_seconds: loading of the batch.
        core_seconds: time in which the program could run, but other threads or processes had its core.
    """

    seconds: float
    steps: int
    work_seconds: float
    messages_seconds: float
    exposed_seconds: float
    data_seconds: float
    core_seconds: float

    @classmethod
    def of(
        cls, steps: int, seconds: float, exposed: float, messages: float, data: float, updates: float, busy: float
    ) -> StepParts:
        """Return the parts of a step from means in seconds. Work is limited to the time that the other parts leave.

        Args:
            busy: processor time of the program outside of waits, including messages and updates.
        """
        running = seconds - exposed - data
        work = updates + min(max(0.0, busy - messages - updates), running - messages - updates)
        return cls(seconds, steps, work, messages, exposed, data, running - messages - work)


class StepTimes(Observer):
    """Times of the latest usual steps (see `Observer.after_step`). A step lasts from the end of the previous one to its own end.

    The first epoch of a run reads data files, later ones often memory, which changes the work of the loader. If more than half of
    the steps, and at least 20, are in later epochs, only those count.

    Args:
        progress: engine that measures the waits and the work on messages.
        clock: function that returns seconds.
        processor: function that returns the processor time of this thread, for ranks with one compute thread. None: use the
            elapsed time outside of waits instead.
    """

    def __init__(
        self,
        progress: ProgressEngine,
        clock: Callable[[], float] = time.perf_counter,
        processor: Callable[[], float] | None = None,
    ) -> None:
        self._progress, self._clock, self._processor = progress, clock, processor
        self._latest: deque[Sequence[float]] = deque(maxlen=_MOST_STEPS)
        self._epochs = self._steps = self._later_steps = 0
        self._data_begin = self._data_cpu_begin = self._data_seconds = self._data_cpu_seconds = 0.0
        self._before = self._read()

    def before_epoch(self, position: Position) -> None:
        self._epochs += 1
        self._before = self._read()

    def before_batch(self) -> None:
        self._data_begin = self._clock()
        self._data_cpu_begin = 0.0 if self._processor is None else self._processor()

    def before_step(self, batch: Batch, *, whole: bool) -> None:
        self._data_seconds += self._clock() - self._data_begin
        self._data_cpu_seconds += 0.0 if self._processor is None else self._processor() - self._data_cpu_begin

    def after_step(self, position: Position, *, usual: bool) -> None:
        now, before = self._read(), self._before
        self._before = now
        self._steps += usual
        if usual and self._steps > _SETTLING_STEPS:
            self._latest.append([end - begin for end, begin in zip(now, before, strict=True)])
            self._later_steps += self._epochs > 1

    def _read(self) -> tuple[float, ...]:
        """Return the times accumulated so far, in the order of the arguments of `StepParts.of` after `steps`."""
        now, account = self._clock(), self._progress.account
        waited = self._progress.waited_seconds - account.waited_updates_ns * 1e-9
        if self._processor is None:
            busy = now - waited - self._data_seconds
        else:
            polling = (account.waited_cpu_ns - account.waited_updates_ns) * 1e-9
            busy = self._processor() - polling - self._data_cpu_seconds
        return now, waited, account.seconds, self._data_seconds, account.updates_ns * 1e-9, busy

    def measured(self) -> StepParts | None:
        """Return the parts of the steps so far, without the first few; None if no step was measured."""
        rows, later = list(self._latest), min(self._later_steps, len(self._latest))
        if later >= _FEWEST_LATER and 2 * later > len(rows):
            rows = rows[-later:]
        if not rows:
            return None
        table = np.array(rows)
        cut = len(rows) // 4
        middle = table[np.argsort(table[:, 0], kind="stable")[cut : len(rows) - cut]]
        return StepParts.of(len(rows), *middle.mean(axis=0).tolist())
