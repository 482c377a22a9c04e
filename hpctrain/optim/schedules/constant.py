"""A constant learning rate."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.optim.schedules.base import LearningRateSchedule


@dataclass(frozen=True, kw_only=True)
class Constant(LearningRateSchedule):
    """The base learning rate throughout, after the warm-up."""

    def after_warmup(self, step: float, progress: float) -> float:
        return self.base_lr
