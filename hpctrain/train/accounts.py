"""Accounts of a run's steps: how long they take, wait for data and for messages, and what operators take.

Two clock readings a step, always on; operators are recorded for a few early steps alone, as a trace records them, on a clock
of
this rank's own.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from statistics import median

from hpctrain.comm.progress import ProgressEngine
from hpctrain.data.loader import Batch
from hpctrain.trace.tracer import Events, Tracer
from hpctrain.train.replica import Replica


@dataclass(frozen=True)
class DataWait:
    """Sums over steps of one rank. seconds: from asking for a batch to asking for the next; waited_seconds: until it came."""

    steps: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0


class DataWaits:
    """Adds up how long the steps of this rank took, and how long they waited for data.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._steps = 0
        self._seconds = self._waited_seconds = 0.0

    def watched(self, batches: Generator[Batch, None, None]) -> Generator[Batch, None, None]:
        """The same batches. A step ends where the next batch is asked for, or where the generator is closed."""
        with closing(batches):
            while True:
                begin = self._clock()
                batch = next(batches, None)
                if batch is None:
                    return
                self._waited_seconds += self._clock() - begin
                try:
                    yield batch
                finally:
                    self._seconds += self._clock() - begin
                    self._steps += 1

    def take(self) -> DataWait:
        """The sums since they were taken last."""
        sums = DataWait(self._steps, self._seconds, self._waited_seconds)
        self._steps, self._seconds, self._waited_seconds = 0, 0.0, 0.0
        return sums


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


class StepTimes:
    """Times of whole steps with the full batch, the latest ones. A step ends where the next one asks for its batch.

    Args:
        progress: whose waits count, and what its messages took. clock: in seconds.
    """

    def __init__(self, progress: ProgressEngine, clock: Callable[[], float] = time.perf_counter) -> None:
        self._progress = progress
        self._clock = clock
        self._seconds, self._waited, self._messages = array("d"), array("d"), array("d")
        self._steps = 0
        self._begin_seconds = self._begin_waited = self._begin_messages = 0.0
        self._counts = False

    def begin(self) -> None:
        """A stretch of steps begins: an epoch, or what follows a pause."""
        self._begin(self._clock())

    def _begin(self, now: float) -> None:
        self._begin_seconds, self._begin_waited = now, self._progress.waited_seconds
        self._begin_messages, self._counts = self._progress.account.seconds, True

    def leave_out(self) -> None:
        """The step that runs does more than a step does: it is not counted."""
        self._counts = False

    def end_step(self) -> None:
        """A step ends, and the next one begins."""
        now, waited, messages = self._clock(), self._progress.waited_seconds, self._progress.account.seconds
        if self._counts:
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
        """Medians of the steps so far, without the first few; None where there is none."""
        if not self._seconds:
            return None
        return MeasuredStep(median(self._seconds), median(self._waited), len(self._seconds), median(self._messages))


_FIRST = 6  # programs are made, orders are measured, caches fill
_STEPS = 5
_ROOM = 1 << 15  # events; a step of 2,000 operators has less than a fifth of it


class OperatorSample:
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

    def begin_step(self, *, whole: bool) -> None:
        """A step begins. whole: it has the full batch."""
        self._seen += 1
        if self.complete or self._seen <= _FIRST:
            return
        self.complete = self._taken == _STEPS
        wanted = whole and not self.complete
        self._replica.record_operators(self._trace if wanted else None)
        self._taken += wanted

    def events(self) -> Events:
        """The events of the steps that were recorded so far."""
        return self._trace.events()
