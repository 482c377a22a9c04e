"""Index arithmetic of boxes against sets of indices, and laws of the summation tree."""

from __future__ import annotations

import itertools
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.core.intervals import (
    Box,
    Interval,
    ShardsOfRank,
    TreeAddition,
    additions,
    children,
    clip,
    consecutive,
    cover,
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


def by_recursion(terms: np.ndarray, node: Interval) -> np.ndarray:
    """The definition of a node's sum."""
    if node[1] - node[0] == 1:
        return terms[node[0]]
    left, right = children(node)
    return by_recursion(terms, left) + by_recursion(terms, right)


def by_ranks(terms: np.ndarray, ranks: int) -> np.ndarray:
    """Each rank's own additions, then those of what is left."""
    left: list[np.ndarray] = []
    for rank in range(ranks):
        share = ShardsOfRank(rank, ranks, len(terms))
        own = terms[rank * share.count : (rank + 1) * share.count].copy()
        in_tree(own, share.additions)
        left += [own[place] for place in share.sums]
    sums = np.stack(left)
    in_tree(sums, ShardsOfRank(0, ranks, len(terms)).additions_of_ranks)
    return sums[0]


def in_tree(values: np.ndarray, steps: tuple[TreeAddition, ...]) -> None:
    for step in steps:
        values[step.left] += values[step.right]


def from_left_to_right(values: np.ndarray) -> None:
    """A plain sum, into the first place."""
    for value in values[1:]:
        values[0] += value


def noise(shards: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    exponents = random.integers(-6, 7, (shards, 40))
    return (random.standard_normal((shards, 40)) * 10.0**exponents).astype(np.float32)


def divisors(number: int) -> list[int]:
    return [ranks for ranks in range(1, number + 1) if number % ranks == 0]


@given(st.integers(1, 48), st.integers(0, 1000))
def test_any_ranks_have_the_bits_of_one(shards: int, seed: int) -> None:
    terms = noise(shards, seed)
    expected = by_recursion(terms, (0, shards))
    for ranks in divisors(shards):
        assert by_ranks(terms, ranks).tobytes() == expected.tobytes(), f"{shards} shards on {ranks} ranks"


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_plain_sum_has_other_bits_on_other_ranks(ranks: int) -> None:
    """The law above can fail: here ranks add up their terms from left to right, and then their sums."""
    terms = noise(8, 3)
    alone = terms.copy()
    from_left_to_right(alone)
    shares = [share.copy() for share in np.split(terms, ranks)]
    for share in shares:
        from_left_to_right(share)
    sums = np.stack([share[0] for share in shares])
    from_left_to_right(sums)
    assert sums[0].tobytes() != alone[0].tobytes()


@given(st.integers(1, 60), st.data())
def test_a_cover_is_made_of_nodes_and_of_no_two_that_make_a_larger_one(size: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, size))
    nodes = cover((start, stop), size)
    assert nodes[0][0] == start
    assert nodes[-1][1] == stop
    assert all(before[1] == after[0] for before, after in pairwise(nodes))
    assert additions(nodes, size) == ()
    leaves = [(term, term + 1) for term in range(start, stop)]
    left = set(range(len(leaves))) - {step.right for step in additions(leaves, size)}
    assert [leaves[place][0] for place in sorted(left)] == [node[0] for node in nodes]


@given(st.integers(1, 64))
def test_an_addition_comes_with_the_last_term_that_it_needs(size: int) -> None:
    leaves = [(term, term + 1) for term in range(size)]
    steps = additions(leaves, size)
    assert len(steps) == size - 1
    assert [step.last for step in steps] == sorted(step.last for step in steps)
    covers = {place: leaves[place] for place in range(size)}
    for step in steps:
        left, right = covers[step.left], covers[step.right]
        assert left[1] == right[0]
        assert right[1] == step.last + 1
        covers[step.left] = left[0], right[1]
    assert covers[0] == (0, size)


@pytest.mark.parametrize(("shards", "ranks"), [(8, 1), (8, 2), (8, 4), (8, 8), (6, 3), (12, 3), (12, 6), (24, 3), (96, 48)])
def test_ranks_of_a_power_of_two_of_shards_have_one_sum(shards: int, ranks: int) -> None:
    assert ShardsOfRank(0, ranks, shards).sums_of_ranks == (1,) * ranks


@given(st.integers(1, 200))
def test_ranks_have_few_sums(shards: int) -> None:
    for ranks in divisors(shards):
        share = ShardsOfRank(0, ranks, shards)
        assert max(share.sums_of_ranks) <= max(1, 2 * share.count.bit_length() - 2)


@given(st.integers(0, 500), st.integers(1, 40))
def test_a_ranks_samples_fall_into_its_shards_by_an_even_split(samples: int, shards: int) -> None:
    """A step splits a rank's share evenly, which results in the sizes of its shards again."""
    sizes = even(samples, shards)
    for ranks in divisors(shards):
        count = shards // ranks
        for rank in range(ranks):
            own = sizes[rank * count : (rank + 1) * count]
            assert even(sum(own), count) == own
