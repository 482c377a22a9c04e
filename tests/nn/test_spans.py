"""Spans of a program's actions: each action in one, messages never inside one."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.nn.spans import backward_spans, forward_spans

NAMES = [f"p{i}" for i in range(8)]
Needs = list[list[str]]


@st.composite
def programs(draw: st.DrawFn) -> tuple[Needs, dict[str, list[int]]]:
    """Actions that use each parameter once, in order, and the slices of some parameters."""
    actions: Needs = [[] for _ in range(draw(st.integers(1, 12)))]
    places = sorted(draw(st.lists(st.integers(0, len(actions) - 1), min_size=len(NAMES), max_size=len(NAMES))))
    for name, place in zip(NAMES, places, strict=True):
        actions[place].append(name)
    carried = draw(st.lists(st.sampled_from(NAMES), unique=True))
    return actions, {name: draw(st.lists(st.integers(0, 4), min_size=1, max_size=2, unique=True)) for name in carried}


def _cover(spans: list[range], actions: Needs) -> None:
    assert [position for span in spans for position in span] == list(range(len(actions)))
    assert all(len(span) for span in spans)


@given(programs())
def test_a_forward_span_needs_no_slice_that_its_first_needing_action_does_not(
    program: tuple[Needs, dict[str, list[int]]],
) -> None:
    actions, slices = program
    spans = forward_spans(actions, slices)
    _cover(spans, actions)
    needed: set[int] = set()
    for span in spans:
        new = [{k for name in actions[position] for k in slices.get(name, ())} - needed for position in span]
        first = next((more for more in new if more), set())
        assert set().union(*new) == first
        needed |= first


@given(programs())
def test_a_backward_span_ends_where_slices_are_complete_and_only_there(program: tuple[Needs, dict[str, list[int]]]) -> None:
    actions, slices = program
    spans = backward_spans(actions, slices)
    _cover(spans, actions)
    last = {k: max(p for p, names in enumerate(actions) for n in names if k in slices.get(n, ())) for k in _all(slices)}
    assert {span[-1] for span in spans} == set(last.values()) | {len(actions) - 1}


def _all(slices: dict[str, list[int]]) -> set[int]:
    return {k for held in slices.values() for k in held}


@given(programs())
def test_without_messages_a_pass_is_one_span(program: tuple[Needs, dict[str, list[int]]]) -> None:
    actions, _ = program
    assert forward_spans(actions, {}) == backward_spans(actions, {}) == [range(len(actions))]


def test_an_empty_pass_has_no_span() -> None:
    assert forward_spans([], {}) == backward_spans([], {}) == []


def test_a_layer_a_slice_is_a_layer_a_span() -> None:
    actions = [[], ["p0"], [], ["p1"], ["p2"]]
    slices = {"p0": [0], "p1": [1], "p2": [2]}
    assert [list(span) for span in forward_spans(actions, slices)] == [[0, 1, 2], [3], [4]]
    assert [list(span) for span in backward_spans(actions[::-1], slices)] == [[0], [1], [2, 3], [4]]
    assert all(a.stop == b.start for a, b in pairwise(forward_spans(actions, slices)))
