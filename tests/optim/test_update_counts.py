"""Updates are counted on every rank, whatever it owns, and go on from what was counted on others."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.nn.parameter import FlatGroup, ParameterSpec
from hpctrain.optim.update_counts import UpdateCounts

NAMES = ("a", "b", "c")


def _group(names: tuple[str, ...] = NAMES) -> FlatGroup:
    return FlatGroup({name: ParameterSpec((4,), lambda random, shape: np.zeros(shape)) for name in names})


@given(st.lists(st.sets(st.sampled_from(NAMES))), st.lists(st.sets(st.sampled_from(NAMES)), min_size=1))
def test_a_rank_that_goes_on_counts_as_one_that_owns_all(before: list[set[str]], after: list[set[str]]) -> None:
    """The first steps on a rank that owns nothing, and on one that owns all; then on owners of a part each."""
    group = _group()
    nothing, everything = UpdateCounts(group, ()), UpdateCounts(group, group.segments)
    for left_out in before:
        for counts in (nothing, everything):
            counts.begin_step(left_out)
        for segment in group.segments:
            if segment.parameter not in left_out:
                everything.count(segment)
    assert nothing.counters() == everything.counters()
    stored = json.loads(json.dumps(nothing.counters() | {"interval": 7}))
    part = UpdateCounts(group, [segment.part(1, 6) for segment in group.segments])
    part.load_counters(stored)
    for left_out in after:
        for counts in (everything, part):
            counts.begin_step(left_out)
        for segment in group.segments:
            piece = segment.part(1, 6)
            if segment.parameter not in left_out:
                number = everything.count(segment)
                assert not piece.size or part.count(piece) == number
    assert part.counters() == everything.counters()


def test_updates_may_come_in_a_later_step() -> None:
    group = _group()
    counts = UpdateCounts(group, group.segments)
    counts.begin_step(())
    counts.begin_step(())
    assert [counts.count(group.segments[0]), counts.count(group.segments[0])] == [1, 2]


def test_names_of_another_group_are_left_alone() -> None:
    counts = UpdateCounts(_group(("b",)), ())
    counts.load_counters({"updates": 3, "left_out/a": 2, "left_out/b": 1})
    assert counts.counters() == {"updates": 3, "left_out/b": 1}
    counts.load_counters({})
    assert counts.counters() == {"updates": 0}
