"""Rules that end a training before its last epoch: evaluations without improvement, and the time limit of the run.

`EarlyStop` is a pure function of the evaluations so far. `TimeLimit` requests the end early enough to write a checkpoint before
the limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hpctrain.core.text import counted, loss_text
from hpctrain.optim.stagnation import ImprovementRule, Stagnation


@dataclass(frozen=True)
class EarlyStop(ImprovementRule):
    """Rule that ends a training after `patience` consecutive evaluations without improvement.

    Args:
        patience: number of evaluations; at least 1.
    """

    patience: int

    def ends(self, state: Stagnation | None) -> bool:
        """Return whether to end the training."""
        return state is not None and state.metric == self.metric and state.waited >= self.patience

    def sentence(self, state: Stagnation) -> str:
        """Return the reason for the end of the training as text."""
        count = counted(state.waited, "evaluation")
        if state.best is None:
            return f"early stop after epoch {state.evaluated_epoch}: {count} had no finite {self.metric}"
        best = loss_text(state.best) if self.is_loss else f"{state.best:.2%}"
        by = f" by more than {self.min_delta:g}" if self.min_delta else ""
        best_epoch = f"epoch {state.best_epoch} ({self.metric} {best})"
        return f"early stop after epoch {state.evaluated_epoch}: no improvement{by} in {count} since {best_epoch}"


# Estimated times of the first checkpoint and of the end of a run: share of the limit, and maximum in seconds.
_FIRST_CHECKPOINT = (0.1, 60.0)
_LEAVING = (0.02, 10.0)
# The next checkpoint may take longer than the last one.
_CHECKPOINT_SLACK = 1.5
# Decay per step of the longest step time, since single steps are long (the first one compiles its programs).
_STEP_DECAY = 0.9


class TimeLimit:
    """Time limit of this rank, with the measured times of a step, a checkpoint and an evaluation.

    Args:
        seconds: time from now; infinite: no limit.
        clock: function that returns seconds.

    Attributes:
        asked: whether the limit has requested the end of the run.
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
        """Whether there is a limit."""
        return math.isfinite(self._end)

    def over(self, *, saves: bool = False, evaluates: int = 0) -> bool:
        """Return whether the run has to end. Call it at the end of each step.

        A request takes effect one step later, and a request that is not made now can only be made after the next step. Therefore
        the time must suffice for two more steps.

        Args:
            saves: whether a checkpoint is due within these two steps.
            evaluates: number of evaluations that are due within these two steps.
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
        """Measure the time of a checkpoint that is written during the block.

        Args:
            whole: whether the block includes the whole write; if False, `wrote` receives the time of the write.
        """
        begin = self._clock()
        yield
        seconds = self._clock() - begin
        self._other_seconds += seconds
        if whole:
            self.wrote(seconds)

    def wrote(self, seconds: float) -> None:
        """Record the duration of the latest checkpoint."""
        self._checkpoint_seconds = max(_CHECKPOINT_SLACK * seconds, self._checkpoint_seconds if self._saved else 0.0)
        self._saved = True

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Measure the time of an evaluation during the block."""
        begin = self._clock()
        yield
        seconds = self._clock() - begin
        self._other_seconds += seconds
        self._evaluation_seconds = max(seconds, self._evaluation_seconds)


def _part(rule: tuple[float, float], seconds: float) -> float:
    """Return a share of a time, limited to a maximum.

    Args:
        rule: share, and maximum in seconds.
    """
    share, most = rule
    return min(most, share * max(0.0, seconds))
