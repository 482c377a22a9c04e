"""Learning-rate schedules: pure functions of the step, each with a warm-up.

A schedule holds no state, so the rate is the same after a restart. The rate of `Plateau` also depends on a `PlateauState`, which
the position of a training contains (see `rate` and `observed`). Steps count from 0 at the start of training. `SCHEDULES` finds
the schedules by name ("cosine" is `Cosine`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from hpctrain.core.errors import ConfigError, OptionError
from hpctrain.core.registry import Checked, Registry
from hpctrain.optim.stagnation import ImprovementRule, Stagnation


@dataclass(frozen=True, kw_only=True)
class LearningRateSchedule(Checked):
    """Base of schedules: warm-up from warmup_start * base_lr to base_lr over `warmup_epochs`, then `after_warmup`.

    `after_warmup` determines the rates from step `warmup_steps` on.

    Args:
        base_lr: full learning rate, positive.
        epochs: number of epochs of the whole training, at least 1.
        steps_per_epoch: number of steps per epoch, at least 1.
        warmup_epochs: length of the warm-up, in [0, epochs]; fractions are rounded to whole steps.
        warmup_start: Factor on the base learning rate in the first step of the warm-up, in [0, 1].

    Raises:
        ConfigError: a value is outside its range.
    """

    base_lr: float
    epochs: int
    steps_per_epoch: int
    warmup_epochs: float = 0.0
    warmup_start: float = 0.1

    def __post_init__(self) -> None:
        if not (self.base_lr > 0.0 and math.isfinite(self.base_lr)):
            raise ConfigError(f"lr is {self.base_lr}, but must be positive and finite; 0.1 is a usual value.")
        if self.epochs < 1:
            raise ConfigError(f"epochs is {self.epochs}, but must be at least 1.")
        if self.steps_per_epoch < 1:
            raise ConfigError(f"An epoch of {self.steps_per_epoch} steps has no updates; it must have at least 1 step.")
        if not 0.0 <= self.warmup_epochs <= self.epochs:
            raise ConfigError(f"warmup_epochs is {self.warmup_epochs}, but must be from 0 to epochs, {self.epochs}.")
        if not 0.0 <= self.warmup_start <= 1.0:
            raise OptionError(f"warmup_start is {self.warmup_start}, but must be from 0 to 1.", "warmup_start")

    @property
    def warmup_steps(self) -> int:
        """Number of steps of the warm-up."""
        return round(self.warmup_epochs * self.steps_per_epoch)

    @property
    def total_steps(self) -> int:
        """Number of steps of the whole training."""
        return self.epochs * self.steps_per_epoch

    def lr(self, step: float) -> float:
        """Return the learning rate of `step`, which may be a fraction. After the end, the progress of `after_warmup` stays 1."""
        warmup = self.warmup_steps
        if step < warmup:
            return float(self.base_lr * (self.warmup_start + (1.0 - self.warmup_start) * self.rise(step / warmup)))
        remaining = self.total_steps - warmup
        return float(self.after_warmup(step, min(1.0, (step - warmup) / remaining) if remaining else 1.0))

    def rate(self, step: float, state: PlateauState | None) -> float:
        """Return the learning rate of `step` in a training whose evaluations so far have led to `state`."""
        return self.lr(step)

    def observed(self, state: PlateauState | None, epoch: int, means: Mapping[str, float]) -> PlateauState | None:
        """Return the state after an evaluation that follows `epoch` epochs. Only `Plateau` changes it.

        Args:
            state: state before the evaluation; None: there was none.
            means: means of the evaluation, by metric.
        """
        return state

    def rise(self, progress: float) -> float:
        """Return how far the rate has risen, from 0 to 1, after the share `progress` of the warm-up. By default: linear."""
        return progress

    @abstractmethod
    def after_warmup(self, step: float, progress: float) -> float:
        """Return the rate of a step after the warm-up.

        Args:
            step: step since the start of training.
            progress: share of the steps after the warm-up that are done, in [0, 1].
        """


@dataclass(frozen=True, kw_only=True)
class Constant(LearningRateSchedule):
    """Constant base learning rate after the warm-up."""

    def after_warmup(self, step: float, progress: float) -> float:
        return self.base_lr


@dataclass(frozen=True, kw_only=True)
class Step(LearningRateSchedule):
    """Step decay: the base learning rate, multiplied by gamma at each milestone.

    Args:
        milestones_epochs: Epochs at which the rate falls, such as [30, 60, 80]: increasing, counted from the start of training,
            fractions allowed, none inside the warm-up. A milestone beyond the last epoch has no effect.
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
                f"milestones_epochs is {_listed(self.milestones_epochs)}, but must be positive and increase, as in "
                f"{_listed(legal)}.",
                "milestones_epochs",
            )
        if self.milestones_epochs and self.milestones_epochs[0] < self.warmup_epochs:
            raise OptionError(
                f"The milestone at epoch {self.milestones_epochs[0]:g} lies inside the warm-up of {self.warmup_epochs:g} epochs; "
                f"the earliest legal epoch is {self.warmup_epochs:g}.",
                "milestones_epochs",
            )
        if not 0.0 < self.gamma <= 1.0:
            raise OptionError(f"gamma {self.gamma} is outside (0, 1]; the usual value is 0.1.", "gamma")

    def after_warmup(self, step: float, progress: float) -> float:
        passed = sum(step >= round(epoch * self.steps_per_epoch) for epoch in self.milestones_epochs)
        return self.base_lr * self.gamma**passed


def _listed(epochs: Iterable[float]) -> str:
    return f"[{', '.join(f'{epoch:g}' for epoch in epochs)}]"


@dataclass(frozen=True, kw_only=True)
class Decay(LearningRateSchedule):
    """A smooth decay from base_lr to final_lr, the base of `Cosine` and `Polynomial`.

    Args:
        final_lr: Learning rate at the end of training, a rate and not a factor, in [0, lr].
    """

    final_lr: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.final_lr <= self.base_lr:
            raise OptionError(f"final_lr is {self.final_lr}, but must be from 0 to lr, {self.base_lr}.", "final_lr")

    def between(self, factor: float) -> float:
        """Interpolate linearly between final_lr (factor 0) and base_lr (factor 1)."""
        return self.final_lr + (self.base_lr - self.final_lr) * factor


@dataclass(frozen=True, kw_only=True)
class Cosine(Decay):
    """Cosine decay from the base learning rate to final_lr at the end of training.

    final_lr + (base_lr - final_lr) * (1 + cos(pi * progress)) / 2 (Loshchilov and Hutter, ICLR 2017, equation 5).
    """

    def after_warmup(self, step: float, progress: float) -> float:
        return self.between(0.5 * (1.0 + math.cos(math.pi * progress)))


@dataclass(frozen=True, kw_only=True)
class Polynomial(Decay):
    """Polynomial decay from the base learning rate to final_lr at the end of training.

    final_lr + (base_lr - final_lr) * (1 - progress)^power.

    Args:
        power: Exponent, above 0; 1 is a straight line.
    """

    power: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.power > 0.0 and math.isfinite(self.power)):
            raise OptionError(f"power is {self.power}, but must be positive and finite; 1 decays linearly, 2 is usual.", "power")

    def after_warmup(self, step: float, progress: float) -> float:
        return self.between((1.0 - progress) ** self.power)


@dataclass(frozen=True, kw_only=True)
class OneCycle(LearningRateSchedule):
    """One cycle: the learning rate rises to lr in the first part of the training and falls in the remaining part.

    The rise takes the place of the warm-up, so `warmup_epochs` must be 0. The momentum stays fixed (Smith and Topin, arXiv
    1708.07120; torch.optim.lr_scheduler.OneCycleLR with cycle_momentum=False).

    Args:
        warmup_start: Factor on the base learning rate in the first step, in [0, 1]; 0.04 is PyTorch's div_factor of 25.
        peak: Share of the training after which the rate is the base learning rate, in [0, 1].
        final_factor: Factor on the base learning rate at the end of training, in [0, 1].
        anneal: Shape of the rise and of the fall: half a period of a cosine each (cosine), or straight lines (linear).
    """

    warmup_start: float = 0.04
    peak: float = 0.3
    final_factor: float = 0.0
    anneal: Literal["cosine", "linear"] = "cosine"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_epochs:
            share = self.warmup_epochs / self.epochs
            raise OptionError(
                f"warmup_epochs is {self.warmup_epochs:g}, but one_cycle begins with a rise of its own; leave it out, and set "
                f"peak to the same share of the training, {share:.3g}.",
                "warmup_epochs",
            )
        for name in ("peak", "final_factor"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise OptionError(f"{name} is {value}, but must be from 0 to 1.", name)

    @property
    def warmup_steps(self) -> int:
        return round(self.peak * self.total_steps)

    def rise(self, progress: float) -> float:
        return progress if self.anneal == "linear" else 0.5 * (1.0 - math.cos(math.pi * progress))

    def after_warmup(self, step: float, progress: float) -> float:
        return self.base_lr * (self.final_factor + (1.0 - self.final_factor) * self.rise(1.0 - progress))


@dataclass(frozen=True)
class PlateauState:
    """State of a learning rate that evaluations reduce.

    Attributes:
        stagnation: evaluations so far; a reduction resets `waited`.
        reductions: number of reductions so far.
    """

    stagnation: Stagnation
    reductions: int = 0

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> PlateauState:
        """Return the state from its fields in the metadata of a checkpoint."""
        return cls(Stagnation(**meta["stagnation"]), int(meta["reductions"]))


@dataclass(frozen=True, kw_only=True)
class Plateau(LearningRateSchedule):
    """Reduction on a plateau: the rate is multiplied by `factor` whenever evaluations stop improving.

    The rates are those of torch.optim.lr_scheduler.ReduceLROnPlateau with threshold_mode "abs" and a patience that is smaller by
    1. Checkpoints contain the state. `lr(step)` is the rate without reductions.

    Args:
        factor: Factor on the learning rate at each reduction, in (0, 1).
        patience: Number of consecutive evaluations without improvement after which the rate is reduced, at least 1. A reduction
            resets the count.
        metric: Metric of the evaluations that must improve, as in early_stop.metric.
        min_delta: Change that an improvement must exceed, at least 0.
        min_lr: Minimum learning rate after reductions, in [0, lr].
    """

    factor: float = 0.1
    patience: int = 5
    metric: Literal["loss", "top1", "top5", "ema_loss", "ema_top1", "ema_top5"] = "loss"
    min_delta: float = 0.0
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.factor < 1.0:
            raise OptionError(f"factor {self.factor} is outside (0, 1); the usual value is 0.1.", "factor")
        if self.patience < 1:
            raise OptionError(f"patience is {self.patience}, but must be at least 1.", "patience")
        if not (self.min_delta >= 0.0 and math.isfinite(self.min_delta)):
            raise OptionError(
                f"min_delta is {self.min_delta}, but must be a finite number of at least 0; the default is 0.", "min_delta"
            )
        if not 0.0 <= self.min_lr <= self.base_lr:
            raise OptionError(f"min_lr is {self.min_lr}, but must be from 0 to lr, {self.base_lr}.", "min_lr")

    def after_warmup(self, step: float, progress: float) -> float:
        return self.base_lr

    def rate(self, step: float, state: PlateauState | None) -> float:
        reductions = 0 if state is None else state.reductions
        return self.lr(step) * max(self.factor**reductions, self.min_lr / self.base_lr)

    def observed(self, state: PlateauState | None, epoch: int, means: Mapping[str, float]) -> PlateauState:
        before, reductions = (None, 0) if state is None else (state.stagnation, state.reductions)
        after = ImprovementRule(self.metric, min_delta=self.min_delta).after(before, epoch, means)
        if after.waited < self.patience:
            return PlateauState(after, reductions)
        return PlateauState(replace(after, waited=0), reductions + 1)


SCHEDULES: Registry[LearningRateSchedule] = Registry(
    __name__, "schedule", LearningRateSchedule, given=("base_lr", "epochs", "steps_per_epoch", "warmup_epochs")
)
