"""Collectives on a machine: the stages that one consists of, and what each of them costs. Pure functions.

The algorithms are those that MPICH (and Cray's MPI, which comes from it) takes for nonblocking collectives on plain arrays, after
Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 2005. n is the whole
buffer's size in bytes, P the number of ranks:

    reduce-scatter      below 512 KiB recursive halving: ceil(log2 P) rounds, the first with half of n to the farthest rank;
                        from there on pairwise: P - 1 rounds of n / P, in round d to the d-th next rank
    allgather           below 512 KiB recursive doubling, to the nearest rank first, where P is a power of two; below 80 KiB
                        Bruck's for any other P, with as many rounds; from there on a ring: P - 1 rounds of n / P
    allreduce           up to 2 KiB recursive doubling: ceil(log2 P) rounds of n; from there on halving and then doubling
    all-to-all          all messages at once, one to each rank that gets anything
    in two levels       as comm/groups.py does: each level is a collective by itself

Ranks that halve or double in numbers that are no power of two send whole buffers to a partner first, and get them at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from hpctrain.averaging.collective_schedule import OperationKind
from hpctrain.comm.groups import Levels
from hpctrain.planner.machine import Link, Machine
from hpctrain.planner.tasks import GroupPlacement

#: of tasks that are no operation of a schedule: an all-to-all of the split group, batch statistics, the step's message
Kind = OperationKind | Literal["exchange", "merge", "message"]

_LONG_BYTES = 512 << 10  # of a reduce-scatter and an allgather
_BRUCK_BYTES = 80 << 10  # of an allgather among ranks that are no power of two
_SHORT_ALLREDUCE_BYTES = 2 << 10

_REDUCTIONS = (OperationKind.ALLREDUCE, OperationKind.NORMS, "message")
_GATHERS = (OperationKind.ALLGATHER, OperationKind.ERRORS, "merge")
_ALL_TO_ALLS = (OperationKind.INPUTS, "exchange")
_LEVELLED = (OperationKind.REDUCE_SCATTER, OperationKind.ALLGATHER, OperationKind.ERRORS)


@dataclass(frozen=True)
class Stage:
    """A stage of a collective: it begins when the one before it is complete, on all ranks of the group together.

    Attributes:
        between: it is bound by the network cards of nodes; else by a rank's own copies through the memory of its node.
        latency_seconds: of all its rounds. wire_bytes: that one rank sends through what it is bound by, a mean over ranks.
        beta_seconds_per_byte: of it, while nothing else goes through. cpu_seconds: of each rank's core, within the stage's time
            where the rank waits for it, and in addition to what the rank computes where it does not.
        rounds: that follow each other; the program has to look at a collective once for each.
        sharers: ranks whose wire_bytes go through the same card when all groups alike do this at once; 1 within a node.
        unattended_bytes: of wire_bytes, that move between two polls of the rank; None: all of a round.
        polls: that each round needs before its first byte moves.
        yields: shorter messages of a rank to the same others pass its own.
    """

    between: bool
    latency_seconds: float
    wire_bytes: float
    beta_seconds_per_byte: float
    cpu_seconds: float
    rounds: int
    sharers: float = 1.0
    unattended_bytes: float | None = None
    polls: int = 0
    yields: bool = False

    @property
    def wire_seconds(self) -> float:
        """Time on the wire for all groups alike at once; other operations that use the same wire come on top."""
        return self.wire_bytes * self.sharers * self.beta_seconds_per_byte

    @property
    def seconds(self) -> float:
        """Time that it takes where ranks do nothing but wait for it, all groups alike at once and nothing else."""
        return max(self.latency_seconds + self.wire_seconds, self.cpu_seconds)


def unhindered_seconds(stages: Iterable[Stage], burst_seconds: float = 0.0) -> float:
    """Time of an operation of these stages where ranks do nothing but wait for it.

    Args:
        burst_seconds: that a pause before it saves on the cards of nodes (`Link.burst_seconds`); 0: it follows others.
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
) -> tuple[Stage, ...]:
    """The stages of one operation, one after another; none where there is one rank or nothing to move.

    Args:
        n_bytes: of the whole buffer, as comm/link.py counts: what every rank sends in a reduction, what is gathered, and the
            largest buffer with its own piece in an all-to-all of all ranks. With `peers`: what a rank sends to others.
        placement: of the group's ranks. Those of a node are neighbours, unless `levels` puts them in its order.
        levels: those of the group's streams; None: one level.
        peers: ranks that a rank exchanges with, nearest ones first, in an all-to-all that leaves others out.
    """
    ranks = placement.ranks
    if ranks == 1 or n_bytes == 0 or peers == 0:
        return ()
    if levels is not None and kind in _LEVELLED:
        return _in_two_levels(machine, kind, n_bytes, placement, levels)
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


def _in_two_levels(machine: Machine, kind: Kind, n_bytes: float, placement: GroupPlacement, levels: Levels) -> tuple[Stage, ...]:
    """A reduction within nodes, then across them; a gather the other way round. Across, each rank has its number's share."""
    within = stages(machine, kind, n_bytes, within_nodes(placement, levels.per_node))
    across = stages(machine, kind, n_bytes / levels.per_node, across_nodes(placement, levels.nodes, levels.per_node))
    return (*within, *across) if kind is OperationKind.REDUCE_SCATTER else (*across, *within)


def within_nodes(placement: GroupPlacement, per_node: int) -> GroupPlacement:
    """The ranks of a group that are on one node. per_node: how many."""
    return GroupPlacement(per_node, 1, per_node, placement.alike)


def across_nodes(placement: GroupPlacement, nodes: int, per_node: int) -> GroupPlacement:
    """The ranks of a group that have one number on all nodes, beside those of all other numbers. per_node: how many there are."""
    return GroupPlacement(nodes, nodes, 1, placement.alike * per_node)


@dataclass(frozen=True)
class _Round:
    """Messages of `n_bytes` from every rank.

    distance: in ranks, to the one that gets it. count: such rounds. ring: it goes to the rank behind; else two ranks exchange.
    peers: so many messages instead, to the nearest ranks on both sides. at_once: its messages do not wait for each other.
    sums: what arrives is added up.
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
        """The share of the messages that leave their node. spread: neighbours lie on different nodes, as in levels' order."""
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
        # MPICH's allreduce halves from the nearest rank on, so that most bytes stay near.
        shares = [one.n_bytes for one in _halving(n_bytes, power)]
        near = list(zip(shares, _powers(power), strict=True))
        middle = [_Round(share, distance, sums=True) for share, distance in near]
        middle += [_Round(share, distance) for share, distance in reversed(near)]
    if power == ranks:
        return middle
    return [_Round(n_bytes, 1, sums=True), *middle, _Round(n_bytes, 1)]


def _halving(n_bytes: float, power: int, *, sums: bool = False) -> list[_Round]:
    """Half of the buffer to the farthest rank, then a quarter to one half as far, ..."""
    return [_Round(n_bytes * distance / power, distance, sums=sums) for distance in reversed(_powers(power))]


def _powers(power: int) -> list[int]:
    """1, 2, 4, ... below `power`."""
    return [1 << exponent for exponent in range(power.bit_length() - 1)]


def _power_below(ranks: int) -> int:
    """The largest power of two that is no larger."""
    return 1 << (ranks.bit_length() - 1)


def _priced(machine: Machine, rounds: Sequence[_Round], placement: GroupPlacement, spread: bool) -> tuple[Stage, ...]:
    """Rounds in which messages leave nodes and rounds in which none does, each run of them one stage."""
    runs: list[list[tuple[_Round, float]]] = []
    for one in rounds:
        crossing = one.crossing(placement, spread)
        if not runs or (runs[-1][-1][1] > 0) != (crossing > 0):
            runs.append([])
        runs[-1].append((one, crossing))
    # A collective is posted once: its first stage has what that costs.
    return tuple(_stage(machine, run, placement, posts=position == 0) for position, run in enumerate(runs))


def _stage(machine: Machine, run: Sequence[tuple[_Round, float]], placement: GroupPlacement, *, posts: bool) -> Stage:
    """The stage of rounds, each with its share of messages that leave their node: all of the shares are 0, or none."""
    rounds = [one for one, _ in run]
    sent = sum(one.messages * one.n_bytes for one in rounds)
    crossing = sum(one.messages * one.n_bytes * share for one, share in run)
    link = machine.between if crossing else machine.within
    cpu = 2 * (crossing * machine.between.byte_seconds + (sent - crossing) * machine.within.byte_seconds)
    summed = link.sum_seconds * sum(one.messages * one.n_bytes for one in rounds if one.sums)
    latency, beta = _message_costs(link, rounds)
    _, within_beta = _message_costs(machine.within, rounds)
    sharers = _sharers(machine, placement, crossing / sent if any(one.ring for one in rounds) else 1.0)
    # A ring in which one rank of a node sends to the next node may be held up by the copies of the other ranks.
    if crossing and (sent - crossing) * within_beta <= crossing * sharers * beta:
        between, wire = True, crossing
    else:
        between, wire, beta, sharers = False, sent - crossing, within_beta, 1.0
    largest = link.segment(max(one.n_bytes for one in rounds))
    unattended = None
    if largest.unattended_bytes is not None:  # messages of a round move side by side
        unattended = largest.unattended_bytes * max(one.messages / one.rounds for one in rounds) * wire / sent
    return Stage(
        between=between,
        latency_seconds=latency + summed,
        wire_bytes=wire,
        beta_seconds_per_byte=beta,
        cpu_seconds=cpu + summed + link.operation_seconds * posts,
        rounds=sum(one.rounds for one in rounds),
        sharers=sharers,
        unattended_bytes=unattended,
        polls=largest.polls,
        yields=link.is_passed(largest),
    )


def _message_costs(link: Link, rounds: Sequence[_Round]) -> tuple[float, float]:
    """Latency of all messages, and the mean time of a byte."""
    segments = [link.segment(one.n_bytes) for one in rounds]
    latency = sum(one.messages * segment.alpha_seconds for one, segment in zip(rounds, segments, strict=True))
    sizes = [one.messages * one.n_bytes for one in rounds]
    wire = sum(size * segment.beta_seconds_per_byte for size, segment in zip(sizes, segments, strict=True))
    return latency, wire / sum(sizes)


def _sharers(machine: Machine, placement: GroupPlacement, crossing: float) -> float:
    """Ranks of a node whose bytes go through the same card, all groups alike counted: cards are used evenly.

    Args:
        crossing: the share of the ranks that send to other nodes: in a ring only the last of a node does.
    """
    cards = max(1, machine.ranks_per_node // machine.ranks_per_card)
    using = placement.per_node * placement.alike
    return max(1.0, using / min(cards, max(1.0, using * crossing)))
