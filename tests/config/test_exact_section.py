"""The section of the order of sums: a switch, or a number of shards."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from hpctrain.config.exact_section import DEFAULT_SHARDS, ExactConfig


@pytest.mark.parametrize(
    ("value", "shards"),
    [({}, None), (False, None), (True, DEFAULT_SHARDS), ({"shards": 12}, 12), ({"shards": None}, None), ({"shards": 1}, 1)],
)
def test_it_is_a_switch_or_a_mapping(value: Any, shards: int | None) -> None:
    assert ExactConfig.model_validate(value).shards == shards


@pytest.mark.parametrize("value", [{"shards": 0}, {"shards": True}, {"shards": 1.5}, {"shard": 8}, "sometimes", 8])
def test_what_is_neither_is_refused(value: Any) -> None:
    with pytest.raises(ValidationError):
        ExactConfig.model_validate(value)
