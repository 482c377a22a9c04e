"""Costs of collectives on a machine: where groups of ranks are placed, and the stages of a collective there.

The algorithms are those of MPICH (and of Cray's MPI, which derives from it) for nonblocking collectives on plain arrays, after
Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 2005. n is the size of the
whole buffer in bytes, P the number of ranks:

    reduce-scatter      below 512 KiB recursive halving: ceil(log2 P) rounds, the first with half of n to the farthest rank;
                        otherwise pairwise: P - 1 rounds of n / P, in round d to the d-th next rank
    allgather           below 512 KiB recursive doubling, to the nearest rank first, if P is a power of two; below 80 KiB
                        Bruck's algorithm for any other P, with as many rounds; otherwise a ring: P - 1 rounds of n / P
    allreduce           up to 2 KiB recursive doubling: ceil(log2 P) rounds of n; otherwise halving, then doubling
    all-to-all          all messages at once, one to each rank that receives anything
    in two levels       as comm/groups.py does: each level is a collective by itself

If P is not a power of two, halving and doubling begin and end with a message of the whole buffer between two partners.
`MessageCosts` prices the operations of an averager: whole, rounded to 16 bits, or only the largest elements across nodes. The
work of rounding, adding and selecting is expressed as a number of memory bytes that take the same time on one core. It was
measured relative to a copy; the machine's memory rate turns it into seconds.

All functions are pure and return the same on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hpctrain.averaging.collective_schedule import OperationKind
from hpctrain.averaging.sixteen_bits import Rounding
from hpctrain.averaging.slicing import INDEX_BYTES, Compression
from hpctrain.comm.groups import Levels
from hpctrain.comm.sums import Wire
from hpctrain.core.intervals import ShardsOfRank
from hpctrain.planner.costs.machine import Link, Machine, OperatorClass


@dataclass(frozen=True)
class GroupPlacement:
    """Placement of a group's ranks on nodes.

    Attributes:
        nodes: number of nodes with ranks of the group.
        per_node: maximum number of ranks of the group on one node.
        alike: number of groups of this kind with ranks on the same node, including this group; these groups use the node's links
            at the same time.
    """

    ranks: int
    nodes: int
    per_node: int
    alike: int = 1


@dataclass(frozen=True)
class GridPlacements:
    """Placements on a grid of Pr x Pc ranks.

    Attributes:
        split: placement of the Pr ranks that share samples.
        data: placement of the Pc ranks with the same weights.
    """

    all_ranks: GroupPlacement
    split: GroupPlacement
    data: GroupPlacement

    def of(self, ranks: str) -> GroupPlacement:
        """Return the placement of "all", "split" or "data", the names of groups in `BatchNormSpec.merge`."""
        return {"all": self.all_ranks, "split": self.split, "data": self.data}[ranks]


def _placement(machine: Machine, groups: Sequence[Iterable[int]]) -> GroupPlacement:
    """Return one placement for all groups of a kind, which together contain each rank once.

    The number of nodes and the number of ranks per node are maxima over the groups.
    """
    alike: Counter[int] = Counter()
    ranks = nodes = most = 0
    for members in groups:
        on_node = Counter(position // machine.ranks_per_node for position in members)
        alike.update(on_node.keys())
        ranks, nodes, most = sum(on_node.values()), max(nodes, len(on_node)), max(most, *on_node.values())
    return GroupPlacement(ranks, nodes, most, max(alike.values()))


def grid_placements(machine: Machine, rows: int, cols: int) -> GridPlacements:
    """Return the placements of the groups on a grid of Pr = `rows` times Pc = `cols` ranks.

    If the split groups differ in their placement, the result has the maxima over all of them; likewise for the data groups.
    """
    size = rows * cols
    return GridPlacements(
        GroupPlacement(size, machine.nodes_of(size), min(size, machine.ranks_per_node)),
        _placement(machine, [range(column * rows, (column + 1) * rows) for column in range(cols)]),  # neighbours
        _placement(machine, [range(row, size, rows) for row in range(rows)]),
    )


#: kinds of collectives; strings for those outside schedules: all-to-all of the split group, batch statistics, step message
Kind = OperationKind | Literal["exchange", "merge", "message"]

_LONG_BYTES = 512 << 10  # smallest buffer of a long reduce-scatter or allgather
_BRUCK_BYTES = 80 << 10  # largest buffer of Bruck's allgather, plus 1
_SHORT_ALLREDUCE_BYTES = 2 << 10

_REDUCTIONS = (OperationKind.ALLREDUCE, OperationKind.NORMS, "message")
_GATHERS = (OperationKind.ALLGATHER, OperationKind.ERRORS, "merge")
_ALL_TO_ALLS = (OperationKind.INPUTS, "exchange")
_LEVELLED = (OperationKind.REDUCE_SCATTER, OperationKind.ALLGATHER, OperationKind.ERRORS)


@dataclass(frozen=True)
class CollectiveStage:
    """Stage of a collective. All ranks of the group begin it together, when the previous stage is complete.

    Attributes:
        between: whether the network cards of nodes limit the stage; otherwise, each rank's copies through the memory of its node
            limit it.
        latency_seconds: latency of all rounds.
        wire_bytes: bytes that one rank sends through the limiting resource, mean over ranks.
        beta_seconds_per_byte: time per byte on that resource without other traffic.
        cpu_seconds: time of each rank's core. It is part of the stage's time if the rank waits for the stage; otherwise it adds
            to the rank's computation.
        rounds: number of consecutive rounds; the program has to poll once per round.
        sharers: number of ranks whose wire_bytes pass through the same card when all groups of this kind communicate at once; 1
            within a node.
        unattended_bytes: number of bytes (of wire_bytes) that move between two polls of the rank; None: all bytes of a round.
        buffered_bytes: number of bytes of a rank's messages to the same ranks that move between two polls; None: all bytes.
        polls: number of polls that each round needs before its first byte moves.
        yields: whether shorter messages of the rank to the same ranks overtake the messages of the stage.
    """

    between: bool
    latency_seconds: float
    wire_bytes: float
    beta_seconds_per_byte: float
    cpu_seconds: float
    rounds: int
    sharers: float = 1.0
    unattended_bytes: float | None = None
    buffered_bytes: int | None = None
    polls: int = 0
    yields: bool = False

    @property
    def wire_seconds(self) -> float:
        """Time on the wire when all groups of this kind communicate at once, without other operations on the same wire."""
        return self.wire_bytes * self.sharers * self.beta_seconds_per_byte

    @property
    def seconds(self) -> float:
        """Time of the stage when all ranks wait for it and all groups of this kind communicate at once, without other traffic."""
        return max(self.latency_seconds + self.wire_seconds, self.cpu_seconds)


def unhindered_seconds(stages: Iterable[CollectiveStage], burst_seconds: float = 0.0) -> float:
    """Return the time of an operation with these stages when all ranks only wait for it.

    Args:
        burst_seconds: time that a pause before the operation saves on the cards of nodes (`Link.burst_seconds`); 0: no pause.
    """
    seconds = 0.0
    for stage in stages:
        saved = min(burst_seconds, stage.wire_seconds) if stage.between else 0.0
        burst_seconds -= saved
        seconds += max(stage.seconds - saved, stage.cpu_seconds)
    return seconds


def stages(
    machine: Machine,
    kind: Kind,
    n_bytes: float,
    placement: GroupPlacement,
    levels: Levels | None = None,
    peers: int | None = None,
) -> tuple[CollectiveStage, ...]:
    """Return the consecutive stages of one operation; an empty tuple if there is only one rank or nothing to send.

    Args:
        n_bytes: bytes of the whole buffer: the one that each rank sends in a reduction, the gathered one, or the largest one of a
            rank, with its own piece, in an all-to-all. With `peers`: bytes that a rank sends to other ranks.
        placement: placement of the group's ranks. The ranks of a node are neighbours, unless `levels` defines another order.
        levels: levels of the group's streams; None: one level.
        peers: number of ranks with which a rank exchanges in an all-to-all, nearest ranks first; None: all ranks.
    """
    ranks = placement.ranks
    if ranks == 1 or n_bytes == 0 or peers == 0:
        return ()
    if levels is not None and kind in _LEVELLED:  # across nodes, each rank exchanges its share of the node's buffer
        within = stages(machine, kind, n_bytes, within_nodes(placement, levels.per_node))
        across = stages(machine, kind, n_bytes / levels.per_node, across_nodes(placement, levels.nodes, levels.per_node))
        return (*within, *across) if kind is OperationKind.REDUCE_SCATTER else (*across, *within)
    if kind in _ALL_TO_ALLS:
        others = ranks - 1 if peers is None else peers
        piece = n_bytes / ranks if peers is None else n_bytes / peers
        rounds = [_Round(piece, peers=others, at_once=True)]
    elif kind in _REDUCTIONS:
        rounds = _allreduce(n_bytes, ranks)
    elif kind in _GATHERS:
        rounds = _allgather(n_bytes, ranks)
    else:
        rounds = _reduce_scatter(n_bytes, ranks)
    return _priced(machine, rounds, placement, spread=levels is not None)


def within_nodes(placement: GroupPlacement, per_node: int) -> GroupPlacement:
    """Return the placement of the `per_node` ranks of a group on one node."""
    return GroupPlacement(per_node, 1, per_node, placement.alike)


def across_nodes(placement: GroupPlacement, nodes: int, per_node: int) -> GroupPlacement:
    """Return the placement of the ranks with one local number on all nodes; all `per_node` local numbers communicate at once."""
    return GroupPlacement(nodes, nodes, 1, placement.alike * per_node)


@dataclass(frozen=True)
class _Round:
    """Messages of `n_bytes` bytes from every rank.

    Attributes:
        distance: distance to the receiver, in ranks.
        count: number of equal rounds.
        ring: whether each rank sends to the next rank; otherwise two ranks exchange.
        peers: number of messages of a rank, to the nearest ranks on both sides; 0: one message.
        at_once: whether all messages are posted at once.
        sums: whether the receiver adds up the data.
    """

    n_bytes: float
    distance: int = 0
    count: int = 1
    ring: bool = False
    peers: int = 0
    at_once: bool = False
    sums: bool = False

    @property
    def messages(self) -> int:
        return self.count * max(1, self.peers)

    @property
    def rounds(self) -> int:
        return 1 if self.at_once else self.messages

    def crossing(self, placement: GroupPlacement, spread: bool) -> float:
        """Return the share of the messages that cross between nodes.

        Args:
            spread: whether consecutive ranks are on different nodes, as in the order of levels.
        """
        if placement.nodes == 1:
            return 0.0
        if self.peers == placement.ranks - 1:
            return (placement.ranks - placement.per_node) / self.peers
        if spread:
            return 0.0 if self.distance >= placement.nodes else 1.0
        if self.peers:
            distances = range(1, 1 + -(-self.peers // 2))
            return sum(min(1.0, distance / placement.per_node) for distance in distances) / len(distances)
        if not self.ring and placement.per_node % (2 * self.distance) == 0:
            return 0.0
        return min(1.0, self.distance / placement.per_node)


def _reduce_scatter(n_bytes: float, ranks: int) -> list[_Round]:
    if n_bytes >= _LONG_BYTES:
        return [_Round(n_bytes / ranks, peers=ranks - 1, sums=True)]
    power = _power_below(ranks)
    halving = _halving(n_bytes, power, sums=True)
    if power == ranks:
        return halving
    return [_Round(n_bytes, 1, sums=True), *halving, _Round(n_bytes / ranks, 1)]


def _allgather(n_bytes: float, ranks: int) -> list[_Round]:
    power = _power_below(ranks)
    if power == ranks and n_bytes < _LONG_BYTES:
        return _halving(n_bytes, ranks)[::-1]
    if power < ranks and n_bytes < _BRUCK_BYTES:
        full = [_Round(n_bytes / ranks * distance, distance, ring=True) for distance in _powers(power)]
        return [*full, _Round(n_bytes / ranks * (ranks - power), power, ring=True)]
    return [_Round(n_bytes / ranks, 1, count=ranks - 1, ring=True)]


def _allreduce(n_bytes: float, ranks: int) -> list[_Round]:
    power = _power_below(ranks)
    if n_bytes <= _SHORT_ALLREDUCE_BYTES:
        middle = [_Round(n_bytes, distance, sums=True) for distance in _powers(power)]
    else:
        # MPICH's allreduce starts halving with the nearest rank, so that most bytes stay near.
        shares = [one.n_bytes for one in _halving(n_bytes, power)]
        near = list(zip(shares, _powers(power), strict=True))
        middle = [_Round(share, distance, sums=True) for share, distance in near]
        middle += [_Round(share, distance) for share, distance in reversed(near)]
    if power == ranks:
        return middle
    return [_Round(n_bytes, 1, sums=True), *middle, _Round(n_bytes, 1)]


def _halving(n_bytes: float, power: int, *, sums: bool = False) -> list[_Round]:
    """Return the rounds that halve a buffer over `power` ranks: half to the farthest rank, a quarter to one half as far, etc."""
    return [_Round(n_bytes * distance / power, distance, sums=sums) for distance in reversed(_powers(power))]


def _powers(power: int) -> list[int]:
    """Return 1, 2, 4, ... below `power`."""
    return [1 << exponent for exponent in range(power.bit_length() - 1)]


def _power_below(ranks: int) -> int:
    """Return the largest power of two that is at most `ranks`."""
    return 1 << (ranks.bit_length() - 1)


def _priced(machine: Machine, rounds: Sequence[_Round], placement: GroupPlacement, spread: bool) -> tuple[CollectiveStage, ...]:
    """Return a stage for each series of consecutive rounds that all cross between nodes, or all stay within them."""
    runs: list[list[tuple[_Round, float]]] = []
    for one in rounds:
        crossing = one.crossing(placement, spread)
        if not runs or (runs[-1][-1][1] > 0) != (crossing > 0):
            runs.append([])
        runs[-1].append((one, crossing))
    # A collective is posted once; its first stage contains the cost of the post.
    return tuple(_stage(machine, run, placement, posts=position == 0) for position, run in enumerate(runs))


def _stage(machine: Machine, run: Sequence[tuple[_Round, float]], placement: GroupPlacement, *, posts: bool) -> CollectiveStage:
    """Return the stage of a series of rounds.

    Args:
        run: rounds, each with its share of messages between nodes; the shares are all 0 or all positive.
        posts: whether the stage includes the cost of posting the collective.
    """
    rounds = [one for one, _ in run]
    sent = sum(one.messages * one.n_bytes for one in rounds)
    crossing = sum(one.messages * one.n_bytes * share for one, share in run)
    link = machine.between if crossing else machine.within
    cpu = 2 * (crossing * machine.between.byte_seconds + (sent - crossing) * machine.within.byte_seconds)
    summed = link.sum_seconds * sum(one.messages * one.n_bytes for one in rounds if one.sums)
    latency, beta = _message_costs(link, rounds)
    _, within_beta = _message_costs(machine.within, rounds)
    # Cards are used evenly by all groups of the same kind. In a ring, only the last rank of a node sends to another node.
    cards, using = max(1, machine.ranks_per_node // machine.ranks_per_card), placement.per_node * placement.alike
    sending = using * (crossing / sent if any(one.ring for one in rounds) else 1.0)
    sharers = max(1.0, using / min(cards, max(1.0, sending)))
    # In a ring, the copies of other ranks may delay the one rank of a node that sends to the next node.
    if crossing and (sent - crossing) * within_beta <= crossing * sharers * beta:
        between, wire = True, crossing
    else:
        between, wire, beta, sharers = False, sent - crossing, within_beta, 1.0
    largest = link.segment(max(one.n_bytes for one in rounds))
    unattended = None
    if largest.unattended_bytes is not None:  # messages of a round move at the same time
        unattended = largest.unattended_bytes * max(one.messages / one.rounds for one in rounds) * wire / sent
    return CollectiveStage(
        between=between,
        latency_seconds=latency + summed,
        wire_bytes=wire,
        beta_seconds_per_byte=beta,
        cpu_seconds=cpu + summed + link.operation_seconds * posts,
        rounds=sum(one.rounds for one in rounds),
        sharers=sharers,
        unattended_bytes=unattended,
        buffered_bytes=(machine.between if between else machine.within).buffered_bytes,
        polls=largest.polls,
        yields=link.is_passed(largest),
    )


def _message_costs(link: Link, rounds: Sequence[_Round]) -> tuple[float, float]:
    """Return (latency of all messages of the rounds, mean time of a byte) on a link, in seconds."""
    segments = [link.segment(one.n_bytes) for one in rounds]
    latency = sum(one.messages * segment.alpha_seconds for one, segment in zip(rounds, segments, strict=True))
    sizes = [one.messages * one.n_bytes for one in rounds]
    wire = sum(size * segment.beta_seconds_per_byte for size, segment in zip(sizes, segments, strict=True))
    return latency, wire / sum(sizes)


#: kinds of operations whose sums have a fixed order with shards
_ORDERED = (OperationKind.REDUCE_SCATTER, OperationKind.ALLREDUCE)
#: memory bytes per element: to round it, and to read a rounded element (and add it to a sum)
_ROUNDING_BYTES: Mapping[Wire, tuple[int, int]] = {"float32": (0, 0), "bfloat16": (28, 13)}
#: memory bytes per element of a part: to add its residual, to select the largest elements and to remove them
_SELECTION_BYTES = 36
#: memory bytes per received pair of element and position: to add the element at the position
_PAIR_BYTES = 84


@dataclass(frozen=True)
class MessageCosts:
    """Costs of the operations of one parameter group.

    Attributes:
        levels: levels of the group's streams; None: one level.
        rounding: rounding of the messages; None: no rounding.
        shards: number of shards whose sums have a fixed order, so that owners add them up; None: MPI adds one sum per rank.
    """

    machine: Machine
    placement: GroupPlacement
    levels: Levels | None
    item_bytes: int  # of an element in the dtype of computation
    rounding: Rounding | None = None
    shards: int | None = None

    def stages(self, kind: OperationKind, n_bytes: float, compression: Compression | None = None) -> tuple[CollectiveStage, ...]:
        """Return the stages of one operation.

        Args:
            n_bytes: bytes of the whole buffer in the dtype of computation, as the function `stages` counts them.
        """
        if compression is not None:
            return self._compressed(kind, n_bytes, compression)
        if self.shards is not None and self.placement.ranks > 1 and kind in _ORDERED:
            return self._ordered(kind, n_bytes, self.shards)
        wire: Wire = "float32"
        if self.rounding is not None and kind not in (OperationKind.NORMS, OperationKind.INPUTS, OperationKind.ERRORS):
            wire = self.rounding.parameters if kind is OperationKind.ALLGATHER else self.rounding.gradients
        if wire == "float32" or self.placement.ranks == 1:
            return self._whole(kind, n_bytes)
        elements = n_bytes / self.item_bytes
        write, read = (count * elements for count in _ROUNDING_BYTES[wire])
        if kind is OperationKind.ALLREDUCE:  # each sum is rounded once more by its owner, and read by all
            return self._allreduce(n_bytes, write, read)
        if kind is OperationKind.REDUCE_SCATTER:
            return self._reduce(n_bytes, write + read)
        return self._working(self._whole(kind, self._sent(n_bytes)), read + write / self.placement.ranks)

    def selection_seconds(self, elements: float) -> float:
        """Return the time of a core to select the largest elements of a part of `elements` elements."""
        return self.memory_seconds(_SELECTION_BYTES * elements)

    def scatter_seconds(self, elements: float, compression: Compression) -> float:
        """Return the time of a core to add the elements from all nodes to a part of `elements` elements."""
        pairs = compression.nodes * compression.kept(round(elements))
        return self.memory_seconds(elements * self.item_bytes + _PAIR_BYTES * pairs)

    def memory_seconds(self, n_bytes: float) -> float:
        """Return the time of a core to read and write `n_bytes` bytes in total; 0 if the machine has no rate of memory."""
        rate = self.machine.rates.get(OperatorClass.MEMORY)
        return n_bytes / rate.bytes_per_second if rate is not None else 0.0

    def _sent(self, n_bytes: float) -> float:
        return 2 * n_bytes / self.item_bytes

    def _whole(self, kind: OperationKind, n_bytes: float) -> tuple[CollectiveStage, ...]:
        return stages(self.machine, kind, n_bytes, self.placement, self.levels)

    def _ordered(self, kind: OperationKind, n_bytes: float, shards: int) -> tuple[CollectiveStage, ...]:
        """Return the stages of a sum whose parts travel to their owners, which add them up in a fixed order.

        Several sums of a rank are copied to one message. An addition reads two elements and writes one.
        """
        ranks = self.placement.ranks
        sums = sum(ShardsOfRank(0, ranks, shards).sums_of_ranks) / ranks
        work_bytes = n_bytes * (3 * sums + (2 * sums if sums > 1 else 0))
        exchanged = self._working(stages(self.machine, OperationKind.INPUTS, sums * n_bytes, self.placement), work_bytes)
        gathers = kind is OperationKind.ALLREDUCE
        return (*exchanged, *(self._whole(OperationKind.ALLGATHER, n_bytes) if gathers else ()))

    def _exchange(
        self, n_bytes: float, work_bytes: float, placement: GroupPlacement | None = None
    ) -> tuple[CollectiveStage, ...]:
        """Return the stages in which all ranks send rounded parts of a buffer to their owners, which add them up."""
        exchanged = stages(self.machine, OperationKind.INPUTS, self._sent(n_bytes), placement or self.placement)
        return self._working(exchanged, work_bytes)

    def _reduce(self, n_bytes: float, work_bytes: float) -> tuple[CollectiveStage, ...]:
        if self.levels is None:
            return self._exchange(n_bytes, work_bytes)
        per_node = self.levels.per_node
        within = stages(self.machine, OperationKind.REDUCE_SCATTER, n_bytes, within_nodes(self.placement, per_node))
        across = across_nodes(self.placement, self.levels.nodes, per_node)
        return (*within, *self._exchange(n_bytes / per_node, work_bytes / per_node, across))

    def _allreduce(self, n_bytes: float, write: float, read: float) -> tuple[CollectiveStage, ...]:
        """Return the stages of an allreduce that sends both the parts and their sums rounded.

        Rounding the buffer once takes the work of `write` bytes, and reading the rounded buffer once that of `read` bytes.
        """
        two, kind = self.levels, OperationKind.ALLGATHER
        if two is None:
            gathered = stages(self.machine, kind, self._sent(n_bytes), self.placement)
            return (*self._exchange(n_bytes, write + read), *self._working(gathered, read + write / self.placement.ranks))
        share, across = n_bytes / two.per_node, across_nodes(self.placement, two.nodes, two.per_node)
        gathered = stages(self.machine, kind, self._sent(share), across)
        work = (read + write / two.nodes) / two.per_node
        within = stages(self.machine, kind, n_bytes, within_nodes(self.placement, two.per_node))
        return (*self._reduce(n_bytes, write + read), *self._working(gathered, work), *within)

    def _compressed(self, kind: OperationKind, n_bytes: float, compression: Compression) -> tuple[CollectiveStage, ...]:
        """Return the stages of a sum or gather within nodes, or of the exchange of values and positions across nodes."""
        nodes = compression.nodes
        per_node = self.placement.ranks // nodes
        if kind is not OperationKind.SPARSE:
            return stages(self.machine, kind, n_bytes, within_nodes(self.placement, per_node)) if per_node > 1 else ()
        across = self.placement if per_node == 1 else across_nodes(self.placement, nodes, per_node)
        elements = compression.kept(-(-round(n_bytes / self.item_bytes) // per_node))
        return stages(self.machine, OperationKind.ALLGATHER, nodes * elements * (self.item_bytes + INDEX_BYTES), across)

    def _working(self, stages_of: tuple[CollectiveStage, ...], work_bytes: float) -> tuple[CollectiveStage, ...]:
        """Return the stages with a core's work, to read and write `work_bytes`, added to the first stage."""
        if not stages_of:
            return ()
        seconds, first = self.memory_seconds(work_bytes), stages_of[0]
        latency, cpu = first.latency_seconds + seconds, first.cpu_seconds + seconds
        return (replace(first, latency_seconds=latency, cpu_seconds=cpu), *stages_of[1:])
