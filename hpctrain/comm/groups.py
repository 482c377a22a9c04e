"""Groups of ranks: the process grid, nodes, and collectives in two levels.

Rank (r, c) of a grid of Pr (`grid.rows`) by Pc (`grid.cols`) ranks belongs to two groups. The Pr ranks with equal c are a split
group: they share samples and exchange activations, which is on the critical path. The Pc ranks with equal r are a data group:
they hold the same weights and exchange gradients, which can be hidden. Ranks of a split group are therefore neighbours: position
= c * Pr + r, over the ranks ordered by node. A split group lies inside a node if Pr divides the number of ranks per node.

`TwoLevel` runs reduce-scatters and allgathers in two levels if nodes have several ranks each: within a node, and across nodes
between ranks with the same local number. A flat reduce-scatter or allgather of n bytes moves about n bytes times the number of
ranks per node over each link. With two levels, sums are computed within a node first, and gathered data crosses each link once:
(N - 1) / N n bytes for N nodes, as if a node were one rank (Cho, Finkler, Kung and Hunter, "BlueConnect", MLSys 2019). Each rank
of a node sends and receives a share of this traffic.
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
    """Division of ranks into nodes with the same number of ranks each.

    Attributes:
        order: the ranks ordered by (local number, node). Ranks with the same local number, whose pieces of a buffer cross nodes
            together, are neighbours.
        nodes: number N of nodes.
        per_node: number of ranks per node.
    """

    order: tuple[int, ...]
    nodes: int
    per_node: int

    @property
    def words(self) -> str:
        """Nodes and ranks per node as text, which a strategy appends to its description of a stored schedule."""
        return f"; {self.nodes} nodes of {self.per_node}"


def node_numbers(comm: Communicator, node: Communicator) -> tuple[int, ...]:
    """Return the index of each rank's node; nodes are numbered in the order of their lowest ranks. Collective; at set-up only.

    Args:
        node: communicator of the ranks of `comm` on this rank's node, from `split_shared_memory`.
    """
    leaders = comm.allgather_object(node.broadcast_object(comm.rank))
    numbers = {leader: number for number, leader in enumerate(sorted(set(leaders)))}
    return tuple(numbers[leader] for leader in leaders)


def levels(nodes: Sequence[Hashable]) -> Levels | None:
    """Return the levels of ranks on these nodes; None if there is only one level.

    There is one level if all ranks share a node, if each rank has its own node, or if nodes have different numbers of ranks,
    because their pieces would differ in size.
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
    """Return a communicator with the ranks of `comm`, in two levels if `two` is not None. Collective; at set-up.

    With two levels, its ranks have the order of `two.order`.
    """
    position = comm.rank if two is None else two.order.index(comm.rank)
    flat = comm.split(0, position, name)
    assert flat is not None
    return flat if two is None else TwoLevel(flat, two)


def within_node(comm: Communicator, two: Levels, name: str) -> Communicator:
    """Return a communicator of the ranks of `comm`, a result of `in_levels`, on this rank's node. Collective; at set-up."""
    return _split(comm, comm.rank % two.nodes, f"{name} within nodes")


def across_nodes(comm: Communicator, two: Levels | None, name: str) -> Communicator:
    """Return a communicator of the ranks with this rank's local number on all nodes, in node order. Collective; at set-up.

    If there is one level, it contains all ranks of `comm`.
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
    """Communicator that runs reduce-scatters and allgathers in two stages, on separate communicators.

    All other operations go to `flat`, whose ranks are in the order of the levels. The second stage of an operation starts once
    the first stage is complete and the second stages of all earlier operations of its kind have started. It starts in a `test` of
    its handle or of a later one. Each communicator therefore sees the same order on every rank, whichever stage completes first.
    Creation is collective.

    Args:
        flat: communicator of all ranks, in the order of the levels.
        make: function (elements, an array like them) -> buffer for sums within a node; default: a NumPy array.
        within: function that creates, from the communicator of a node, the communicator of all stages within the node. Stages of
            both kinds then begin in the order in which operations are posted. None: each kind has a separate communicator, split
            from `flat`.
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
        """Return a copy of this communicator with other sums across nodes.

        Operations of both communicators may be mixed: all second stages keep the order in which they were posted.

        Args:
            sums_over: function that returns the sums for a communicator of the ranks with the same local number.
        """
        other = copy.copy(self)
        other._sums_across = sums_over(self._reduce_across)
        return other

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Handle:
        """Sum within the node, then across nodes.

        In the first stage, each rank receives the pieces of all ranks with its local number. The second stage sums these pieces
        across nodes.
        """
        run_sizes = [sum(counts[run]) for run in self._runs]
        of_node = self._spare.take(run_sizes[self._local_rank], send)

        def across() -> Handle:
            return self._sums_across.ireduce_scatter(of_node, recv, counts[self._runs[self._local_rank]])

        within = self._turn()(lambda: self._reduce_within.ireduce_scatter(send, of_node, run_sizes))
        return self._reductions.second_stage(within, across, lambda: self._spare.give_back(of_node))

    def iallgather(self, send: Array | None, recv: Array, counts: Sequence[int]) -> Handle:
        """Gather across nodes the pieces of all ranks with this local number, then within the node all other pieces."""
        run_sizes = [sum(counts[run]) for run in self._runs]
        begin = sum(run_sizes[: self._local_rank])
        own_run = recv[begin : begin + run_sizes[self._local_rank]]
        turn = self._turn()

        def within() -> Handle:
            return turn(lambda: self._gather_within.iallgather(None, recv, run_sizes))

        across = self._gather_across.iallgather(send, own_run, counts[self._runs[self._local_rank]])
        return self._gathers.second_stage(across, within)

    def _turn(self) -> Callable[[Callable[[], Handle]], Handle]:
        """Reserve the place of a stage within the node, at the time when its operation is posted.

        Returns:
            Function that starts the stage in this place.
        """
        return (lambda start: start()) if self._turns is None else self._turns.reserve().fill


class SumsInLevels:
    """Sums in two levels, including allreduces, which `TwoLevel` forwards to `flat`.

    An allreduce has three stages: a reduce-scatter within the node, an allreduce across nodes, and an allgather within the node.
    Each stage has a separate communicator. The second and the third stage begin in the same way as a second stage of `TwoLevel`.
    Creation is collective.

    Args:
        comm: communicator for the reduce-scatters.
        sums_over: function that returns the sums for allreduces across nodes, for a communicator of the ranks with the same local
            number.
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
        """Sum over the ranks, in place. Every rank receives the same bits, because each element is summed across nodes once."""
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
    """Axis of the grid along which a group runs; the value is the name of the group's communicator.

    SPLIT: the Pr ranks with equal c, r = 0 .. Pr-1, which share samples and split layers (model, domain). DATA: the Pc ranks with
    equal r, c = 0 .. Pc-1, which hold the same weights and split the batch.
    """

    SPLIT = "split"
    DATA = "data"


class ProcessGrid:
    """This rank's coordinates in the grid and its groups. Creation is collective over all ranks of `world`.

    Attributes:
        row: this rank's r.
        col: this rank's c.
        node: communicator of the ranks on this rank's node.
        node_of: index of the node of each world rank; nodes are numbered in the order of their lowest ranks.

    Raises:
        ShapeError: see `check_grid`; `size` is that of the world. Raised on every rank, before any communication.
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
        """Return this rank's group along an axis. Its rank in the group is r (SPLIT) or c (DATA)."""
        return self._along[axis]


def check_grid(rows: int, cols: int, size: int) -> None:
    """Raise a ShapeError unless `rows` and `cols` are positive and their product is `size`."""
    if rows < 1 or cols < 1 or rows * cols != size:
        raise ShapeError(
            f"A grid of {rows} x {cols} has {rows * cols} places, but the number of ranks is {size}; grid.rows * grid.cols must "
            f"be {size}."
        )


def coordinates(node_of: tuple[int, ...], rows: int) -> list[tuple[int, int]]:
    """Return (r, c) of each world rank.

    Split groups of `rows` ranks are filled one after another, over the ranks ordered by (node, rank). If nodes hold consecutive
    ranks, world rank c * rows + r has the coordinates (r, c). Rank 0 always has (0, 0).
    """
    order = sorted(range(len(node_of)), key=lambda rank: (node_of[rank], rank))
    by_rank = [(0, 0)] * len(order)
    for position, rank in enumerate(order):
        by_rank[rank] = (position % rows, position // rows)
    return by_rank
