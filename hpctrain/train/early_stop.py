"""The end of a training that its evaluations do not get better in: pure functions of what they have given so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.train.progress_text import loss_text


@dataclass(frozen=True)
class Stagnation:
    """The evaluations of a run so far, by one metric.

    Attributes:
        metric: as in `EarlyStop`. best: the value that later ones are measured by; None: none was finite. best_epoch: behind it.
        evaluated_epoch: behind the latest one. waited: evaluations since then that were no better.
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
        metric: name of a mean of evaluations, such as "top1": more is better, or "loss", of which less is.
        patience: at least 1. min_delta: a value is better where it is so by more than this.
    """

    metric: str
    patience: int
    min_delta: float = 0.0

    def after(self, before: Stagnation | None, epoch: int, means: Mapping[str, float]) -> Stagnation:
        """Behind an evaluation after `epoch` epochs; another one of the same epoch changes nothing.

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
        """Whether training is over."""
        return state is not None and state.metric == self.metric and state.waited >= self.patience

    def sentence(self, state: Stagnation) -> str:
        """Why training is over, for people."""
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
