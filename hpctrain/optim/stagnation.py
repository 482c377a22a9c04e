"""Evaluations without improvement, which end a training (`EarlyStop`) or reduce its learning rate (`Plateau`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stagnation:
    """The evaluations of a run so far, by one metric.

    Attributes:
        metric: name of the metric, as in `ImprovementRule`.
        best: best value, with which later evaluations are compared; None: no value was finite.
        best_epoch: number of epochs before the best evaluation.
        evaluated_epoch: number of epochs before the latest evaluation.
        waited: number of evaluations without improvement since the best, or since `waited` was reset.
    """

    metric: str
    best: float | None = None
    best_epoch: int = 0
    evaluated_epoch: int = 0
    waited: int = 0


@dataclass(frozen=True)
class ImprovementRule:
    """Rule that compares evaluations by one metric.

    Args:
        metric: metric of evaluations. The value of "loss" or "ema_loss" must decrease, and that of any other metric, for example
            "top1", must increase.
        min_delta: change that an improvement must exceed.
    """

    metric: str
    min_delta: float = field(default=0.0, kw_only=True)

    def after(self, before: Stagnation | None, epoch: int, means: Mapping[str, float]) -> Stagnation:
        """Return the state after an evaluation that follows `epoch` epochs.

        An evaluation changes nothing unless `epoch` is above 0 and above that of all earlier evaluations.

        Args:
            before: state before the evaluation; None, or a state with another metric: this evaluation is the first.
            means: means of the evaluation, by metric.
        """
        if before is None or before.metric != self.metric:
            before = Stagnation(self.metric)
        if epoch <= before.evaluated_epoch:
            return before
        value, best = means[self.metric], before.best
        if math.isfinite(value) and (best is None or (best - value if self.is_loss else value - best) > self.min_delta):
            return Stagnation(self.metric, value, epoch, epoch)
        return Stagnation(self.metric, best, before.best_epoch, epoch, before.waited + 1)

    @property
    def is_loss(self) -> bool:
        """Whether lower values are better."""
        return self.metric.endswith("loss")
