"""Norms whose bits depend on no rank and on no size of slices: sums of squares of fixed blocks, added in one order.

The elements of a parameter that lie between two multiples of `BLOCK` in the flat buffers are one term, which one rank sums up
alone: parts of slices end at such multiples. The terms of a parameter are added in a tree (`summation_tree`): each rank adds what
it has, the places of others hold zeros, so that a sum over ranks changes nothing, and all ranks add the rest in the tree's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from hpctrain.core.intervals import Interval
from hpctrain.nn.parameter import FlatGroup, Segment
from hpctrain.optim.base import Norms
from hpctrain.summation_tree import TreeAddition, additions, cover

#: elements of a term; fewer cost more calls, more let ranks' parts differ more
BLOCK = 2048
_additions = lru_cache(maxsize=None)(additions)


class TreeNorms(Norms):
    """Squared norms of whole parameters, complete once the ranks' terms are summed and `complete` was called.

    Args:
        parts: of all ranks, the elements [start, stop) of the flat buffers that one of them adds up at once.
    """

    def __init__(self, group: FlatGroup, parts: Iterable[Interval]) -> None:
        super().__init__(group)
        nodes: list[set[Interval]] = [set() for _ in group.segments]
        for start, stop in parts:
            for segment in group.covering(start, stop):
                terms = _terms(group.segment(segment.parameter), segment)
                nodes[self.index[segment.parameter]].update(cover(terms, _count(group.segment(segment.parameter))))
        self._nodes = [tuple(sorted(of_one)) for of_one in nodes]
        self._sizes = [_count(segment) for segment in group.segments]
        self._first = np.cumsum([0, *map(len, self._nodes)])
        self._place = {(i, node): row for i, of_one in enumerate(self._nodes) for row, node in enumerate(of_one, self._first[i])}
        self._sums = np.zeros((int(self._first[-1]), 2), np.float64)

    def clear(self, places: slice) -> None:
        self.message(places)[...] = 0.0

    def add_partial(self, group: FlatGroup, segments: Sequence[Segment]) -> None:
        """Put the sums of the elements in `segments` into their places. Each segment lies within one of the parts, whole."""
        for segment in segments:
            if not segment.size:
                continue
            whole, position = group.segment(segment.parameter), self.index[segment.parameter]
            first, last = _terms(whole, segment)
            blocks = [(term, term + 1) for term in range(first, last)]
            views = [flat[slice(*_elements(whole, term))] for flat in (group.data, group.grad) for term, _ in blocks]
            values = group.arithmetic.square_sums(views).reshape(2, -1)
            steps = _additions(tuple(blocks), self._sizes[position])
            for column, terms in enumerate(values.tolist()):
                _add_up(terms, steps)
                for node in cover((first, last), self._sizes[position]):
                    self._sums[self._place[position, node], column] = terms[node[0] - first]

    def message(self, places: slice) -> np.ndarray:
        first, last, _ = places.indices(len(self._nodes))
        return self._sums[self._first[first] : self._first[last]]

    def complete(self, places: slice) -> None:
        for position in range(*places.indices(len(self._nodes))):
            nodes = self._nodes[position]
            rows = self._sums[self._first[position] : self._first[position + 1]]
            steps = _additions(nodes, self._sizes[position])
            for column in range(2):
                terms = rows[:, column].tolist()
                _add_up(terms, steps)
                self.squares[position, column] = terms[0] if terms else 0.0


def _add_up(terms: list[float], steps: Sequence[TreeAddition]) -> None:
    for step in steps:
        terms[step.left] += terms[step.right]


def _count(whole: Segment) -> int:
    """Terms of a parameter."""
    return -(-whole.stop // BLOCK) - whole.start // BLOCK if whole.size else 0


def _terms(whole: Segment, part: Segment) -> Interval:
    """The terms of a parameter that a part of it is made of."""
    first = whole.start // BLOCK
    assert part.start == whole.start or part.start % BLOCK == 0, f"{part} begins inside of a term"
    assert part.stop == whole.stop or part.stop % BLOCK == 0, f"{part} ends inside of a term"
    return part.start // BLOCK - first, -(-part.stop // BLOCK) - first


def _elements(whole: Segment, term: int) -> Interval:
    """The elements [start, stop) of the flat buffers in one term of a parameter."""
    start = (whole.start // BLOCK + term) * BLOCK
    return max(whole.start, start), min(whole.stop, start + BLOCK)
