"""Evaluations in a configuration: what is off by default, and measures that no evaluation would give."""

from __future__ import annotations

import pytest

from hpctrain.config.load import parse
from hpctrain.config.source import Source
from hpctrain.errors import ConfigError
from hpctrain.experiment.check import check_names

CONFIG = """
model: small
data: {train: train.h5, test: test.h5}
batch: 8
epochs: 6
optimizer: {name: sgd, lr: 0.1}
schedule: constant
"""


def _check(*overrides: str) -> None:
    config, source = parse(CONFIG, overrides=overrides)
    assert isinstance(source, Source)
    check_names(config, source)


def test_nothing_is_averaged_and_nothing_ends_early_by_default() -> None:
    config, _ = parse(CONFIG)
    assert (config.ema.decay, config.early_stop.patience, config.evaluate.every_epochs) == (None, None, 1)


@pytest.mark.parametrize(
    "overrides",
    [
        ("early_stop.patience=3", "early_stop.metric=loss"),
        ("ema.decay=0.99", "early_stop.patience=1", "early_stop.metric=ema_top1", "checkpoint.best=ema_loss"),
    ],
)
def test_what_evaluations_give_may_be_asked_for(overrides: tuple[str, ...]) -> None:
    _check(*overrides)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("checkpoint.best=ema_top1",), "checkpoint.best is ema_top1, but no average of weights is kept; set ema.decay"),
        (("early_stop.metric=ema_loss",), "early_stop.metric is ema_loss, .* or early_stop.metric to loss"),
        (("early_stop.patience=1", "data.test=null"), "early_stop.patience needs evaluations, but data.test is not set"),
        (("early_stop.patience=1", "evaluate.every_epochs=0"), "but evaluate.every_epochs is 0; the smallest value is 1"),
        (("early_stop.patience=0",), "early_stop.patience"),
        (("early_stop.min_delta=-0.1",), "early_stop.min_delta"),
        (("ema.decay=1",), "ema.decay"),
        (("ema.decay=0",), "ema.decay"),
    ],
)
def test_what_does_not_go_together_is_refused_with_its_place(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _check(*overrides)
