"""Early stop against a plain count, over resumes at any evaluation, and its sentences."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.train.early_stop import EarlyStop, Stagnation
from hpctrain.train.snapshot import Position

VALUES = st.one_of(st.integers(0, 8).map(lambda eighths: eighths / 8), st.just(math.nan), st.just(math.inf))


def _epochs_trained(values: list[float], patience: int, min_delta: float, sign: int) -> int:
    """The definition: the first epoch that ends a stretch of `patience` without one that is better than all that counted."""
    best, since = -math.inf, 0
    for epoch, value in enumerate(values, 1):
        if math.isfinite(value) and sign * value > best + min_delta:
            best, since = sign * value, epoch
        if epoch - since >= patience:
            return epoch
    return len(values)


@given(st.lists(VALUES, min_size=1, max_size=12), st.integers(1, 4), st.sampled_from([0.0, 0.125]), st.booleans(), st.data())
def test_it_ends_where_the_definition_does_whatever_is_resumed(
    values: list[float], patience: int, min_delta: float, of_loss: bool, data: st.DataObject
) -> None:
    metric = "ema_loss" if of_loss else "top5"
    rule = EarlyStop(metric, patience, min_delta)
    position = Position()
    for epoch, value in enumerate(values, 1):
        position.epoch = epoch
        position.stagnation = rule.after(position.stagnation, epoch, {metric: value, "top1": 0.0})
        if data.draw(st.booleans()):  # as a run that goes on from here, and evaluates again
            position = Position.from_meta({"position": position.to_meta()})
            position.stagnation = rule.after(position.stagnation, epoch, {metric: 1.0 - value})
        if rule.ends(position.stagnation):
            break
    assert position.epoch == _epochs_trained(values, patience, min_delta, -1 if of_loss else 1)


def test_a_run_without_it_has_nothing_of_it_in_its_checkpoints() -> None:
    assert "stagnation" not in Position(epoch=2).to_meta()


def test_another_metric_begins_to_count_and_another_patience_goes_on() -> None:
    before = Stagnation("top1", 0.5, 1, 3, 2)
    assert EarlyStop("top1", 2).ends(before)
    assert not EarlyStop("top1", 3).ends(before)
    assert not EarlyStop("loss", 1).ends(before)
    assert EarlyStop("loss", 1).after(before, 4, {"loss": 2.0}) == Stagnation("loss", 2.0, 4, 4)


@pytest.mark.parametrize(
    ("rule", "state", "sentence"),
    [
        (
            EarlyStop("top1", 2, 0.5),
            Stagnation("top1", 0.5, 1, 3, 2),
            "early stop after epoch 3: 2 evaluations since epoch 1 with top1 50.00% brought none that is better by more than 0.5",
        ),
        (
            EarlyStop("loss", 1),
            Stagnation("loss", 0.25, 4, 5, 1),
            "early stop after epoch 5: 1 evaluation since epoch 4 with loss 0.2500 brought none that is better",
        ),
        (EarlyStop("loss", 1), Stagnation("loss", None, 0, 1, 1), "early stop after epoch 1: 1 evaluation had no finite loss"),
    ],
)
def test_it_says_why(rule: EarlyStop, state: Stagnation, sentence: str) -> None:
    assert rule.sentence(state) == sentence
