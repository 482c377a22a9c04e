"""Order in which slices are sent, planned by simulating one link with measured times. The order of operations changes no bit.

`StepClock` measures when gradients become ready and parameters are needed within a step. `over_ranks` combines these times into
those of a typical rank, the same on every rank. `best_order` simulates the link with them.

`SliceTraffic` contains the slices that share the link and the transfer time of each slice: gradients, factors or the largest
elements, in full precision or rounded.
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
    """Compute time, in seconds, from the beginning of a step to its events. Waits are excluded.

    Attributes:
        ready: time at which the gradient, or the error of its layer, is announced, by parameter.
        free: time at which the data is released, by parameter.
        needed: time at which forward reads the data, by parameter; empty if unknown.
        end_seconds: end of backward.
    """

    ready: Mapping[str, float]
    free: Mapping[str, float]
    needed: Mapping[str, float] = field(default_factory=dict)
    end_seconds: float = 0.0

    def longest_gap(self) -> float:
        """Return the longest time in seconds between two consecutive gradients."""
        return max((later - earlier for earlier, later in pairwise(sorted(self.ready.values()))), default=0.0)

    def late(self) -> Times:
        """Return the times with gradients and data ready later by `longest_gap`.

        They are used for a single queue, in which an operation that is not ready delays all operations after it. The later times
        are a safety margin.
        """
        later = self.longest_gap()
        ready, free = ({name: at + later for name, at in times.items()} for times in (self.ready, self.free))
        return Times(ready, free, self.needed, self.end_seconds)

    def looks(self) -> list[float]:
        """Return the times at which the program is certain to poll, ascending: the ends of the work on each parameter."""
        read = (self.end_seconds + at for at in self.needed.values())  # of the next step
        return sorted({*self.ready.values(), *self.free.values(), *read})

    @staticmethod
    def unknown(parameters: Sequence[str]) -> Times:
        """Return assumed times before any measurement: backward takes 1 s per parameter, from the last to the first.

        Data is released when backward ends.
        """
        last = float(len(parameters))
        ready = {name: last - position for position, name in enumerate(parameters)}
        return Times(ready, dict.fromkeys(parameters, last + 1.0))

    def to_array(self, parameters: Sequence[str]) -> np.ndarray:
        """Return float64 (3 n + 1,) for n parameters: ready, free, needed (NaN if unknown), then the end of backward."""
        seconds = (times.get(name, np.nan) for times in (self.ready, self.free, self.needed) for name in parameters)
        return np.array([*seconds, self.end_seconds])

    @staticmethod
    def from_array(parameters: Sequence[str], values: np.ndarray) -> Times:
        """Return the times that `to_array` wrote."""
        *seconds, end_seconds = values.tolist()
        ready, free, needed = (
            {name: at for name, at in zip(parameters, times, strict=True) if not math.isnan(at)}
            for times in np.reshape(seconds, (3, len(parameters))).tolist()
        )
        return Times(ready, free, needed, end_seconds)


def upper_medians(seconds: np.ndarray) -> np.ndarray:
    """Return the upper median (events,) over the ranks of `seconds` (ranks, events). NaN entries are ignored; NaN if all are NaN.

    For two ranks the upper median is the later time, because a collective starts when both have posted it. For many ranks it is
    robust against outliers, such as a rank that was disturbed during the measurement; a maximum or a mean is not.
    """
    ordered = np.sort(seconds, axis=0)  # NaN last
    known = np.count_nonzero(~np.isnan(seconds), axis=0)
    medians: np.ndarray = np.take_along_axis(ordered, known[np.newaxis] // 2, axis=0)[0]
    return medians


class StepClock:
    """Clock for the events of a step: reads by forward, ready gradients and released data.

    Times are seconds of computation since the beginning of the step. Waits are excluded, because otherwise communication during a
    wait would be planned as if it cost time.

    Attributes:
        on: whether the step is measured. Otherwise the calls for its events have no effect and may be omitted.
    """

    def __init__(self, progress: ProgressEngine) -> None:
        self._progress = progress
        self.on = False
        self._begin = 0.0
        self._ready: dict[str, list[float]] = {}
        self._free: dict[str, list[float]] = {}
        self._needed: dict[str, list[float]] = {}
        self._ends: list[float] = []

    def begin(self, on: bool) -> None:
        """Begin a step, which is measured if `on` is True."""
        self.on = on
        self._begin = self._compute_seconds()

    def needed(self, name: str) -> None:
        """Record that forward reads parameter `name` now. Only the first call of a step has an effect."""
        if len(self._needed.get(name, ())) == len(self._ends):  # the first of several micro-batches
            self._note(self._needed, name)

    def ready(self, name: str) -> None:
        """Record that the gradient of parameter `name` is announced now."""
        self._note(self._ready, name)

    def free(self, name: str) -> None:
        """Record that backward releases the data of parameter `name` now."""
        self._note(self._free, name)

    def end(self, names: Sequence[str]) -> None:
        """Record the end of backward, also as the time of gradients and data of `names` that were not announced."""
        if not self.on:
            return
        for name in names:
            for times in (self._ready, self._free):
                if len(times.get(name, ())) < max(map(len, times.values()), default=1):
                    self._note(times, name)
        self._ends.append(self._compute_seconds() - self._begin)

    def times(self) -> Times:
        """Return the medians over the measured steps. There must be at least one."""
        ready, free, needed = (
            {name: median(seconds) for name, seconds in times.items()} for times in (self._ready, self._free, self._needed)
        )
        return Times(ready, free, needed, median(self._ends))

    def _note(self, times: dict[str, list[float]], name: str) -> None:
        if self.on:
            times.setdefault(name, []).append(self._compute_seconds() - self._begin)

    def _compute_seconds(self) -> float:
        return self._progress.now() - self._progress.waited_seconds


def over_ranks(times: Times, names: Sequence[str], comm: Communicator, progress: ProgressEngine) -> Times:
    """Return the times of a typical rank (`upper_medians`) from those of all ranks. Collective; the same bits on every rank.

    Args:
        names: names of the parameters, the same on every rank.
        comm: communicator of the ranks that use the same order; no other operation may be in progress on it.
    """
    measured = times.to_array(names)
    counts = even(measured.size, comm.size)  # each rank handles a share of the events, so that none holds all events of all ranks
    share = np.empty((comm.size, counts[comm.rank]))
    progress.wait_handle(
        comm.ialltoall(measured, share.reshape(-1), counts, [counts[comm.rank]] * comm.size), "times of all ranks"
    )
    typical = np.empty(measured.size)
    progress.wait_handle(comm.iallgather(upper_medians(share), typical, counts), "times of a typical rank")
    return Times.from_array(names, typical)


@dataclass(frozen=True)
class SliceTraffic:
    """Slices that ranks exchange in a step.

    Attributes:
        item_bytes: bytes of an element in memory.
        batch: nominal samples of a step over all ranks, for the errors of linear layers.
        rounding: number formats of gradients and parameters on the wire.
        norms: ranges of slices that are gathered only once the norms of the whole range are complete.
    """

    slices: Sequence[Slice]
    ranks: int
    item_bytes: int
    batch: int
    rounding: Rounding = field(default_factory=Rounding)
    norms: Sequence[range] = ()

    def reduce_seconds(self, piece: Slice, link: LinkModel) -> float:
        """Return the seconds from the start of a slice's reduction until the sum is complete.

        The sum is a reduce-scatter, or is computed from exchanged errors. Compressed slices are summed within a node and then
        across nodes.
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
        """Return the seconds of the allgather of a slice's parameters, over all ranks or, if compressed, within a node."""
        n_bytes = wire_bytes(piece.size, self.item_bytes, self.rounding.parameters)
        return link.allgather_seconds(n_bytes, self.ranks // piece.copies)


#: (order, ready time, whether it is a gather) -> key; the ready transfer with the smallest key goes first
Urgency = Callable[[int, float, bool], tuple[float, ...]]

# The orders of the two streams need different margins. A reduction whose gradient is later than planned delays all later ones
# while the link idles. It therefore overtakes others only if they would wait even on a link that is faster than the measured
# one and hides all latencies. A gather whose sum is later than planned delays the gathers of front layers. Gathers of late
# layers therefore precede them only if even a slower link would have the sum in time.
_FASTER = 1.5
_SLOWER = 1.25


def front_first(order: int, ready: float, gather: bool) -> tuple[float, ...]:
    """Return a key that orders transfers by layer, front layers first; within a layer, reductions come first."""
    return (order, gather, ready)


def reductions_first(order: int, ready: float, gather: bool) -> tuple[float, ...]:
    """Return a key that puts reductions first, in the order in which they become ready, then gathers, front layers first."""
    return (True, order) if gather else (False, ready)


class LinkSimulation:
    """Simulation of a link with one transfer at a time, always the most urgent one that is ready.

    The simulation is deterministic; among equal keys, the slice with the lowest index comes first. Reductions become ready at
    `times.ready`, gathers once the slice is reduced and its data is free. A gather does not start if it would end more than
    `overrun_seconds` after the next gradient becomes ready, because a late reduction may delay the next forward.

    If gathers need norms, the norms of a group of slices are complete one message after the last reduction of the group, and are
    noticed half of the longest gap between gradients later.

    Args:
        traffic: slices on the link.
        urgency: function that returns the key of a transfer; the smallest key goes first.
        overrun_seconds: maximum delay of a gradient by a gather.
        looks: times at which the program polls, ascending; after the last one it polls continuously. A gather starts one poll
            after the poll that finds its sum complete, because it progresses only after all ranks have posted it and polled
            again. Empty: the program polls continuously, and a gather starts when its sum is complete.
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
        # Ends of sums and of norms are noticed at a poll, half a gap late on average; the message itself costs only latency.
        self._norms_seconds = link.allgather_seconds(0, traffic.ranks) + times.longest_gap() / 2
        self._unsummed: dict[range, int] = {}  # number of unreduced slices of each group of norms
        self._reductions: list[tuple[float, int]] = []  # (ready time, slice), descending
        self._reduced: list[tuple[float, int]] = []  # heap of (earliest time of the gather, slice)
        self._waiting: list[tuple[tuple[float, ...], int, bool]] = []  # heap of (urgency, slice, gather)
        self._gathered = [0.0] * len(slices)  # end of the gather, by slice

    def stall_seconds(self) -> float:
        """Return the total time that the next forward waits for parameters; 0 without `times.needed`. Call it after `order`."""
        latest: dict[str, float] = {}
        for piece, at in zip(self._slices, self._gathered, strict=True):
            for name in (*piece.parameters, *piece.replicated):
                latest[name] = max(at, latest.get(name, 0.0))
        stall = 0.0
        for name, needed in sorted(self._times.needed.items(), key=lambda item: item[1]):
            stall += max(0.0, latest[name] - (self._times.end_seconds + needed + stall))
        return stall

    def order(self) -> list[tuple[int, bool]]:
        """Return pairs (slice, whether this is its gather) in the order in which they are sent."""
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
        """Record that slice `k` is reduced. Its gather may start from `now`, or once the norms that it needs are complete."""
        group = self._norms.get(k)
        if group is None:
            self._may_gather(k, now)
            return
        self._unsummed[group] -= 1
        for member in group if self._unsummed[group] == 0 else ():
            self._may_gather(member, now + self._norms_seconds)

    def _may_gather(self, k: int, summed: float) -> None:
        """Schedule the gather of a summed slice for the time when its data is released and the program has polled again."""
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
    """Return the order with the smallest stall among a few candidates.

    The candidates differ in the maximum delay of a gradient by a gather during backward: none, a quarter of the longest gap
    between gradients, a whole gap, or unlimited. Without `times.needed`, the only candidate has no delay.
    """
    gap = times.longest_gap() if times.needed else 0.0
    orders: list[tuple[float, int, list[tuple[int, bool]]]] = []  # (stall, number, order); the number breaks ties
    for overrun_seconds in (0.0, gap / 4, gap, math.inf) if gap else (0.0,):
        simulation = LinkSimulation(traffic, times, link, urgency, overrun_seconds, looks)
        order = simulation.order()
        orders.append((simulation.stall_seconds(), len(orders), order))
    return min(orders)[2]


def two_stream_order(traffic: SliceTraffic, times: Times, link: LinkModel, urgency: Urgency) -> list[tuple[int, bool]]:
    """Return an order of reductions and an order of gathers, for separate streams, merged into one list.

    Each gather comes after the reductions that it needs. Reductions are ordered for a link that is faster than measured and has
    no latency. Gathers are ordered for a link that is slower than measured, and for completions that are noticed one poll late.
    """
    at_best = LinkModel(0.0, link.beta_seconds_per_byte / _FASTER)
    at_worst = LinkModel(link.alpha_seconds, link.beta_seconds_per_byte * _SLOWER)
    reductions = LinkSimulation(traffic, times, at_best, urgency).order()
    gathers = best_order(traffic, times, at_worst, urgency, times.looks())
    return _merged(traffic, [k for k, gather in reductions if not gather], [k for k, gather in gathers if gather])


def _merged(traffic: SliceTraffic, reductions: Sequence[int], gathers: Sequence[int]) -> list[tuple[int, bool]]:
    """Return both orders as one list, with each gather right after the last reduction that it, or its norms, depends on."""
    reduced_by = {member: k for k in reductions for member in layer_slices(traffic.slices, k)}
    group_of = {k: group for group in traffic.norms for k in group}
    place = {k: position for position, k in enumerate(reductions)}
    sent: list[tuple[int, bool]] = []
    begun = 0
    for gathered in gathers:
        end = max(place[reduced_by[k]] for k in group_of.get(gathered, (gathered,))) + 1
        sent += [(k, False) for k in reductions[begun:end]]
        sent.append((gathered, True))
        begun = max(begun, end)
    return sent
