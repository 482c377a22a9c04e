"""Averaging that cannot keep an order of sums is refused, with a sentence that names what can."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.averaging.strategy import PlannedGroup
from hpctrain.errors import ConfigError, OptionError
from hpctrain.experiment.averager import make_strategy
from hpctrain.nn.parameter import GroupLayout


def _group(shards: int | None = 8, **facts: Any) -> PlannedGroup:
    return PlannedGroup(GroupLayout({}), 2, shards=shards, **facts)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sharded", {}),
        ("sharded", {"fc_exchange": "never", "bucket_bytes": 100, "two_level": True}),
        ("priority", {}),
        ("bucketed", {}),
        ("overlap", {}),
        ("blocking", {}),
    ],
)
def test_what_sums_gradients_is_taken(name: str, options: dict[str, Any]) -> None:
    make_strategy(name, options, _group())


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("lazy", {}, "averager lazy does not add up the gradients of each step"),
        ("sparse", {}, "averager sparse does not add up the gradients of each step"),
        ("sharded", {"wire": "bfloat16"}, "wire is bfloat16"),
        ("bucketed", {"wire": "float16"}, "wire is float16"),
        ("sharded", {"wire_parameters": "float16"}, "wire_parameters is float16"),
        ("sharded", {"fc_exchange": "always"}, "fc_exchange is always"),
    ],
)
def test_what_does_not_is_refused_with_shards_only(name: str, options: dict[str, Any], words: str) -> None:
    make_strategy(name, options, _group(None, nodes=(0, 1)))
    with pytest.raises(ConfigError, match=words) as caught:
        make_strategy(name, options, _group(nodes=(0, 1)))
    if options:
        assert isinstance(caught.value, OptionError)
        assert caught.value.option in options


def test_sums_have_one_level() -> None:
    assert make_strategy("sharded", {}, _group(None, nodes=(0, 0))).levels is None
    group = PlannedGroup(GroupLayout({}), 4, nodes=(0, 0, 1, 1))
    assert make_strategy("sharded", {}, group).levels is not None
    assert make_strategy("sharded", {}, PlannedGroup(GroupLayout({}), 4, nodes=(0, 0, 1, 1), shards=8)).levels is None


def test_a_stored_schedule_is_one_of_as_many_shards() -> None:
    requests = [make_strategy(name, {}, _group(shards)).request() for name in ("sharded", "bucketed") for shards in (None, 8, 4)]
    assert len(set(requests)) == 6
