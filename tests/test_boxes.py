"""Index arithmetic of boxes against sets of indices."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.boxes import (
    Box,
    clip,
    consecutive,
    even,
    even_interval,
    even_intervals,
    hull,
    intersect,
    moved,
    relative,
    replace_dim,
    shape_of,
    size_of,
    slices,
    whole,
    within,
)

_INTERVALS = st.tuples(st.integers(-3, 6), st.integers(0, 5)).map(lambda pair: (pair[0], pair[0] + pair[1]))
_BOXES = st.tuples(_INTERVALS, _INTERVALS)


def _elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(start, stop) for start, stop in box)))


@given(st.integers(0, 1000), st.integers(1, 40))
def test_even_parts_follow_each_other_and_differ_by_at_most_one(size: int, parts: int) -> None:
    intervals = even_intervals(size, parts)
    lengths = even(size, parts)
    assert intervals == consecutive(lengths)
    assert len(lengths) == parts
    assert sum(lengths) == size
    assert max(lengths) - min(lengths) <= 1
    assert lengths == tuple(sorted(lengths, reverse=True))
    assert intervals == tuple(even_interval(size, parts, index) for index in range(parts))
    assert lengths == tuple(map(len, np.array_split(np.empty(size), parts)))


@given(st.lists(st.integers(0, 7), min_size=1, max_size=8))
def test_consecutive_intervals_have_the_given_lengths(counts: list[int]) -> None:
    found = consecutive(counts)
    assert [stop - start for start, stop in found] == counts
    assert [i for start, stop in found for i in range(start, stop)] == list(range(sum(counts)))


@given(_BOXES, _BOXES)
def test_an_intersection_holds_the_elements_of_both(a: Box, b: Box) -> None:
    common = intersect(a, b)
    assert (set() if common is None else _elements(common)) == _elements(a) & _elements(b)
    assert common is None or size_of(common) > 0
    assert common == intersect(b, a)


@given(_BOXES)
def test_size_and_shape_count_elements(box: Box) -> None:
    assert size_of(box) == len(_elements(box))
    assert size_of(whole(shape_of(box))) == size_of(box)


@given(_BOXES, _BOXES)
def test_relative_slices_find_the_elements(inner: Box, origin: Box) -> None:
    common = intersect(inner, origin)
    if common is not None:
        slices = relative(common, origin)
        rows, columns = (list(range(start, stop)) for start, stop in origin)
        assert set(itertools.product(rows[slices[0]], columns[slices[1]])) == _elements(common)


@given(_BOXES, _BOXES)
def test_a_box_within_another_is_the_index_of_its_elements(inner: Box, origin: Box) -> None:
    common = intersect(inner, origin)
    if common is not None:
        place = within(common, origin)
        assert slices(place) == relative(common, origin)
        assert shape_of(place) == shape_of(common)


def test_a_dim_can_be_named_from_the_end() -> None:
    assert replace_dim(whole((2, 3, 4)), -1, (1, 2)) == ((0, 2), (0, 3), (1, 2))
    assert replace_dim(whole((2, 3, 4)), 0, (1, 1)) == ((1, 1), (0, 3), (0, 4))


@given(_BOXES, st.integers(0, 5), st.integers(0, 5))
def test_a_clipped_box_holds_what_the_tensor_has(box: Box, rows: int, columns: int) -> None:
    clipped = clip(box, (rows, columns))
    assert _elements(clipped) == _elements(box) & _elements(whole((rows, columns)))
    assert all(0 <= start <= stop <= size for (start, stop), size in zip(clipped, (rows, columns), strict=True))
    assert clip(clipped, (rows, columns)) == clipped


@given(_BOXES, st.tuples(st.integers(-12, 12), st.integers(-12, 12)))
def test_a_moved_box_has_its_elements_moved(box: Box, offsets: tuple[int, int]) -> None:
    there = moved(box, offsets)
    assert _elements(there) == {(row + offsets[0], column + offsets[1]) for row, column in _elements(box)}
    assert shape_of(there) == shape_of(box)


@given(st.lists(_BOXES, max_size=4))
def test_a_hull_is_the_smallest_box_around_all(boxes: list[Box]) -> None:
    smallest = hull(boxes)
    elements = set().union(*map(_elements, boxes))
    assert (smallest is None) == (not elements)
    if smallest is not None:
        assert _elements(smallest) >= elements
        for dim in (0, 1):
            places = {element[dim] for element in elements}
            assert smallest[dim] == (min(places), max(places) + 1)
