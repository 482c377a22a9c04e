"""The base of learning-rate schedules: pure functions of the step, each with a linear warm-up.

A schedule holds no state: after a restart, `lr(step)` is what it was. Steps count from 0 since the start of training. `Decay`
is a learning rate that falls smoothly to a final one: what the cosine and the polynomial share.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from hpctrain.core.errors import ConfigError, OptionError


@dataclass(frozen=True, kw_only=True)
class LearningRateSchedule(ABC):
    """Warm-up from warmup_start * base_lr to base_lr over the first `warmup_epochs`, then `after_warmup`.

    The step that follows the warm-up is the first at the full rate: lr(warmup_steps) == after_warmup(warmup_steps, 0).

    Args:
        base_lr: the full rate, positive. epochs, steps_per_epoch: of the whole training, at least 1.
        warmup_epochs: in [0, epochs], fractions too (rounded to whole steps).
        warmup_start: Factor on the base learning rate in the first step of the warm-up, in [0, 1].

    Raises:
        ConfigError: a value outside its range.
    """

    base_lr: float
    epochs: int
    steps_per_epoch: int
    warmup_epochs: float = 0.0
    warmup_start: float = 0.1

    def __post_init__(self) -> None:
        if not (self.base_lr > 0.0 and math.isfinite(self.base_lr)):
            raise ConfigError(f"lr {self.base_lr} must be a positive number; 0.1 is a usual value.")
        if self.epochs < 1:
            raise ConfigError(f"epochs {self.epochs} must be at least 1.")
        if self.steps_per_epoch < 1:
            raise ConfigError(f"An epoch of {self.steps_per_epoch} steps trains nothing; it must have at least 1.")
        if not 0.0 <= self.warmup_epochs <= self.epochs:
            legal = 0 if not self.warmup_epochs >= 0.0 else self.epochs
            raise ConfigError(
                f"warmup_epochs {self.warmup_epochs} is outside [0, {self.epochs}]; the nearest legal value is {legal}."
            )
        if not 0.0 <= self.warmup_start <= 1.0:
            legal = 0 if not self.warmup_start >= 0.0 else 1
            raise OptionError(
                f"warmup_start {self.warmup_start} is outside [0, 1]; the nearest legal value is {legal}.", "warmup_start"
            )

    @property
    def warmup_steps(self) -> int:
        """Steps below the full rate."""
        return round(self.warmup_epochs * self.steps_per_epoch)

    @property
    def total_steps(self) -> int:
        """Steps of the whole training."""
        return self.epochs * self.steps_per_epoch

    def lr(self, step: float) -> float:
        """The learning rate of `step`, which may lie between two; past the end of training the last value holds."""
        warmup = self.warmup_steps
        if step < warmup:
            return self.base_lr * (self.warmup_start + (1.0 - self.warmup_start) * (step / warmup))
        remaining = self.total_steps - warmup
        return self.after_warmup(step, min(1.0, (step - warmup) / remaining) if remaining else 1.0)

    @abstractmethod
    def after_warmup(self, step: float, progress: float) -> float:
        """The rate of `step`, which lies behind the warm-up; `progress` of the remaining steps, in [0, 1]."""


@dataclass(frozen=True, kw_only=True)
class Decay(LearningRateSchedule):
    """From base_lr to final_lr.

    Args:
        final_lr: Learning rate at the end of training: a rate, not a factor, in [0, lr].
    """

    final_lr: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.final_lr <= self.base_lr:
            legal = 0.0 if not self.final_lr >= 0.0 else self.base_lr
            raise OptionError(
                f"final_lr {self.final_lr} is outside [0, {self.base_lr}]; the nearest legal value is {legal}.", "final_lr"
            )

    def between(self, factor: float) -> float:
        return self.final_lr + (self.base_lr - self.final_lr) * factor
