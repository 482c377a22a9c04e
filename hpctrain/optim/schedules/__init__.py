"""Learning-rate schedules: each module defines one, under the module's name."""

from __future__ import annotations

from hpctrain.core.registry import Registry
from hpctrain.optim.schedules.base import LearningRateSchedule

SCHEDULES: Registry[LearningRateSchedule] = Registry(
    __name__, "schedule", LearningRateSchedule, given=("base_lr", "epochs", "steps_per_epoch", "warmup_epochs")
)
