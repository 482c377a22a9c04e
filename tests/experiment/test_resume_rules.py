"""Rules of a resume: every key has one, every change is seen, and each is allowed or refused as its rule says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from hpctrain.config.dump import dump
from hpctrain.config.load import parse
from hpctrain.config.schema import Config
from hpctrain.config.section import Named
from hpctrain.errors import CheckpointError
from hpctrain.experiment.options import defaults, filled
from hpctrain.experiment.resume_rules import RULES, Change, When, changes, check, flat, rule_for

CONFIG = """
model: {name: small, channels: [4, 6]}
data: {train: train.h5, augment: [flip]}
batch: 8
epochs: 6
optimizer: {name: sgd, lr: 0.1}
schedule: constant
"""


def _flat(*overrides: str) -> dict[str, Any]:
    return flat(yaml.safe_load(dump(parse(CONFIG, overrides=overrides)[0])))


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key that a configuration may have."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys(kind, f"{prefix}{name}.")
            if issubclass(kind, Named):
                yield f"{prefix}{name}"
                yield f"{prefix}{name}.some_option"
        else:
            yield f"{prefix}{name}"


def test_every_key_has_a_rule_and_every_rule_a_key():
    keys = [*_keys(Config), "plan.features.*", "ranks", "images", "labels", "classes", "code.own.py:Net"]
    rules = {rule_for(key) for key in keys}
    unused = {rule.pattern for rule in RULES if rule not in rules}
    # Of names with and without sections only one of the two patterns is ever needed.
    assert all(pattern.removesuffix(".*") in {key.split(".")[0] for key in keys} for pattern in unused)
    assert {rule.when for rule in rules} == set(When)


WHEN = {
    When.ALWAYS: [
        *("name=b", "output=b", "batch=5", "micro_batches=2", "epochs=9", "threads=1", "backend=numpy", "progress=test"),
        *("grid.rows=2", "plan.default=domain", "plan={'stage1.*': model}", "averager=lazy", "averager.bucket_bytes=9"),
        *("schedule=cosine", "schedule.warmup_epochs=1", "optimizer.lr=0.2", "optimizer.momentum=0.5", "data.prefetch=0"),
        *("data.test=b.h5", "data.train=moved.h5", "checkpoint.keep=3", "metrics.tensorboard=true", "deadline_seconds=9"),
        *("batch_norm.statistics=synchronised", "trace=true", "evaluate.batch=3", "data.cache=false", "data.threads=3"),
    ],
    When.BETWEEN_EPOCHS: ["seed=1", "data.augment=[]", "data.augment.0.probability=0.1", "loss.label_smoothing=0.1"],
    When.NEVER: [
        *("model.channels=[4, 7]", "model.hidden=5", "model=resnet20", "dtype=float64", "data.normalise=false"),
        *("batch_norm.epsilon=0.1", "optimizer={name: lars, lr: 0.1}"),
    ],
}


@pytest.mark.parametrize(("when", "override"), [(when, override) for when, overrides in WHEN.items() for override in overrides])
def test_each_class_of_changes(when: When, override: str):
    (change,) = changes(_flat(), _flat(override))
    for between_epochs in (True, False):
        allowed = when is When.ALWAYS or (when is When.BETWEEN_EPOCHS and between_epochs)
        if allowed:
            check([change], between_epochs=between_epochs, begun_epochs=3, place="x.h5")
            continue
        with pytest.raises(CheckpointError) as refused:
            check([change], between_epochs=between_epochs, begun_epochs=3, place="x.h5")
        assert str(change) in str(refused.value)


def test_fewer_epochs_than_are_begun_are_refused_and_fewer_than_planned_are_not():
    check(changes(_flat(), _flat("epochs=3")), between_epochs=False, begun_epochs=3, place="x.h5")
    with pytest.raises(CheckpointError, match=r"epochs: 6 -> 2 \(the smallest value is 3"):
        check(changes(_flat(), _flat("epochs=2")), between_epochs=True, begun_epochs=3, place="x.h5")


@pytest.mark.parametrize("way", [1, -1])
def test_momentum_may_become_another_but_neither_come_nor_go(way: int):
    differences = changes(*(_flat("optimizer.momentum=0.9"), _flat("optimizer.momentum=0"))[::way])
    with pytest.raises(CheckpointError, match=r"optimizer\.momentum: .* \(may not change from or to 0: "):
        check(differences, between_epochs=True, begun_epochs=1, place="x.h5")


def test_all_that_is_in_the_way_is_in_one_message():
    differences = changes(_flat(), _flat("seed=1", "batch=5", "model.channels=[9]", "dtype=float64"))
    with pytest.raises(CheckpointError) as refused:
        check(differences, between_epochs=False, begun_epochs=1, place="x.h5")
    for words in ("seed: 0 -> 1", "model.channels: [4, 6] -> [9]", "dtype: float32 -> float64", "x.h5"):
        assert words in str(refused.value)
    assert "batch" not in str(refused.value)


@pytest.mark.parametrize("more", [(), ("averager=lazy", "optimizer={name: lars, lr: 1}", "schedule=cosine", "model=resnet20")])
def test_a_default_that_is_written_out_is_no_change(more: tuple[str, ...]):
    config, _ = parse(CONFIG, overrides=more)
    short, full = (flat(yaml.safe_load(dump(each))) for each in (config, filled(config)))
    del short["data.augment"], full["data.augment"]  # a list, compared as a whole
    assert len(full) > len(short)
    assert changes(short, full, defaults(config)) == ()
    assert changes(full, short, defaults(config)) == ()


def test_options_of_something_else_are_not_compared_one_by_one():
    assert changes(_flat("schedule={name: step, milestones_epochs: [1]}"), _flat("schedule=cosine")) == (
        Change("schedule", "step", "cosine"),
    )


leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.lists(st.integers()))


@given(st.dictionaries(st.sampled_from("abcdef"), leaves), st.dictionaries(st.sampled_from("abcdef"), leaves))
def test_the_changes_lead_from_the_one_to_the_other(old: dict[str, Any], new: dict[str, Any]):
    found = changes(old, new)
    assert {**dict.fromkeys(new), **old, **{change.key: change.new for change in found}} == {
        **dict.fromkeys(old),
        **new,
    }
    assert all(change.old != change.new for change in found)
    assert all("\n" not in str(change) for change in found)
