"""Bucketed averaging: the words that stored schedules know it by, and its buckets."""

from __future__ import annotations

import pytest

from hpctrain.averaging.strategies.bucketed import Bucketed, BucketedOptions
from hpctrain.errors import OptionError
from tests.support.averaging import make_group, planned


def test_words_are_those_of_schedules_that_earlier_versions_stored() -> None:
    for options, words in (
        ({}, "bucketed, bucket_bytes None; parameters "),
        ({"bucket_bytes": 4096}, "bucketed, bucket_bytes 4096; parameters "),
        ({"sizes": "measured"}, "bucketed, bucket_bytes None, sizes measured; parameters "),
    ):
        assert (planned(Bucketed, make_group(), 4, **options).request() or "").startswith(words)


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
def test_all_buckets_but_the_first_have_the_least_size(bucket_bytes: int) -> None:
    group = make_group()
    schedule = planned(Bucketed, group, 3, bucket_bytes=bucket_bytes).plan(None)
    assert schedule is not None
    least = max(1, bucket_bytes // group.item_bytes)
    assert all(piece.size >= least for piece in schedule.slices[1:])
    assert sum(piece.size for piece in schedule.slices) == group.size


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(OptionError, match="bucket_bytes is 0, but must be at least 1"):
        BucketedOptions(bucket_bytes=0)
