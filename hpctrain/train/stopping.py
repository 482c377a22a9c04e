"""Rules that end a training before its last epoch: evaluations that do not get better, and the time limit of the run.

`EarlyStop` is a pure function of the evaluations so far. `TimeLimit` asks for the end early enough to have a checkpoint
written before the limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from hpctrain.core.text import loss_text


@dataclass(frozen=True)
class Stagnation:
    """The evaluations of a run so far, by one metric.

    Attributes:
        metric: as in `EarlyStop`. best: the value that later ones are compared with; None: none was finite.
        best_epoch: epochs before it.
        evaluated_epoch: epochs before the latest one. waited: evaluations since the best that were no better.
    """

    metric: str
    best: float | None = None
    best_epoch: int = 0
    evaluated_epoch: int = 0
    waited: int = 0


@dataclass(frozen=True)
class EarlyStop:
    """Training ends where `patience` evaluations, one after another, are no better than the best one before them.

    Args:
        metric: name of a mean of evaluations, such as "top1": more is better, or "loss": less is better.
        patience: at least 1. min_delta: a value is better where it is so by more than this.
    """

    metric: str
    patience: int
    min_delta: float = 0.0

    def after(self, before: Stagnation | None, epoch: int, means: Mapping[str, float]) -> Stagnation:
        """Return the state after an evaluation that follows `epoch` epochs; another one of the same epoch changes nothing.

        before: None, or of another metric, where this is the first that counts.
        """
        if before is None or before.metric != self.metric:
            before = Stagnation(self.metric)
        if epoch <= before.evaluated_epoch:
            return before
        value = means[self.metric]
        if self._is_better(value, before.best):
            return Stagnation(self.metric, value, epoch, epoch)
        return Stagnation(self.metric, before.best, before.best_epoch, epoch, before.waited + 1)

    def ends(self, state: Stagnation | None) -> bool:
        """Return whether training is over."""
        return state is not None and state.metric == self.metric and state.waited >= self.patience

    def sentence(self, state: Stagnation) -> str:
        """Return why training is over, for people."""
        count = f"{state.waited} evaluation{'' if state.waited == 1 else 's'}"
        if state.best is None:
            return f"early stop after epoch {state.evaluated_epoch}: {count} had no finite {self.metric}"
        best = loss_text(state.best) if self._is_loss else f"{state.best:.2%}"
        by = f" by more than {self.min_delta:g}" if self.min_delta else ""
        since = f"since epoch {state.best_epoch} with {self.metric} {best}"
        return f"early stop after epoch {state.evaluated_epoch}: {count} {since} brought none that is better{by}"

    @property
    def _is_loss(self) -> bool:
        return self.metric.endswith("loss")

    def _is_better(self, value: float, best: float | None) -> bool:
        if not math.isfinite(value):
            return False
        return best is None or (best - value if self._is_loss else value - best) > self.min_delta


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
        self._last_check = clock()
        self._end = self._last_check + seconds
        self._checkpoint_seconds = _part(_FIRST_CHECKPOINT, seconds)
        self._leaving_seconds = _part(_LEAVING, seconds)
        self._evaluation_seconds = self._step_seconds = self._other_seconds = 0.0
        self._saved = False

    @property
    def finite(self) -> bool:
        """There is a limit."""
        return math.isfinite(self._end)

    def over(self, *, saves: bool = False, evaluates: bool = False) -> bool:
        """Return whether the run has to end. Call it once a step, at its end.

        A request is heard a step later, and not to ask now is to ask in the next one: two steps are still to come.

        Args:
            saves, evaluates: a checkpoint, an evaluation is due within these two steps.
        """
        now = self._clock()
        step = now - self._last_check - self._other_seconds
        self._last_check, self._other_seconds = now, 0.0
        self._step_seconds = max(step, _STEP_DECAY * self._step_seconds)
        needed = 2 * self._step_seconds + (1 + saves) * self._checkpoint_seconds + self._leaving_seconds
        self.asked = self.asked or now + needed + evaluates * self._evaluation_seconds > self._end
        return self.asked

    @contextmanager
    def saving(self, *, whole: bool = True) -> Iterator[None]:
        """Measure a checkpoint that is written during the block. whole: to its end; else `wrote` receives its time."""
        begin = self._clock()
        yield
        seconds = self._clock() - begin
        self._other_seconds += seconds
        if whole:
            self.wrote(seconds)

    def wrote(self, seconds: float) -> None:
        """Take note that a checkpoint has taken this time."""
        self._checkpoint_seconds = max(_CHECKPOINT_SLACK * seconds, self._checkpoint_seconds if self._saved else 0.0)
        self._saved = True

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Measure an evaluation that is made during the block."""
        begin = self._clock()
        yield
        seconds = self._clock() - begin
        self._other_seconds += seconds
        self._evaluation_seconds = max(seconds, self._evaluation_seconds)


def _part(rule: tuple[float, float], seconds: float) -> float:
    """Return a share of a time, up to a number of seconds."""
    share, most = rule
    return min(most, share * max(0.0, seconds))
