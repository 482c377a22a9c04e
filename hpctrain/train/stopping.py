"""Whether the time of a run is so far gone that it has to end now, to have its checkpoint written before the limit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Of a checkpoint, before one was written, and of the end of a run: a share of the time, and the most that it may be.
_FIRST_CHECKPOINT = (0.1, 60.0)
_LEAVING = (0.02, 10.0)
# File systems are not always as fast as the last time.
_CHECKPOINT_SLACK = 1.5
# A step that was long once (the first one makes its programs) is forgotten by so much a step.
_STEP_DECAY = 0.9


class TimeLimit:
    """The seconds that this rank may still run, and what of them a step, a checkpoint and an evaluation take, as measured.

    Args:
        seconds: from now on; infinite: there is no limit. clock: in seconds.

    Attributes:
        asked: the limit has asked for the end of the run.
    """

    def __init__(self, seconds: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self.asked = False
        self._clock = clock
        self._looked = clock()
        self._end = self._looked + seconds
        self._checkpoint_seconds = _part(_FIRST_CHECKPOINT, seconds)
        self._leaving_seconds = _part(_LEAVING, seconds)
        self._evaluation_seconds = self._step_seconds = self._other_seconds = 0.0
        self._saved = False

    @property
    def finite(self) -> bool:
        """There is a limit."""
        return math.isfinite(self._end)

    def over(self, *, saves: bool = False, evaluates: bool = False) -> bool:
        """True where the run has to end; to be called once a step, at its end.

        A request is heard a step later, and not to ask now is to ask in the next one: two steps are still to come.

        Args:
            saves, evaluates: a checkpoint, an evaluation is due within these two steps.
        """
        now = self._clock()
        step = now - self._looked - self._other_seconds
        self._looked, self._other_seconds = now, 0.0
        self._step_seconds = max(step, _STEP_DECAY * self._step_seconds)
        needed = 2 * self._step_seconds + (1 + saves) * self._checkpoint_seconds + self._leaving_seconds
        self.asked = self.asked or now + needed + evaluates * self._evaluation_seconds > self._end
        return self.asked

    @contextmanager
    def saving(self, *, whole: bool = True) -> Iterator[None]:
        """While this lasts, a checkpoint is written. whole: to its end; else `wrote` says how long that has taken."""
        begin = self._clock()
        yield
        seconds = self._clock() - begin
        self._other_seconds += seconds
        if whole:
            self.wrote(seconds)

    def wrote(self, seconds: float) -> None:
        """A checkpoint has taken so long."""
        self._checkpoint_seconds = max(_CHECKPOINT_SLACK * seconds, self._checkpoint_seconds if self._saved else 0.0)
        self._saved = True

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """While this lasts, the network is evaluated."""
        begin = self._clock()
        yield
        seconds = self._clock() - begin
        self._other_seconds += seconds
        self._evaluation_seconds = max(seconds, self._evaluation_seconds)


def _part(rule: tuple[float, float], seconds: float) -> float:
    """A share of a time, up to a number of seconds."""
    share, most = rule
    return min(most, share * max(0.0, seconds))
