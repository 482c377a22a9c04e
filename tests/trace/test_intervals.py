"""Interval arithmetic against counting instants one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.trace import intervals
from hpctrain.trace.intervals import Intervals

SPAN = 60
PAIRS = st.lists(st.tuples(st.integers(0, SPAN), st.integers(0, SPAN)).map(sorted), max_size=12)


def _arrays(pairs: list[list[int]]) -> Intervals:
    table = np.array(pairs, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _instants(pairs: Intervals) -> set[int]:
    return {instant for start, stop in zip(*pairs, strict=True) for instant in range(start, stop)}


@given(PAIRS)
def test_a_union_has_the_same_instants_and_no_overlap(pairs: list[list[int]]) -> None:
    found = intervals.union(*_arrays(pairs))
    assert _instants(found) == _instants(_arrays(pairs))
    assert intervals.length(found) == len(_instants(found))
    assert np.all(found[0][1:] > found[1][:-1])


@given(PAIRS, PAIRS)
def test_common_length_and_clipping_count_shared_instants(a: list[list[int]], b: list[list[int]]) -> None:
    ours, theirs = intervals.union(*_arrays(a)), intervals.union(*_arrays(b))
    shared = _instants(ours) & _instants(theirs)
    assert intervals.common(ours, theirs) == len(shared)
    clipped = intervals.clip(ours, theirs)
    assert _instants(clipped) == shared
    assert intervals.length(clipped) == len(shared)


@st.composite
def _calls(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Nested intervals, as calls make them: any number inside of each other and one after another, in any order."""
    made: list[tuple[int, int]] = []

    def fill(low: int, high: int, depth: int) -> None:
        at = low
        while high - at >= 1 and depth < 4 and draw(st.booleans()):
            start = draw(st.integers(at, high - 1))
            stop = draw(st.integers(start + 1, high))
            made.append((start, stop))
            fill(start, stop, depth + 1)
            at = stop

    fill(0, SPAN, 0)
    return draw(st.permutations(made))


@given(_calls())
def test_every_instant_belongs_to_the_innermost_call(calls: list[tuple[int, int]]) -> None:
    start, stop = _arrays([list(call) for call in calls])
    begin, end, owner = intervals.own_time(start, stop)
    assert np.all(begin < end)
    assert np.all(begin[1:] >= end[:-1])
    found = {instant: index for low, high, index in zip(begin, end, owner, strict=True) for instant in range(low, high)}
    assert found.keys() == _instants((start, stop))
    for instant, index in found.items():
        covering = [stop[k] - start[k] for k in range(len(calls)) if start[k] <= instant < stop[k]]
        assert stop[index] - start[index] == min(covering)


def test_nothing_has_no_length() -> None:
    empty = _arrays([])
    assert intervals.length(intervals.union(*empty)) == 0
    assert intervals.common(empty, _arrays([[0, 5]])) == 0
    assert len(intervals.own_time(*empty)[0]) == 0
