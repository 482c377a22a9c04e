"""Gradients of a rank's shards, added up in the order of a tree, so that sums do not depend on the number of ranks."""

from __future__ import annotations

from hpctrain.comm.base import Array
from hpctrain.nn.parameter import FlatGroup, Parameter
from hpctrain.summation_tree import ShardsOfRank, TreeAddition


class ShardGradients:
    """The sums of one group's gradients over the shards of this rank, added up parameter by parameter.

    As in a binary counter, sums of equal numbers of shards become one as soon as there are two, so there are as many buffers as
    a number has digits. The last shard's gradient stays where it is, in the group's own buffer, and takes the sums before it.
    What no node of the tree holds together is left as several terms, which ranks send one by one.

    Each `add` comes after the step's first forward, which waits for what the step before has sent: buffers are free then, and
    keep its sums until then, as their message may still have to be posted.

    Args:
        group: the parameters. shards: those of this rank among the ranks that average the group.
        homes: gradients are written where `home` says, so that what waits need not be copied.

    Attributes:
        shards: as given.
    """

    def __init__(self, group: FlatGroup, shards: ShardsOfRank, *, homes: bool = False) -> None:
        self.shards = shards
        self._homes = homes
        self._group = group
        self._after: list[list[TreeAddition]] = [[] for _ in range(shards.count)]
        for step in shards.additions:
            self._after[step.last].append(step)
        self._kept = shards.sums[:-1]
        self._number_of = self._places()
        buffers = 1 + max(self._number_of.values(), default=-1)
        self._buffers = [group.arithmetic.zeros(group.size, group.dtype) for _ in range(buffers)]
        self._added = dict.fromkeys(group.parameters, 0)

    def _places(self) -> dict[int, int]:
        """By the place of a shard whose sum waits for others, the number of the buffer that it waits in: the first free one."""
        numbers: dict[int, int] = {}
        taken: set[int] = set()
        for place in range(self.shards.count - 1):
            taken -= {numbers[step.right] for step in self._after[place] if step.right != place}
            if not self._after[place]:
                numbers[place] = min(set(range(len(taken) + 1)) - taken)
                taken.add(numbers[place])
        return numbers

    def home(self, parameter: Parameter, place: int) -> Array:
        """The place that the gradient of one parameter over a shard is to be written to, in the parameter's shape."""
        if self._homes and place in self._number_of:
            return self._waiting(place, parameter).reshape(parameter.grad.shape)
        return parameter.grad

    def start(self) -> None:
        """A step begins: nothing is added up."""

    def end_pass(self) -> None:
        """Nothing is left to do."""

    def add(self, parameter: Parameter, place: int) -> None:
        """The gradient of one parameter over a shard that is not the last: as soon as it is there, shards in order."""
        self._count(parameter, place)
        arithmetic = self._group.arithmetic
        value: Array = parameter.grad.reshape(-1)
        for step in self._after[place]:
            left = self._waiting(step.left, parameter)
            arithmetic.add(left, value)
            value = left
        if place in self._number_of and not self._homes:
            arithmetic.copy(self._waiting(place, parameter), value)

    def _count(self, parameter: Parameter, place: int) -> None:
        assert self._added[parameter.name] == place, "a shard is missing"
        self._added[parameter.name] = (place + 1) % self.shards.count

    def _waiting(self, place: int, parameter: Parameter) -> Array:
        segment = self._group.segment(parameter.name)
        return self._buffers[self._number_of[place]][segment.start : segment.stop]

    def complete(self, parameter: Parameter) -> None:
        """The gradient of one parameter over the last shard takes what was added up before it."""
        self._count(parameter, self.shards.count - 1)
        for step in self._after[-1]:
            self._group.arithmetic.add(parameter.grad.reshape(-1), self._waiting(step.left, parameter))

    def terms(self, start: int, stop: int) -> Array | tuple[Array, ...]:
        """Elements [start, stop) of this rank's terms of the sums over ranks: one array, or several in the tree's order."""
        last = self._group.grad[start:stop]
        if not self._kept:
            return last
        return (*(self._buffers[self._number_of[place]][start:stop] for place in self._kept), last)
