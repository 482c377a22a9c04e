"""Even splits, intervals and boxes: which elements of a tensor somebody holds, as index arithmetic without arrays.

An interval is (start, stop); a box is one interval per dimension, in the coordinates of the whole tensor. All even splits are
made here, so that two places that split the same things agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

Interval = tuple[int, int]
Box = tuple[Interval, ...]


def even(size: int, parts: int) -> tuple[int, ...]:
    """`size` things in `parts` parts whose sizes differ by at most 1, larger ones first; some may be empty."""
    small, longer = divmod(size, parts)
    return (small + 1,) * longer + (small,) * (parts - longer)


def even_intervals(size: int, parts: int) -> tuple[Interval, ...]:
    """The parts of `even` as neighbouring intervals."""
    return consecutive(even(size, parts))


def even_interval(size: int, parts: int, index: int) -> Interval:
    """One of `even_intervals`, in a time that does not depend on their number."""
    small, longer = divmod(size, parts)
    start = index * small + min(index, longer)
    return start, start + small + (index < longer)


def consecutive(counts: Sequence[int]) -> tuple[Interval, ...]:
    """Neighbouring intervals of the given lengths, from 0 on."""
    return tuple(pairwise(accumulate(counts, initial=0)))


def whole(shape: Sequence[int]) -> Box:
    """All elements of a tensor."""
    return tuple((0, size) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """Length of a box in every dimension; 0 where it is empty."""
    return tuple(max(0, stop - start) for start, stop in box)


def size_of(box: Box) -> int:
    """Number of elements of a box."""
    return math.prod(shape_of(box))


def intersect(a: Box, b: Box) -> Box | None:
    """The elements of both boxes; None where there are none."""
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def clip(box: Box, shape: Sequence[int]) -> Box:
    """The elements of a box that a tensor of that shape has; an empty box at the tensor's edge where there are none."""
    starts = [min(max(start, 0), size) for (start, _), size in zip(box, shape, strict=True)]
    stops = [min(stop, size) for (_, stop), size in zip(box, shape, strict=True)]
    return tuple((start, max(start, stop)) for start, stop in zip(starts, stops, strict=True))


def moved(box: Box, offsets: Sequence[int]) -> Box:
    """A box of the same shape elsewhere."""
    return tuple((start + offset, stop + offset) for (start, stop), offset in zip(box, offsets, strict=True))


def hull(boxes: Iterable[Box]) -> Box | None:
    """The smallest box that holds all of these; empty ones do not count, and None where there are no others."""
    intervals = list(zip(*(box for box in boxes if size_of(box)), strict=True))
    return tuple((min(start for start, _ in dim), max(stop for _, stop in dim)) for dim in intervals) or None


def replace_dim(box: Box, dim: int, interval: Interval) -> Box:
    """The same box with another interval in one dimension, which may be counted from the end (-1)."""
    dim %= len(box)
    return (*box[:dim], interval, *box[dim + 1 :])


def within(box: Box, origin: Box) -> Box:
    """`box` in the coordinates of an array that holds `origin`."""
    return tuple((start - first, stop - first) for (start, stop), (first, _) in zip(box, origin, strict=True))


def slices(box: Box) -> tuple[slice, ...]:
    """The index of a box in an array of NumPy."""
    return tuple(slice(*interval) for interval in box)


def relative(box: Box, origin: Box) -> tuple[slice, ...]:
    """Position of `box` in an array that holds `origin`."""
    return slices(within(box, origin))
