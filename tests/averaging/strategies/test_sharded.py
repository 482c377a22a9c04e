"""Sharded averaging: the words that stored schedules know it by, its slices and its streams."""

from __future__ import annotations

import pytest

from hpctrain.averaging.collective_schedule import OperationKind, Stream
from hpctrain.averaging.strategies.sharded import Sharded, ShardedOptions
from hpctrain.errors import OptionError
from tests.support.averaging import make_group, planned


def test_words_are_those_of_schedules_that_earlier_versions_stored() -> None:
    for options, words in (
        ({}, "sharded, bucket_bytes None, replan True, window None"),
        ({"bucket_bytes": 700, "replan": False, "window": 3}, "sharded, bucket_bytes 700, replan False, window 3"),
        ({"sizes": "measured"}, "sharded, bucket_bytes None, replan True, window None, sizes measured"),
    ):
        strategy = planned(Sharded, make_group(), 4, nodes=(0, 0, 1, 1), **options)
        assert strategy.request() == f"{words}; parameters e81c09d87a9c6ae0; 2 nodes of 2"


@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
def test_small_layers_are_fused_and_large_ones_cut(bucket_bytes: int) -> None:
    group = make_group()
    schedule = planned(Sharded, group, 3, bucket_bytes=bucket_bytes, window=5).plan(None)
    assert schedule is not None
    assert schedule.window == 5
    least = max(1, bucket_bytes // group.item_bytes)
    assert all(piece.size <= 4 * least for piece in schedule.slices if len(piece.parameters) == 1)
    assert sum(piece.size < least for piece in schedule.slices if "[" not in piece.name) <= 1
    for operation in schedule.operations:
        assert (operation.stream is Stream.PARAMETERS) == (operation.kind is OperationKind.ALLGATHER)


@pytest.mark.parametrize("option", ["bucket_bytes", "window"])
def test_values_below_one_are_refused(option: str) -> None:
    with pytest.raises(OptionError, match=f"{option} is 0") as caught:
        ShardedOptions(**{option: 0})
    assert caught.value.option == option
