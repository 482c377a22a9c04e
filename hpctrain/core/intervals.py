"""Index arithmetic: boxes, even splits, and the fixed order in which a fixed number of terms is added.

Sums of floating-point numbers depend on the order of the additions. In a summation tree this order depends only on the number of
terms: a node of n terms is the sum of the node of its first 2^k terms (the largest power of 2 below n) and the node of the
remaining terms. Blocks of 2^k terms that begin at a multiple of 2^k are therefore nodes. If every rank has 2^k terms, in rank
order, each rank has one partial sum. With another number of terms, a rank has several partial sums, at most two for each doubling
of that number. A node is represented by the interval (start, stop) of its terms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

Interval = tuple[int, int]
Box = tuple[Interval, ...]


def even(size: int, parts: int) -> tuple[int, ...]:
    """Return the sizes of `parts` parts of `size` items. Sizes differ by at most 1, larger ones come first, and some may be 0."""
    small, longer = divmod(size, parts)
    return (small + 1,) * longer + (small,) * (parts - longer)


def even_intervals(size: int, parts: int) -> tuple[Interval, ...]:
    """Return the parts of `even` as consecutive intervals."""
    return consecutive(even(size, parts))


def even_interval(size: int, parts: int, index: int) -> Interval:
    """Return one interval of `even_intervals`, in time independent of the number of parts."""
    small, longer = divmod(size, parts)
    start = index * small + min(index, longer)
    return start, start + small + (index < longer)


def consecutive(counts: Sequence[int]) -> tuple[Interval, ...]:
    """Return consecutive intervals with the given lengths, starting at 0."""
    return tuple(pairwise(accumulate(counts, initial=0)))


def whole(shape: Sequence[int]) -> Box:
    """Return the box of all elements of a tensor."""
    return tuple((0, size) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the length of a box in every dimension; 0 in dimensions in which it is empty."""
    return tuple(max(0, stop - start) for start, stop in box)


def size_of(box: Box) -> int:
    """Return the number of elements of a box."""
    return math.prod(shape_of(box))


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def clip(box: Box, shape: Sequence[int]) -> Box:
    """Return the part of a box within a tensor of that shape; an empty box at the tensor's edge if there is none."""
    starts = [min(max(start, 0), size) for (start, _), size in zip(box, shape, strict=True)]
    stops = [min(stop, size) for (_, stop), size in zip(box, shape, strict=True)]
    return tuple((start, max(start, stop)) for start, stop in zip(starts, stops, strict=True))


def moved(box: Box, offsets: Sequence[int]) -> Box:
    """Return the box shifted by offsets."""
    return tuple((start + offset, stop + offset) for (start, stop), offset in zip(box, offsets, strict=True))


def hull(boxes: Iterable[Box]) -> Box | None:
    """Return the smallest box that contains all boxes, ignoring empty ones; None if all are empty."""
    intervals = list(zip(*(box for box in boxes if size_of(box)), strict=True))
    return tuple((min(start for start, _ in dim), max(stop for _, stop in dim)) for dim in intervals) or None


def replace_dim(box: Box, dim: int, interval: Interval) -> Box:
    """Return the box with another interval in one dimension. A negative dimension counts from the end."""
    dim %= len(box)
    return (*box[:dim], interval, *box[dim + 1 :])


def within(box: Box, origin: Box) -> Box:
    """Return `box` in the coordinates of an array that stores the box `origin`."""
    return tuple((start - first, stop - first) for (start, stop), (first, _) in zip(box, origin, strict=True))


def slices(box: Box) -> tuple[slice, ...]:
    """Return the NumPy index of a box."""
    return tuple(slice(*interval) for interval in box)


def relative(box: Box, origin: Box) -> tuple[slice, ...]:
    """Return the NumPy index of `box` in an array that stores the box `origin`."""
    return slices(within(box, origin))


@dataclass(frozen=True)
class TreeAddition:
    """Addition of two neighbouring nodes of a summation tree.

    Attributes:
        left, right: positions of the two nodes in the list of terms; the sum replaces the left one.
        last: position of the last term that the sum needs.
    """

    left: int
    right: int
    last: int


def children(node: Interval) -> tuple[Interval, Interval]:
    """Return the two children of a node of at least two terms; the node is their sum."""
    start, stop = node
    middle = start + (1 << (stop - start - 1).bit_length() - 1)
    return (start, middle), (middle, stop)


def cover(terms: Interval, size: int) -> tuple[Interval, ...]:
    """Return the largest nodes of a tree over `size` terms that together make up the interval `terms`, in order."""
    return tuple(_within((0, size), terms)) if size else ()


def _within(node: Interval, terms: Interval) -> Iterator[Interval]:
    if node[1] <= terms[0] or terms[1] <= node[0]:
        return
    if terms[0] <= node[0] and node[1] <= terms[1]:
        yield node
        return
    for child in children(node):
        yield from _within(child, terms)


def additions(nodes: Sequence[Interval], size: int) -> tuple[TreeAddition, ...]:
    """Return the additions of a tree over `size` terms that need only `nodes`, which are neighbours, each as early as possible.

    The sums that remain are the nodes of `cover`. Each is stored at the position of its first node in `nodes`.
    """
    steps: list[TreeAddition] = []
    if nodes:
        _add_up((0, size), {node: place for place, node in enumerate(nodes)}, (nodes[0][0], nodes[-1][1]), steps)
    return tuple(steps)


def _add_up(node: Interval, places: dict[Interval, int], terms: Interval, steps: list[TreeAddition]) -> tuple[int, int] | None:
    """Append the additions inside a node; return the positions of its sum and of its last part, or None if a part is missing."""
    if node in places:
        return places[node], places[node]
    if node[1] <= terms[0] or terms[1] <= node[0]:
        return None
    left, right = (_add_up(child, places, terms, steps) for child in children(node))
    if left is None or right is None:
        return None
    steps.append(TreeAddition(left[0], right[0], right[1]))
    return left[0], right[1]


@dataclass(frozen=True)
class ShardsOfRank:
    """The shards of one rank if `shards` shards are distributed evenly. Each shard is a term of all sums.

    Attributes:
        ranks: number of ranks, a divisor of `shards`.
    """

    rank: int
    ranks: int
    shards: int

    def __post_init__(self) -> None:
        assert self.shards % self.ranks == 0, f"{self.shards} shards on {self.ranks} ranks"

    @property
    def count(self) -> int:
        """Number of shards per rank."""
        return self.shards // self.ranks

    @property
    def leaves(self) -> tuple[Interval, ...]:
        """This rank's shards as nodes."""
        first = self.rank * self.count
        return tuple((shard, shard + 1) for shard in range(first, first + self.count))

    @property
    def additions(self) -> tuple[TreeAddition, ...]:
        """The additions that this rank makes without communication."""
        return additions(self.leaves, self.shards)

    @property
    def sums(self) -> tuple[int, ...]:
        """Positions among this rank's shards that hold its sums after `additions`, in order; one if its shards are a node."""
        first = self.rank * self.count
        return tuple(node[0] - first for node in self.of_rank(self.rank))

    def of_rank(self, rank: int) -> tuple[Interval, ...]:
        """Return the nodes whose sums a rank has after its additions."""
        return cover((rank * self.count, (rank + 1) * self.count), self.shards)

    @property
    def sums_of_ranks(self) -> tuple[int, ...]:
        """Number of sums that each rank has after its additions."""
        return tuple(len(self.of_rank(rank)) for rank in range(self.ranks))

    @property
    def additions_of_ranks(self) -> tuple[TreeAddition, ...]:
        """The additions that reduce the sums of all ranks, in rank order, to one sum."""
        return additions([node for rank in range(self.ranks) for node in self.of_rank(rank)], self.shards)
