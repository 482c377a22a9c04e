"""One order of additions for a fixed number of terms, wherever they are added: a binary tree over the terms, as pure data.

Sums of floating-point numbers depend on the order of the additions. Here it depends on the number of terms alone: a node of n
terms adds the node of its first 2^k terms, the most below n, to that of the rest. Blocks of 2^k terms that begin at a multiple of
2^k are nodes then, so ranks that have as many neighbouring terms each have one sum. Others have a few, at most two for each
doubling of their terms.

A node is the interval (start, stop) of its terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpctrain.core.intervals import Interval


@dataclass(frozen=True)
class TreeAddition:
    """Two neighbouring nodes become one.

    Attributes:
        left, right: positions of the nodes among those that are added up; the sum takes the place of the left one.
        last: position of the last one that the sum needs.
    """

    left: int
    right: int
    last: int


def children(node: Interval) -> tuple[Interval, Interval]:
    """The two nodes that a node of at least two terms is the sum of."""
    start, stop = node
    middle = start + (1 << (stop - start - 1).bit_length() - 1)
    return (start, middle), (middle, stop)


def cover(terms: Interval, size: int) -> tuple[Interval, ...]:
    """The largest nodes of a tree over `size` terms that make up some neighbouring ones, in order."""
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
    """The additions that neighbouring nodes allow of a tree over `size` terms, each as soon as its last node is there.

    The sums that are left, in the places of their first nodes, are those of `cover`.
    """
    steps: list[TreeAddition] = []
    if nodes:
        _add_up((0, size), {node: place for place, node in enumerate(nodes)}, (nodes[0][0], nodes[-1][1]), steps)
    return tuple(steps)


def _add_up(node: Interval, places: dict[Interval, int], terms: Interval, steps: list[TreeAddition]) -> tuple[int, int] | None:
    """Append the additions inside of a node; give the places of its sum and of its last part, None where a part is missing."""
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
    """The shards of one rank, where `shards` of them are shared out evenly; each is a term of all sums.

    Attributes:
        ranks: P, a divisor of `shards`.
    """

    rank: int
    ranks: int
    shards: int

    def __post_init__(self) -> None:
        assert self.shards % self.ranks == 0, f"{self.shards} shards on {self.ranks} ranks"

    @property
    def count(self) -> int:
        """Shards of each rank."""
        return self.shards // self.ranks

    @property
    def leaves(self) -> tuple[Interval, ...]:
        """This rank's shards, each a node."""
        first = self.rank * self.count
        return tuple((shard, shard + 1) for shard in range(first, first + self.count))

    @property
    def additions(self) -> tuple[TreeAddition, ...]:
        """Those that this rank makes by itself."""
        return additions(self.leaves, self.shards)

    @property
    def sums(self) -> tuple[int, ...]:
        """The places among its shards in which sums are left, in order: one, where the rank's shards are a node."""
        first = self.rank * self.count
        return tuple(node[0] - first for node in self.of_rank(self.rank))

    def of_rank(self, rank: int) -> tuple[Interval, ...]:
        """The nodes that are left on a rank."""
        return cover((rank * self.count, (rank + 1) * self.count), self.shards)

    @property
    def sums_of_ranks(self) -> tuple[int, ...]:
        """The number of sums that are left on each rank."""
        return tuple(len(self.of_rank(rank)) for rank in range(self.ranks))

    @property
    def additions_of_ranks(self) -> tuple[TreeAddition, ...]:
        """Those that make one sum of what is left on all ranks, in rank order."""
        return additions([node for rank in range(self.ranks) for node in self.of_rank(rank)], self.shards)
