"""The length of a run's steps, how long each waited, and what messages took beside: two clock readings a step, always on."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from hpctrain.comm.progress import ProgressEngine

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
