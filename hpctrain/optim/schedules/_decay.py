"""A learning rate that falls smoothly to a final one: what the cosine and the polynomial share."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.core.errors import OptionError
from hpctrain.optim.schedules.base import LearningRateSchedule


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
