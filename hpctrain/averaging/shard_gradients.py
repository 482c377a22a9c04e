"""Gradients of a rank's shards, added up in the order of a tree, so that sums do not depend on the number of ranks."""

from __future__ import annotations

from hpctrain.comm.base import Array
from hpctrain.nn.parameter import FlatGroup, Parameter
from hpctrain.summation_tree import ShardsOfRank, TreeAddition


class ShardGradients:
    """The sums of one group's gradients over the shards of this rank, whose backward passes follow one another.

    As in a binary counter, sums of equal numbers of shards become one as soon as there are two, so there are as many buffers as
    a number has digits. The last shard's gradient stays where it is, in the group's own buffer, and takes the sums before it
    parameter by parameter. What no node of the tree holds together is left as several terms, which ranks send one by one.

    Each `add` comes after the step's first forward, which waits for what the step before has sent: buffers are free then.

    Args:
        group: the parameters. shards: those of this rank among the ranks that average the group.

    Attributes:
        shards: as given.
    """

    def __init__(self, group: FlatGroup, shards: ShardsOfRank) -> None:
        self.shards = shards
        self._group = group
        self._after: list[list[TreeAddition]] = [[] for _ in range(shards.count)]
        for step in shards.additions:
            self._after[step.last].append(step)
        self._kept = shards.sums[:-1]
        self._buffers: dict[int, Array] = {}  # by place of the first shard, what has been added up
        self._free = [group.arithmetic.zeros(group.size, group.dtype) for _ in range(self._most_buffers())]
        self._added = 0

    def _most_buffers(self) -> int:
        """Buffers that are in use at once; the last shard needs none."""
        in_use = most = 0
        for place in range(self.shards.count - 1):
            in_use += 1 - len(self._after[place])
            most = max(most, in_use)
        return most

    def start(self) -> None:
        """A step begins: nothing is added up. Sums of the step before, which may not have been posted yet, stay till `add`."""
        self._added = 0

    def add(self) -> None:
        """A shard that is not the last has its gradient in the group's buffer."""
        arithmetic, place = self._group.arithmetic, self._added
        if place == 0:
            self._free += self._buffers.values()
            self._buffers.clear()
        self._added += 1
        value = self._group.grad
        for step in self._after[place]:
            left = self._buffers[step.left]
            arithmetic.add(left, value)
            if step.right != place:
                self._free.append(self._buffers.pop(step.right))
            value = left
        if not self._after[place]:
            self._buffers[place] = self._free.pop()
            arithmetic.copy(self._buffers[place], value)

    def complete(self, parameter: Parameter) -> None:
        """The gradient of one parameter takes what was added up before the last shard; once per step, in its backward."""
        assert self._added == self.shards.count - 1, "a shard is missing"
        segment = self._group.segment(parameter.name)
        for step in self._after[-1]:
            self._group.arithmetic.add(parameter.grad.reshape(-1), self._buffers[step.left][segment.start : segment.stop])

    def terms(self, start: int, stop: int) -> Array | tuple[Array, ...]:
        """Elements [start, stop) of this rank's terms of the sums over ranks: one array, or several in the tree's order."""
        last = self._group.grad[start:stop]
        if not self._kept:
            return last
        return (*(self._buffers[place][start:stop] for place in self._kept), last)
