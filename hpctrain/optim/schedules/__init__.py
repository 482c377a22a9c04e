"""Learning-rate schedules: each module defines one, under the module's name."""

from __future__ import annotations

from hpctrain.optim.schedules.base import LearningRateSchedule
from hpctrain.core.registry import Registry

SCHEDULES: Registry[LearningRateSchedule] = Registry(
    __name__, "schedule", LearningRateSchedule, given=("base_lr", "epochs", "steps_per_epoch", "warmup_epochs")
)
