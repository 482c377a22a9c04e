"""The sections of a run about evaluations: when they are made, of which weights, and what follows from them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpctrain.config.values import Integer, Number, Section


class EvaluateConfig(Section):
    """Evaluation on the test file."""

    every_epochs: Integer = Field(
        default=1, ge=0, description="Number of epochs from one evaluation to the next; 0 switches them off."
    )
    batch: Integer | None = Field(
        default=None, ge=1, description="Global batch of the evaluation, in samples; null takes the training batch."
    )


class EmaConfig(Section):
    """The exponential moving average of the weights."""

    decay: Number | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Share of the average of weights that is kept in an update, in (0, 1), such as 0.999; null keeps no average.",
    )
    warm_up: bool = Field(
        default=True,
        description="Keep less of the average at first: (1 + t) / (10 + t) in the t-th update, as long as that is below decay.",
    )


class EarlyStopConfig(Section):
    """The end of a training whose evaluations do not get better."""

    patience: Integer | None = Field(
        default=None,
        ge=1,
        description="Number of evaluations, one after another, that bring no better value before training ends; null trains all "
        "epochs.",
    )
    metric: Literal["top1", "top5", "loss", "ema_top1", "ema_top5", "ema_loss"] = Field(
        default="top1",
        description="Measure of evaluations by which training ends early: a higher top1 or top5 is better, and a lower loss; "
        "ema_top1 and so on are those of the average of weights.",
    )
    min_delta: Number = Field(
        default=0.0, ge=0, description="Difference from the best value, beyond which an evaluation is better than it."
    )
