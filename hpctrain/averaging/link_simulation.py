"""The order in which slices travel: from measured times, by simulating one link; the order of operations changes no bit.

`StepClock` measures at which times of a step gradients become ready and parameters are needed, `over_ranks` makes those of a
typical rank of them, the same on every rank, and `best_order` simulates the link with them.

`SliceTraffic` has the slices that share the link, and how long each takes: gradients, factors or the largest elements, in full
or rounded.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from statistics import median

import numpy as np

from hpctrain.averaging.sixteen_bits import Rounding, wire_bytes
from hpctrain.averaging.slicing import INDEX_BYTES, Slice, layer_slices
from hpctrain.comm.base import Communicator
from hpctrain.comm.link import LinkModel
from hpctrain.comm.progress import ProgressEngine
from hpctrain.core.intervals import even


@dataclass(frozen=True)
class Times:
    """Seconds of compute since a step's begin; waits are taken out.

    ready: by parameter, when its gradient (or the error of its layer) is announced. free: when its data is released. needed: when
    forward reads it; empty where that is unknown. end_seconds: when backward ends.
    """

    ready: Mapping[str, float]
    free: Mapping[str, float]
    needed: Mapping[str, float] = field(default_factory=dict)
    end_seconds: float = 0.0

    def longest_gap(self) -> float:
        """Return the longest time between two gradients that become ready one after the other, in seconds."""
        return max((later - earlier for earlier, later in pairwise(sorted(self.ready.values()))), default=0.0)

    def late(self) -> Times:
        """Return the times as if all became ready one gradient later.

        What a single queue sends next must be ready then, or everything after it waits.
        """
        later = self.longest_gap()
        ready, free = ({name: at + later for name, at in times.items()} for times in (self.ready, self.free))
        return Times(ready, free, self.needed, self.end_seconds)

    def looks(self) -> list[float]:
        """Return the instants at which the program surely polls, ascending: where a parameter's part of the work ends."""
        read = (self.end_seconds + at for at in self.needed.values())  # of the next step
        return sorted({*self.ready.values(), *self.free.values(), *read})

    @staticmethod
    def unknown(parameters: Sequence[str]) -> Times:
        """Return times of a backward in which each parameter takes 1 s, from the last one to the first.

        Data is released when backward ends.
        """
        last = float(len(parameters))
        ready = {name: last - position for position, name in enumerate(parameters)}
        return Times(ready, dict.fromkeys(parameters, last + 1.0))

    def to_array(self, parameters: Sequence[str]) -> np.ndarray:
        """Return float64 (3 n + 1,), of n parameters: ready, free, needed (NaN if unknown), then the end."""
        of_kinds = (of_kind.get(name, np.nan) for of_kind in (self.ready, self.free, self.needed) for name in parameters)
        return np.array([*of_kinds, self.end_seconds])

    @staticmethod
    def from_array(parameters: Sequence[str], values: np.ndarray) -> Times:
        """Return the times that `to_array` wrote."""
        *of_kinds, end_seconds = values.tolist()
        ready, free, needed = (
            {name: at for name, at in zip(parameters, of_kind, strict=True) if not math.isnan(at)}
            for of_kind in np.reshape(of_kinds, (3, len(parameters))).tolist()
        )
        return Times(ready, free, needed, end_seconds)


def upper_medians(seconds: np.ndarray) -> np.ndarray:
    """Return (events,) from (ranks, events): of each event the upper median over the ranks that know it; NaN if none does.

    Of two ranks it is the later one, as a collective starts when both have posted it; of many no odd one matters, be it a rank
    that something disturbed while it measured. A maximum would follow that one, and a mean in part.
    """
    ordered = np.sort(seconds, axis=0)  # NaN last
    known = np.count_nonzero(~np.isnan(seconds), axis=0)
    medians: np.ndarray = np.take_along_axis(ordered, known[np.newaxis] // 2, axis=0)[0]
    return medians


class StepClock:
    """A clock of forward's reads, ready gradients and released data: seconds of compute since the step's begin, medians.

    Waits are taken out: what hides under them would otherwise be planned as if it cost time.
    """

    def __init__(self, progress: ProgressEngine) -> None:
        self._progress = progress
        self._on = False
        self._begin = 0.0
        self._ready: dict[str, list[float]] = {}
        self._free: dict[str, list[float]] = {}
        self._needed: dict[str, list[float]] = {}
        self._ends: list[float] = []

    def begin(self, on: bool) -> None:
        """Begin a step. on: it is measured."""
        self._on = on
        self._begin = self._compute_seconds()

    def needed(self, name: str) -> None:
        """Note that forward reads a parameter."""
        if len(self._needed.get(name, ())) == len(self._ends):  # the first of several micro-batches
            self._note(self._needed, name)

    def ready(self, name: str) -> None:
        """Note that a gradient is announced."""
        self._note(self._ready, name)

    def free(self, name: str) -> None:
        """Note that backward has released a parameter's data."""
        self._note(self._free, name)

    def end(self, names: Sequence[str]) -> None:
        """Note that backward has ended, and with it what was not announced."""
        for name in names:
            for times in (self._ready, self._free):
                if self._on and len(times.get(name, ())) < max(map(len, times.values()), default=1):
                    self._note(times, name)
        if self._on:
            self._ends.append(self._compute_seconds() - self._begin)

    def times(self) -> Times:
        """Return the medians over the measured steps, of which there must be at least one."""
        ready, free, needed = (
            {name: median(seconds) for name, seconds in times.items()} for times in (self._ready, self._free, self._needed)
        )
        return Times(ready, free, needed, median(self._ends))

    def _note(self, times: dict[str, list[float]], name: str) -> None:
        if self._on:
            times.setdefault(name, []).append(self._compute_seconds() - self._begin)

    def _compute_seconds(self) -> float:
        return self._progress.now() - self._progress.waited_seconds


def over_ranks(times: Times, names: Sequence[str], comm: Communicator, progress: ProgressEngine) -> Times:
    """Return the times of a typical rank (`upper_medians`), from those of all ranks. Collective; the same bits on every rank.

    Args:
        times: measured on this rank. names: of the parameters, the same on every rank.
        comm: all ranks that order their operations alike; nothing else is under way on it.
    """
    measured = times.to_array(names)
    counts = even(measured.size, comm.size)  # each rank looks at a share of the events, so that none holds those of all ranks
    share = np.empty((comm.size, counts[comm.rank]))
    progress.wait_handle(
        comm.ialltoall(measured, share.reshape(-1), counts, [counts[comm.rank]] * comm.size), "times of all ranks"
    )
    typical = np.empty(measured.size)
    progress.wait_handle(comm.iallgather(upper_medians(share), typical, counts), "times of a typical rank")
    return Times.from_array(names, typical)


@dataclass(frozen=True)
class SliceTraffic:
    """The slices that ranks exchange in a step.

    Attributes:
        item_bytes: of an element in memory. batch: nominal samples of a step over all ranks, for the errors of linear layers.
        rounding: how gradients and parameters travel.
        norms: slices that are gathered once norms of all of them are complete.
    """

    slices: Sequence[Slice]
    ranks: int
    item_bytes: int
    batch: int
    rounding: Rounding = field(default_factory=Rounding)
    norms: Sequence[range] = ()

    def reduce_seconds(self, piece: Slice, link: LinkModel) -> float:
        """Return the seconds until a slice's sum is where it is used.

        It is reduced, or made from errors; if compressed, within a node and then across nodes.
        """
        if piece.compression is not None:
            nodes, per_node = piece.compression.nodes, self.ranks // piece.compression.nodes
            message = piece.compression.kept(piece.owned_size(0, self.ranks)) * (self.item_bytes + INDEX_BYTES)
            within = link.allgather_seconds(piece.size * self.item_bytes, per_node)
            return within + link.allgather_seconds(nodes * message, nodes)
        if piece.sufficient_factors:
            return link.allgather_seconds(self.batch * piece.unit * self.item_bytes, self.ranks)
        return link.allgather_seconds(wire_bytes(piece.size, self.item_bytes, self.rounding.gradients), self.ranks)

    def gather_seconds(self, piece: Slice, link: LinkModel) -> float:
        """Return the seconds of the allgather of a slice's parameters: of all ranks or, if compressed, of a node's."""
        n_bytes = wire_bytes(piece.size, self.item_bytes, self.rounding.parameters)
        return link.allgather_seconds(n_bytes, self.ranks // piece.copies)


#: among what could be sent now, the least goes first: (order, ready time, whether it is a gather) -> key
Urgency = Callable[[int, float, bool], tuple[float, ...]]

# Two streams, each in an order of its own, err on different sides. A reduction whose gradient comes later than planned holds up
# all after it while the link idles: so one overtakes others only where they would still wait on a link that is faster than the
# measured one, and hides all latencies. A gather whose sum comes later than planned holds up those of front layers: so late
# layers' go before them only where a slower link would have the sum in time.
_FASTER = 1.5
_SLOWER = 1.25


def front_first(order: int, ready: float, gather: bool) -> tuple[float, ...]:
    """Order by layer, front ones first; within a layer reductions first."""
    return (order, gather, ready)


def reductions_first(order: int, ready: float, gather: bool) -> tuple[float, ...]:
    """Order reductions as they become ready, then gathers, front layers first."""
    return (True, order) if gather else (False, ready)


class LinkSimulation:
    """A link with one transfer at a time, the most urgent one that is ready; it idles only if nothing should start.

    Reductions become ready at `times.ready`, gathers when the slice is reduced and its data free. A gather does not start where
    the next gradient would find it under way for longer than `overrun_seconds`: a reduction that comes late may hold up the next
    forward. Deterministic; ties go by position.

    Norms, where some gathers need them, are a message after the last reduction of their slices, and seen half a gradient later.

    Args:
        looks: instants at which the program polls messages, ascending; after the last it polls all the time. A gather starts one
            poll after the poll that finds its sum complete, because it progresses only after all ranks have posted it and
            polled again. Empty: the program polls all the time, and a gather starts when its sum is complete.
    """

    def __init__(
        self,
        traffic: SliceTraffic,
        times: Times,
        link: LinkModel,
        urgency: Urgency,
        overrun_seconds: float = 0.0,
        looks: Sequence[float] = (),
    ) -> None:
        self._looks, slices = looks, traffic.slices
        self._slices, self._times, self._urgency, self._overrun_seconds = slices, times, urgency, overrun_seconds
        # Slices of one linear layer's sufficient factors are reduced together, with the first.
        together = [layer_slices(slices, k) for k in range(len(slices))]
        self._together = [members if members[0] == k else () for k, members in enumerate(together)]
        self._gather_seconds = [traffic.gather_seconds(piece, link) for piece in slices]
        self._reduce_seconds = [traffic.reduce_seconds(piece, link) for piece in slices]
        self._norms = {k: group for group in traffic.norms for k in group}
        # Both the end of a sum and that of norms are seen at a poll; the one that a gather comes after costs nothing else.
        self._norms_seconds = link.allgather_seconds(0, traffic.ranks) + times.longest_gap() / 2
        self._unsummed: dict[range, int] = {}  # how many slices of each group of norms
        self._reductions: list[tuple[float, int]] = []  # (ready time, slice), the next one last
        self._reduced: list[tuple[float, int]] = []  # (when it may be gathered, slice), a heap
        self._waiting: list[tuple[tuple[float, ...], int, bool]] = []  # (urgency, slice, gather), a heap
        self._gathered = [0.0] * len(slices)  # when each slice has been gathered

    def stall_seconds(self) -> float:
        """Return, after `order`, how long the next forward waits for parameters in all, if times say when it reads them."""
        latest: dict[str, float] = {}
        for piece, at in zip(self._slices, self._gathered, strict=True):
            for name in (*piece.parameters, *piece.replicated):
                latest[name] = max(at, latest.get(name, 0.0))
        stall = 0.0
        for name, needed in sorted(self._times.needed.items(), key=lambda item: item[1]):
            stall += max(0.0, latest[name] - (self._times.end_seconds + needed + stall))
        return stall

    def order(self) -> list[tuple[int, bool]]:
        """Return (slice, whether it is its gather) in the order in which they are sent."""
        ready = ((self._latest(self._times.ready, self._slices[k]), k) for k, members in enumerate(self._together) if members)
        self._reductions = sorted(ready, reverse=True)
        self._unsummed = {group: len(group) for group in self._norms.values()}
        sent: list[tuple[int, bool]] = []
        now = 0.0
        while self._reductions or self._reduced or self._waiting:
            self._arrive(now)
            if not self._waiting or self._should_idle(now):
                now = min(arrivals[-1][0] for arrivals in (self._reductions, self._reduced[:1]) if arrivals)
                continue
            _, k, gather = heappop(self._waiting)
            sent.append((k, gather))
            now += self._gather_seconds[k] if gather else self._reduce_seconds[k]
            if gather:
                self._gathered[k] = now
            else:
                for member in self._together[k]:
                    self._sum(member, now)
        return sent

    def _sum(self, k: int, now: float) -> None:
        """Note that a slice is reduced: it may be gathered, or all that wait for the same norms may."""
        group = self._norms.get(k)
        if group is None:
            self._may_gather(k, now)
            return
        self._unsummed[group] -= 1
        for member in group if self._unsummed[group] == 0 else ():
            self._may_gather(member, now + self._norms_seconds)

    def _may_gather(self, k: int, summed: float) -> None:
        """Let a summed slice be gathered once its data is released and the program has looked again."""
        at = max(summed, self._latest(self._times.free, self._slices[k]))
        if self._looks and at <= self._looks[-1]:
            at = self._looks[min(bisect_left(self._looks, at) + 1, len(self._looks) - 1)]
        heappush(self._reduced, (at, k))

    def _should_idle(self, now: float) -> bool:
        _, k, gather = self._waiting[0]
        if not gather or not self._reductions:
            return False
        return now + self._gather_seconds[k] > self._reductions[-1][0] + self._overrun_seconds

    def _arrive(self, now: float) -> None:
        while self._reductions and self._reductions[-1][0] <= now:
            at, k = self._reductions.pop()
            heappush(self._waiting, (self._urgency(self._slices[k].order, at, False), k, False))
        while self._reduced and self._reduced[0][0] <= now:
            at, k = heappop(self._reduced)
            heappush(self._waiting, (self._urgency(self._slices[k].order, at, True), k, True))

    def _latest(self, times: Mapping[str, float], piece: Slice) -> float:
        return max(times[name] for name in (*piece.parameters, *piece.replicated))


def best_order(
    traffic: SliceTraffic, times: Times, link: LinkModel, urgency: Urgency, looks: Sequence[float] = ()
) -> list[tuple[int, bool]]:
    """Return the order that exposes least, of a few.

    Gathers under backward never hold up a gradient, or do for a limited time.
    """
    gap = times.longest_gap() if times.needed else 0.0
    orders: list[tuple[float, int, list[tuple[int, bool]]]] = []  # (stall, number, order): the first of equals is taken
    for overrun_seconds in (0.0, gap / 4, gap, math.inf) if gap else (0.0,):
        simulation = LinkSimulation(traffic, times, link, urgency, overrun_seconds, looks)
        order = simulation.order()
        orders.append((simulation.stall_seconds(), len(orders), order))
    return min(orders)[2]


def two_stream_order(traffic: SliceTraffic, times: Times, link: LinkModel, urgency: Urgency) -> list[tuple[int, bool]]:
    """Return an order of reductions and one of gathers, which are on streams of their own, merged in one list.

    Each gather comes after what it needs.

    Reductions go as over a link at its best, gathers as over one at its worst, one look late.
    """
    at_best = LinkModel(0.0, link.beta_seconds_per_byte / _FASTER)
    at_worst = LinkModel(link.alpha_seconds, link.beta_seconds_per_byte * _SLOWER)
    reductions = LinkSimulation(traffic, times, at_best, urgency).order()
    gathers = best_order(traffic, times, at_worst, urgency, times.looks())
    return _merged(traffic, [k for k, gather in reductions if not gather], [k for k, gather in gathers if gather])


def _merged(traffic: SliceTraffic, reductions: Sequence[int], gathers: Sequence[int]) -> list[tuple[int, bool]]:
    """Return both orders in one, gathers as early as possible: after their slice's reduction, and those that norms need."""
    reduced_by = {member: k for k in reductions for member in layer_slices(traffic.slices, k)}
    group_of = {k: group for group in traffic.norms for k in group}
    place = {k: position for position, k in enumerate(reductions)}
    sent: list[tuple[int, bool]] = []
    begun = 0
    for gathered in gathers:
        behind = max(place[reduced_by[k]] for k in group_of.get(gathered, (gathered,))) + 1
        sent += [(k, False) for k in reductions[begun:behind]]
        sent.append((gathered, True))
        begun = max(begun, behind)
    return sent
