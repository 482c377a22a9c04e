"""A power of the remaining share of steps, from the base learning rate to the final one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpctrain.core.errors import OptionError
from hpctrain.optim.schedules.base import Decay


@dataclass(frozen=True, kw_only=True)
class Polynomial(Decay):
    """A power of the share of steps that is left, from the base learning rate down to final_lr at the end of training.

    final_lr + (base_lr - final_lr) * (1 - progress)^power.

    Args:
        power: Exponent, above 0; 1 is a straight line.
    """

    power: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.power > 0.0 and math.isfinite(self.power)):
            raise OptionError(f"power {self.power} must be positive; 1 decays linearly, 2 is the usual value.", "power")

    def after_warmup(self, step: float, progress: float) -> float:
        return self.between((1.0 - progress) ** self.power)
