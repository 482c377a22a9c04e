"""Index arithmetic of boxes against sets of indices."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.parallel.boxes import (
    Box,
    balanced,
    consecutive,
    intersect,
    relative,
    replace_dim,
    shape_of,
    size_of,
    whole,
)

_INTERVALS = st.tuples(st.integers(-3, 6), st.integers(0, 5)).map(lambda pair: (pair[0], pair[0] + pair[1]))
_BOXES = st.tuples(_INTERVALS, _INTERVALS)


def _elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(start, stop) for start, stop in box)))


@given(st.integers(0, 60), st.integers(1, 9))
def test_balanced_parts_follow_each_other_and_differ_by_at_most_one(size: int, parts: int) -> None:
    found = balanced(size, parts)
    assert len(found) == parts
    assert [i for start, stop in found for i in range(start, stop)] == list(range(size))
    lengths = [stop - start for start, stop in found]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


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


def test_a_dim_can_be_named_from_the_end() -> None:
    assert replace_dim(whole((2, 3, 4)), -1, (1, 2)) == ((0, 2), (0, 3), (1, 2))
    assert replace_dim(whole((2, 3, 4)), 0, (1, 1)) == ((1, 1), (0, 3), (0, 4))
