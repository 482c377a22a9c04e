"""Groups of ranks: the process grid, nodes, and collectives in two levels.

Rank (r, c) of a grid of Pr (`grid.rows`) by Pc (`grid.cols`) ranks belongs to two groups. The Pr ranks of equal c are a split
group: they share samples and exchange activations, on the critical path. The Pc ranks of equal r are a data group: they hold
the same weights and exchange gradients, which hide. So the ranks of a split group are neighbours: position = c * Pr + r, over
the ranks ordered by node, and a split group lies inside a node where Pr divides the node's ranks.

`TwoLevel` does reduce-scatters and allgathers within a node, and across nodes between ranks of equal number, for nodes with
several ranks each. A flat reduce-scatter or allgather of n bytes moves about n times the ranks of a node over each link. In two
levels sums are made within a node first, and what is gathered crosses once: (N - 1) / N n for N nodes, as if a node were one
rank (Cho, Finkler, Kung and Hunter, "BlueConnect", MLSys 2019). Each rank of a node drives a share of its link.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from hpctrain.comm.base import Array, Communicator, ForwardingCommunicator, GradientSums, Handle
from hpctrain.comm.order import InOrder, SpareBuffers
from hpctrain.core.errors import ShapeError
from hpctrain.core.intervals import even


@dataclass(frozen=True)
class Levels:
    """Ranks that are the same number on each of several nodes.

    Attributes:
        order: the ranks by (number on the node, node): those of one number, whose pieces of a buffer cross nodes together, are
            neighbours. nodes: N. per_node: ranks of a node.
    """

    order: tuple[int, ...]
    nodes: int
    per_node: int

    @property
    def words(self) -> str:
        """The words that levels add to a stored schedule's request."""
        return f"; {self.nodes} nodes of {self.per_node}"


def node_numbers(comm: Communicator, node: Communicator) -> tuple[int, ...]:
    """Return the number of each rank's node, nodes counted by their lowest rank. Collective; set-up only.

    Args:
        node: the ranks of `comm` on this rank's node, by `split_shared_memory`.
    """
    leaders = comm.allgather_object(node.broadcast_object(comm.rank))
    numbers = {leader: number for number, leader in enumerate(sorted(set(leaders)))}
    return tuple(numbers[leader] for leader in leaders)


def levels(nodes: Sequence[Hashable]) -> Levels | None:
    """Return the levels of ranks on these nodes; None if there is one level.

    There is one level if all ranks share a node, if each rank has its own node, or if nodes have different numbers of ranks,
    whose pieces would differ in size.
    """
    members: dict[Hashable, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    sizes = {len(ranks) for ranks in members.values()}
    if len(members) == 1 or len(sizes) != 1 or sizes == {1}:
        return None
    per_node = sizes.pop()
    order = tuple(ranks[number] for number in range(per_node) for ranks in members.values())
    return Levels(order, len(members), per_node)


def in_levels(comm: Communicator, two: Levels | None, name: str) -> Communicator:
    """Return the ranks of `comm` in `two.order` and in two levels, or as they are. Collective; set-up."""
    position = comm.rank if two is None else two.order.index(comm.rank)
    flat = comm.split(0, position, name)
    assert flat is not None
    return flat if two is None else TwoLevel(flat, two)


def within_node(comm: Communicator, two: Levels, name: str) -> Communicator:
    """Return the ranks of this rank's node. Collective; set-up.

    Args:
        comm: in the order of `two`, as `in_levels` makes it.
    """
    return _split(comm, comm.rank % two.nodes, f"{name} within nodes")


def across_nodes(comm: Communicator, two: Levels | None, name: str) -> Communicator:
    """Return the ranks of this rank's number on all nodes, in the nodes' order. Collective; set-up.

    All of `comm` if there is one level.
    """
    position = comm.rank if two is None else two.order.index(comm.rank)
    number, node = divmod(position, comm.size if two is None else two.nodes)
    group = comm.split(number, node, f"{name} across nodes")
    assert group is not None
    return group


def _split(comm: Communicator, color: int, name: str) -> Communicator:
    group = comm.split(color, comm.rank, name)
    assert group is not None
    return group


class TwoLevel(ForwardingCommunicator):
    """A communicator that does reduce-scatters and allgathers in two stages, each on a communicator of its own.

    All else goes to `flat`, whose ranks lie in the order of `levels`. The second stage of an operation starts in a `test` of its
    handle, or of a later one's, once the first is complete, in the order in which operations of its kind were posted; so each
    communicator sees the same order on every rank, whatever is complete first. Making it is collective.

    Args:
        make: (elements, an array like them) -> a buffer of what is summed within a node; by default one of NumPy's.
        within: makes of the ranks of a node the communicator of all stages there, which then begin in the order in which
            operations are posted, of both kinds together; None: each kind has one of its own, as `flat` splits it.
    """

    def __init__(
        self,
        flat: Communicator,
        two: Levels,
        make: Callable[[int, Array], Array] | None = None,
        within: Callable[[Communicator], Communicator] | None = None,
    ) -> None:
        super().__init__(flat)
        self.flat, self.levels = flat, two
        self._local_rank, self._node = divmod(flat.rank, two.nodes)
        self._runs = [slice(number * two.nodes, (number + 1) * two.nodes) for number in range(two.per_node)]
        node = _split(flat, self._node, f"{flat.name} within nodes")
        self._turns = None if within is None else InOrder()
        self._reduce_within = node if within is None else within(node)
        self._reduce_across: Communicator = _split(flat, self._local_rank, f"{flat.name} across nodes")
        self._sums_across: GradientSums = self._reduce_across
        shared = self._reduce_within if within is not None else None
        self._gather_within = shared or _split(flat, self._node, f"{flat.name} within nodes")
        self._gather_across = _split(flat, self._local_rank, f"{flat.name} across nodes")
        self._reductions, self._gathers = InOrder(), InOrder()
        self._spare = SpareBuffers(make)

    def with_sums_across(self, sums_over: Callable[[Communicator], GradientSums]) -> TwoLevel:
        """Return the same communicator with other sums across nodes: those of `sums_over(ranks of equal number)`.

        Operations of both may be mixed: all second stages keep the order in which they were posted.
        """
        other = copy.copy(self)
        other._sums_across = sums_over(self._reduce_across)
        return other

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Handle:
        """Sum within the node, each rank getting the pieces of all ranks with its number; then sum these pieces across nodes."""
        run_sizes = [sum(counts[run]) for run in self._runs]
        of_node = self._spare.take(run_sizes[self._local_rank], send)

        def across() -> Handle:
            return self._sums_across.ireduce_scatter(of_node, recv, counts[self._runs[self._local_rank]])

        within = self._turn()(lambda: self._reduce_within.ireduce_scatter(send, of_node, run_sizes))
        return self._reductions.second_stage(within, across, lambda: self._spare.give_back(of_node))

    def iallgather(self, send: Array | None, recv: Array, counts: Sequence[int]) -> Handle:
        """Gather the pieces of all ranks of this number from the other nodes; then those of the other numbers from the node."""
        run_sizes = [sum(counts[run]) for run in self._runs]
        begin = sum(run_sizes[: self._local_rank])
        own_run = recv[begin : begin + run_sizes[self._local_rank]]
        turn = self._turn()

        def within() -> Handle:
            return turn(lambda: self._gather_within.iallgather(None, recv, run_sizes))

        across = self._gather_across.iallgather(send, own_run, counts[self._runs[self._local_rank]])
        return self._gathers.second_stage(across, within)

    def _turn(self) -> Callable[[Callable[[], Handle]], Handle]:
        """Reserve the place within the node for a stage of an operation that is posted now; return what starts it there."""
        return (lambda start: start()) if self._turns is None else self._turns.reserve().fill


class SumsInLevels:
    """Sums in two levels, allreduces included: those of `TwoLevel` go to `flat`.

    An allreduce has three stages: the ranks of a node share its sum out, sum their runs of it across nodes, and gather them. Each
    begins as a second stage of `TwoLevel` does, on a communicator of its own. Making it is collective.

    Args:
        comm: does the reduce-scatters. sums_over: (ranks of equal number) -> the sums across nodes, for allreduces.
    """

    def __init__(self, comm: TwoLevel, sums_over: Callable[[Communicator], GradientSums]) -> None:
        self._comm = comm
        flat, two = comm.flat, comm.levels
        self._ranks, self._nodes = flat.size, two.nodes
        self._number, node = divmod(flat.rank, two.nodes)
        self._shared_out = _split(flat, node, f"{flat.name} within nodes")
        self._across = sums_over(_split(flat, self._number, f"{flat.name} across nodes"))
        self._gathered = _split(flat, node, f"{flat.name} within nodes")
        self._sums, self._gathers = InOrder(), InOrder()
        self._spare = SpareBuffers()

    def iallreduce(self, buffer: Array) -> Handle:
        """Sum as a communicator does; every rank gets the same bits, as each run is summed across nodes once."""
        counts = even(buffer.size, self._ranks)
        runs = [sum(counts[begin : begin + self._nodes]) for begin in range(0, self._ranks, self._nodes)]
        run = self._spare.take(runs[self._number], buffer)
        shared_out = self._shared_out.ireduce_scatter(buffer, run, runs)
        summed = self._sums.second_stage(shared_out, lambda: self._across.iallreduce(run))
        return self._gathers.second_stage(
            summed, lambda: self._gathered.iallgather(run, buffer, runs), lambda: self._spare.give_back(run)
        )

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Handle:
        return self._comm.ireduce_scatter(send, recv, counts)


class GridAxis(StrEnum):
    """The axis of the grid along which a group runs, and the name of the group's communicator.

    SPLIT: the Pr ranks of equal c, r = 0 .. Pr-1: they share samples and split layers (model, domain).
    DATA: the Pc ranks of equal r, c = 0 .. Pc-1: they hold the same weights and split the batch.
    """

    SPLIT = "split"
    DATA = "data"


class ProcessGrid:
    """This rank's place in the grid and its groups. Making it is collective, over all ranks of `world`.

    Attributes:
        row, col: this rank's r and c. node: the ranks of this rank's node. node_of: for each world rank, the number of its node,
            nodes counted by their lowest rank.

    Raises:
        ShapeError: `rows` times `cols` is not the world's size; on every rank alike, before any communication.
    """

    def __init__(self, world: Communicator, rows: int, cols: int) -> None:
        check_grid(rows, cols, world.size)
        self.world = world
        self.rows = rows
        self.cols = cols
        self.node = world.split_shared_memory("node")
        self.node_of = node_numbers(world, self.node)
        self.row, self.col = coordinates(self.node_of, rows)[world.rank]
        split = world.split(self.col, self.row, GridAxis.SPLIT.value)
        data = world.split(self.row, self.col, GridAxis.DATA.value)
        assert split is not None
        assert data is not None
        self._along = {GridAxis.SPLIT: split, GridAxis.DATA: data}

    def along(self, axis: GridAxis) -> Communicator:
        """Return this rank's group along an axis; its rank in it is r (SPLIT) or c (DATA)."""
        return self._along[axis]


def check_grid(rows: int, cols: int, size: int) -> None:
    """Refuse a grid that does not multiply to `size` ranks.

    Raises:
        ShapeError: the message names the nearest legal grid.
    """
    if rows >= 1 and cols >= 1 and rows * cols == size:
        return
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    nearest = min(divisors, key=lambda n: (abs(n - rows), n))
    raise ShapeError(
        f"A grid of {rows} x {cols} has {rows * cols} places, the world has {size} ranks; grid.rows * grid.cols must be {size}, "
        f"the nearest legal grid is {nearest} x {size // nearest}."
    )


def coordinates(node_of: tuple[int, ...], rows: int) -> list[tuple[int, int]]:
    """Return (r, c) of each world rank: one split group of `rows` ranks after another, over the ranks ordered by (node, rank).

    World rank c * rows + r is (r, c) where nodes hold consecutive ranks; rank 0 is always (0, 0).
    """
    order = sorted(range(len(node_of)), key=lambda rank: (node_of[rank], rank))
    by_rank = [(0, 0)] * len(order)
    for position, rank in enumerate(order):
        by_rank[rank] = (position % rows, position // rows)
    return by_rank
