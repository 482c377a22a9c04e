"""A learning rate that falls at milestones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from hpctrain.core.errors import OptionError
from hpctrain.optim.schedules.base import LearningRateSchedule


@dataclass(frozen=True, kw_only=True)
class Step(LearningRateSchedule):
    """The base learning rate, multiplied by gamma at each milestone.

    Args:
        milestones_epochs: Epochs at which the rate falls, such as [30, 60, 80]: increasing, counted from the start of training,
            fractions allowed, none inside the warm-up. One beyond the last epoch never acts.
        gamma: Factor at each milestone, in (0, 1].
    """

    milestones_epochs: tuple[float, ...]
    gamma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        # A list from YAML would make the frozen schedule unhashable.
        object.__setattr__(self, "milestones_epochs", tuple(self.milestones_epochs))
        bounds = (0.0, *self.milestones_epochs)
        if not all(a < b for a, b in pairwise(bounds)):
            legal = sorted({m for m in self.milestones_epochs if m > 0}) or [30, 60]
            raise OptionError(
                f"milestones_epochs {_listed(self.milestones_epochs)} must increase from above 0, as in {_listed(legal)}.",
                "milestones_epochs",
            )
        if self.milestones_epochs and self.milestones_epochs[0] < self.warmup_epochs:
            raise OptionError(
                f"The milestone at epoch {self.milestones_epochs[0]:g} lies inside the warm-up of {self.warmup_epochs:g} epochs; "
                f"the earliest that is legal is {self.warmup_epochs:g}.",
                "milestones_epochs",
            )
        if not 0.0 < self.gamma <= 1.0:
            raise OptionError(f"gamma {self.gamma} is outside (0, 1]; the usual value is 0.1.", "gamma")

    def after_warmup(self, step: float, progress: float) -> float:
        passed = sum(step >= round(epoch * self.steps_per_epoch) for epoch in self.milestones_epochs)
        return self.base_lr * self.gamma**passed


def _listed(epochs: Iterable[float]) -> str:
    return f"[{', '.join(f'{epoch:g}' for epoch in epochs)}]"
