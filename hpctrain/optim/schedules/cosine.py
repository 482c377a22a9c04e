"""A cosine from the base learning rate to the final one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpctrain.optim.schedules.base import Decay


@dataclass(frozen=True, kw_only=True)
class Cosine(Decay):
    """Half a cosine from the base learning rate down to final_lr at the end of training.

    final_lr + (base_lr - final_lr) * (1 + cos(pi * progress)) / 2 (Loshchilov and Hutter, ICLR 2017, equation 5).
    """

    def after_warmup(self, step: float, progress: float) -> float:
        return self.between(0.5 * (1.0 + math.cos(math.pi * progress)))
