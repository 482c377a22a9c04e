"""Slices cover a group exactly once, in forward order, and every rank computes the same parts."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.averaging.slices import Slice, cut, fused, layer_slices, per_parameter, sufficient_factor_slices
from hpctrain.boxes import even
from hpctrain.errors import ConfigError
from hpctrain.nn.parameter import FlatGroup, GroupLayout, ParameterSpec

sizes = st.lists(st.integers(0, 40), min_size=1, max_size=12)


def _group(lengths: list[int]) -> FlatGroup:
    specs = {f"l{i}.weight": ParameterSpec((n,), lambda random, shape: np.zeros(shape)) for i, n in enumerate(lengths)}
    return FlatGroup(specs, "float32")


def _check_cover(group: FlatGroup, slices: tuple[Slice, ...]) -> None:
    assert sum(each.size for each in slices) == group.size
    assert all(a.stop == b.start and a.order <= b.order for a, b in pairwise(slices))
    for each in slices:
        assert each.size
        inside = group.covering(each.start, each.stop)
        assert each.parameters == tuple(segment.parameter for segment in inside)
        assert each.order == inside[0].order


@given(sizes)
def test_a_slice_a_parameter(lengths: list[int]) -> None:
    group = _group(lengths)
    slices = per_parameter(group)
    _check_cover(group, slices)
    assert len(slices) == sum(length > 0 for length in lengths)


@given(sizes, st.integers(1, 100))
def test_only_the_front_most_fused_slice_may_be_small(lengths: list[int], least: int) -> None:
    group = _group(lengths)
    slices = fused(group, least)
    _check_cover(group, slices)
    assert all(each.size >= least for each in slices[1:])
    for each in slices:  # without its front-most parameter it would have been too small
        assert each.size - group.segment(each.parameters[0]).size < least


@given(sizes, st.integers(1, 60), st.integers(1, 30))
def test_cutting_keeps_elements_and_order(lengths: list[int], least: int, most: int) -> None:
    group = _group(lengths)
    pieces = cut(group, fused(group, least), most)
    _check_cover(group, pieces)
    assert all(each.size <= most for each in pieces)
    assert len({each.name for each in pieces}) == len(pieces)


@given(sizes, st.integers(1, 30), st.sets(st.integers(0, 11)))
def test_what_is_left_out_is_neither_in_a_slice_nor_spanned(lengths: list[int], least: int, out: set[int]) -> None:
    group = _group(lengths)
    names = {f"l{i}.weight" for i in out if i < len(lengths)}
    slices = fused(group, least, names)
    covered = {i for each in slices for i in range(each.start, each.stop)}
    left = {i for name in names for i in range(group.segment(name).start, group.segment(name).stop)}
    assert covered | left == set(range(group.size))
    assert not covered & left


@given(st.integers(0, 500), st.integers(1, 9), st.integers(1, 17))
def test_parts_lie_in_rank_order_and_hold_whole_units(units: int, unit: int, ranks: int) -> None:
    each = Slice("x", 10, 10 + units * unit, 0, ("x",), unit)
    parts = [each.part(rank, ranks) for rank in range(ranks)]
    assert parts[0][0] == each.start
    assert parts[-1][1] == each.stop
    assert all(a[1] == b[0] for a, b in pairwise(parts))
    assert tuple(end - begin for begin, end in parts) == each.counts(ranks)
    assert all((end - begin) % unit == 0 for begin, end in parts)


def test_a_linear_layer_is_split_by_rows() -> None:
    specs = {name: ParameterSpec(shape, lambda random, shape: np.zeros(shape)) for name, shape in (("w", (5, 3)), ("b", (3,)))}
    (each,) = sufficient_factor_slices(FlatGroup(specs, "float32"), "w", ("b",), 2, 1)
    assert each.counts(2) == (9, 6)
    assert each.counts(7) == (3, 3, 3, 3, 3, 0, 0)
    assert each.replicated == ("b",)


@given(st.integers(1, 900), st.integers(1, 5), st.integers(1, 7), st.integers(1, 3000))
def test_a_linear_layer_in_slices_leaves_each_rank_as_many_rows(inputs: int, outputs: int, ranks: int, most: int) -> None:
    shapes = {"before": (3,), "w": (inputs, outputs), "b": (outputs,)}
    group = FlatGroup({name: ParameterSpec(shape, lambda random, shape: np.zeros(shape)) for name, shape in shapes.items()})
    slices = sufficient_factor_slices(group, "w", ("b",), ranks, most)
    assert slices[0].start == 3
    assert slices[-1].stop == 3 + inputs * outputs
    assert all(a.stop == b.start for a, b in pairwise(slices))
    assert [sum(counts) for counts in zip(*(each.counts(ranks) for each in slices), strict=True)] == [
        outputs * rows for rows in even(inputs, ranks)
    ]
    for each in slices:
        assert each.size % outputs == 0
        assert each.size <= max(most, 33 * ranks * outputs) + ranks * outputs
    assert [each.replicated for each in slices] == [("b",)] + [()] * (len(slices) - 1)
    assert len({each.name for each in slices}) == len(slices)
    assert all(layer_slices(slices, k) == tuple(range(len(slices))) for k in range(len(slices)))


def test_more_slices_than_can_be_planned_are_refused() -> None:
    shapes = {"w": (1_000_000, 1_000_000)}
    layout = GroupLayout({name: ParameterSpec(shape, lambda random, shape: np.zeros(shape)) for name, shape in shapes.items()})
    with pytest.raises(ConfigError, match=r"w would travel in 1,000,000 slices, but the largest number is 10,000"):
        cut(layout, per_parameter(layout), 1_000_000)
    with pytest.raises(ConfigError, match=r"w would travel in \d+,\d+ slices"):
        sufficient_factor_slices(layout, "w", (), 1, 1_000_000)
    assert len(cut(layout, per_parameter(layout), 10**8)) == 10_000


@pytest.mark.parametrize("most", [1, 7])
def test_pieces_are_named_by_their_place(most: int) -> None:
    group = _group([4, 6])
    assert [each.name for each in cut(group, per_parameter(group), 4)] == ["l0.weight", "l1.weight[0:3]", "l1.weight[3:6]"]
    assert sum(each.size for each in cut(group, fused(group, 10), most)) == 10
