"""Learning rates as pure functions of the step, each with a linear warm-up.

A schedule holds no state: after a restart, `lr(step)` is what it was. Steps count from 0 since the start of training.
"""

from __future__ import annotations

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise

from hpctrain.errors import ConfigError


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
            raise ConfigError(f"warmup_start {self.warmup_start} is outside [0, 1]; the nearest legal value is {legal}.")

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
class Constant(LearningRateSchedule):
    """The base learning rate throughout, after the warm-up."""

    def after_warmup(self, step: float, progress: float) -> float:
        return self.base_lr


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
            legal = sorted({m for m in self.milestones_epochs if m > 0})
            raise ConfigError(
                f"milestones_epochs {list(self.milestones_epochs)} must increase from above 0, as in {legal or [30, 60]}."
            )
        if self.milestones_epochs and self.milestones_epochs[0] < self.warmup_epochs:
            raise ConfigError(
                f"The milestone at epoch {self.milestones_epochs[0]} lies inside the warm-up of {self.warmup_epochs} epochs; "
                f"the earliest that is legal is {self.warmup_epochs}."
            )
        if not 0.0 < self.gamma <= 1.0:
            raise ConfigError(f"gamma {self.gamma} is outside (0, 1]; the usual value is 0.1.")

    def after_warmup(self, step: float, progress: float) -> float:
        passed = sum(step >= round(epoch * self.steps_per_epoch) for epoch in self.milestones_epochs)
        return self.base_lr * self.gamma**passed


@dataclass(frozen=True, kw_only=True)
class _Decay(LearningRateSchedule):
    """From base_lr to final_lr.

    Args:
        final_lr: Learning rate at the end of training: a rate, not a factor, in [0, lr].
    """

    final_lr: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.final_lr <= self.base_lr:
            legal = 0.0 if not self.final_lr >= 0.0 else self.base_lr
            raise ConfigError(f"final_lr {self.final_lr} is outside [0, {self.base_lr}]; the nearest legal value is {legal}.")

    def _between(self, factor: float) -> float:
        return self.final_lr + (self.base_lr - self.final_lr) * factor


@dataclass(frozen=True, kw_only=True)
class Cosine(_Decay):
    """Half a cosine from the base learning rate down to final_lr at the end of training.

    final_lr + (base_lr - final_lr) * (1 + cos(pi * progress)) / 2 (Loshchilov and Hutter, ICLR 2017, equation 5).
    """

    def after_warmup(self, step: float, progress: float) -> float:
        return self._between(0.5 * (1.0 + math.cos(math.pi * progress)))


@dataclass(frozen=True, kw_only=True)
class Polynomial(_Decay):
    """A power of the share of steps that is left, from the base learning rate down to final_lr at the end of training.

    final_lr + (base_lr - final_lr) * (1 - progress)^power.

    Args:
        power: Exponent, above 0; 1 is a straight line.
    """

    power: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.power > 0.0 and math.isfinite(self.power)):
            raise ConfigError(f"power {self.power} must be positive; 1 decays linearly, 2 is the usual value.")

    def after_warmup(self, step: float, progress: float) -> float:
        return self._between((1.0 - progress) ** self.power)


_CLASSES: Mapping[str, type[LearningRateSchedule]] = {
    "constant": Constant,
    "step": Step,
    "cosine": Cosine,
    "polynomial": Polynomial,
}
_GIVEN = ("base_lr", "epochs", "steps_per_epoch", "warmup_epochs")


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"it is one of {', '.join(known) or '(none)'}."


def names() -> tuple[str, ...]:
    """All schedules."""
    return tuple(_CLASSES)


def schedule_class(name: str) -> type[LearningRateSchedule]:
    """The schedule of that name: constant, step, cosine or polynomial.

    Raises:
        ConfigError: there is none.
    """
    if name not in _CLASSES:
        raise ConfigError(f"The schedule {name!r} is unknown; {_nearest(name, list(_CLASSES))}")
    return _CLASSES[name]


def option_names(name: str) -> tuple[str, ...]:
    """Options that a configuration may give to the schedule of that name."""
    return tuple(field.name for field in fields(schedule_class(name)) if field.name not in _GIVEN)


def make(
    name: str, options: Mapping[str, object], base_lr: float, epochs: int, steps_per_epoch: int, warmup_epochs: float = 0.0
) -> LearningRateSchedule:
    """The schedule `name` with `options` (see `option_names`) for one training.

    Raises:
        ConfigError: unknown name or option, an option that is missing, a value outside its range.
    """
    known = option_names(name)
    for option in options:
        if option not in known:
            raise ConfigError(f"The schedule {name} has no option {option!r}; {_nearest(option, list(known))}")
    if name == "step" and "milestones_epochs" not in options:
        raise ConfigError("The schedule step needs milestones_epochs, a list of epochs such as [30, 60, 80].")
    given = dict(zip(_GIVEN, (base_lr, epochs, steps_per_epoch, warmup_epochs), strict=True))
    return schedule_class(name)(**given, **options)  # type: ignore[arg-type]
