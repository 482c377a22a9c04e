"""How large slices are and in which order they travel: from a link's alpha and beta, and from measured times.

Sizes decide which numbers are added first, so a repeated run needs the same ones: by default they follow by rule, from bytes and
ranks. The order of operations changes no bit, and follows from what is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from typing import Literal

from hpctrain.averaging.slices import Slice, layer_slices
from hpctrain.comm.link import LinkModel
from hpctrain.errors import ConfigError

Sizes = Literal["rule", "measured"]
#: the link that sizes by rule are made for: a message costs as much as 64 KiB. Networks lie between 25 KiB (20 us at 10 Gb/s) and
#: some 200 KiB (shared memory); fused slices go with the square root of it, so they are never far from what is best
RULE_LINK = LinkModel(alpha_seconds=65.536e-6, beta_seconds_per_byte=1e-9)

_LEAST_BUCKET_BYTES = 1 << 14
# Above some 32 MB an MPI may allocate, and touch anew, what it needs for a collective each time.
_LARGEST_BYTES = 1 << 24
_LEAST_PART_BYTES = 1 << 20
# A slice on its way holds up what becomes ready meanwhile, so large layers are cut: at a few times what latency asks for.
_LARGEST_IN_BUCKETS = 4
# How much longer than its latency a slice should at least take, so that cutting costs little.
_TRANSFER_OVER_LATENCY = 4
# Between two looks at the messages, where it has not been measured: a large operator of a network for images.
_OPERATOR_SECONDS = 0.02
_LEAST_WINDOW = 4
# A message needs several looks on both sides, for its handshake and its end.
_LOOKS = 3


def bucket_bytes(total_bytes: int, ranks: int, link: LinkModel) -> int:
    """The size of fused slices that a step exposes least with; a power of two.

    k slices of n / k bytes cost k (P - 1) alpha in latency, and the last one, which backward cannot hide, (P - 1) / P n / k beta.
    The sum is least at slices of sqrt(n P alpha / beta) bytes.
    """
    if ranks == 1 or link.beta_seconds_per_byte == 0.0:
        return max(_LEAST_BUCKET_BYTES, total_bytes)
    best = math.sqrt(total_bytes * ranks * link.alpha_seconds / link.beta_seconds_per_byte)
    return int(2 ** round(math.log2(max(_LEAST_BUCKET_BYTES, min(best, total_bytes)))))


def largest_bytes(bucket: int) -> int:
    """Where to cut what is larger than a fused slice of `bucket` bytes."""
    return max(bucket, min(_LARGEST_IN_BUCKETS * bucket, _LARGEST_BYTES))


def slice_bytes(least: int, ranks: int, link: LinkModel | None) -> int:
    """The size of slices that may overtake each other, at least `least`: no smaller than latency allows.

    (P - 1) alpha is a quarter of the transfer, (P - 1) / P n beta, at n = 4 P alpha / beta. Rounded up to a power of two times
    `least`; never so large that it had to be cut for another reason.
    """
    if link is None or link.beta_seconds_per_byte == 0.0:
        return least
    wanted = _TRANSFER_OVER_LATENCY * ranks * link.alpha_seconds / link.beta_seconds_per_byte
    doublings = max(0, math.ceil(math.log2(max(wanted, 1.0) / least)))
    return max(least, min(least << doublings, _LARGEST_BYTES))


def parts_of(size: int, item_bytes: int, ranks: int) -> list[tuple[int, int]]:
    """[start, stop) of the collectives that an array of `size` elements is sent in, which cost no more than one of it all.

    Of 16 MiB at most, but no less than 1 MiB a rank, as latency grows with the ranks. Each but the last has a multiple of
    `ranks` elements, so that the ranks' parts add up to those of the whole.
    """
    most = max(1, max(_LARGEST_BYTES, ranks * _LEAST_PART_BYTES) // item_bytes)
    even = -(-size // max(1, -(-size // most)))
    step = max(1, -(-even // ranks)) * ranks
    return [(begin, min(begin + step, size)) for begin in range(0, size, step)]


def credit_window(size_bytes: int, ranks: int, link: LinkModel | None, times: Times | None) -> int | None:
    """How many slices of `size_bytes` in flight keep the link busy between looks at the messages; None: no limit.

    Args:
        times: measured ones; looks are at most as far apart as gradients are that become ready one after the other.
    """
    if link is None or ranks == 1:
        return None
    seconds = link.allgather_seconds(size_bytes, ranks)
    if seconds == 0.0:
        return None
    apart = _OPERATOR_SECONDS if times is None else times.longest_gap()
    return max(_LEAST_WINDOW, 1 + math.ceil(_LOOKS * apart / seconds))


@dataclass(frozen=True)
class Times:
    """Seconds since a step's begin, of the compute alone: what a rank waited is taken out.

    ready: by parameter, when its gradient (or the error of its layer) is announced. free: when its data is let go. needed: when
    forward reads it; empty where that is unknown. end_seconds: when backward ends.
    """

    ready: Mapping[str, float]
    free: Mapping[str, float]
    needed: Mapping[str, float] = field(default_factory=dict)
    end_seconds: float = 0.0

    def longest_gap(self) -> float:
        """Seconds between two gradients that become ready one after the other."""
        return max((later - earlier for earlier, later in pairwise(sorted(self.ready.values()))), default=0.0)

    def late(self) -> Times:
        """As if all became ready one gradient later. What a single queue sends next must be ready then, or all behind it wait."""
        later = self.longest_gap()
        ready, free = ({name: at + later for name, at in times.items()} for times in (self.ready, self.free))
        return Times(ready, free, self.needed, self.end_seconds)

    @staticmethod
    def unknown(parameters: Sequence[str]) -> Times:
        """Backward as if each parameter took 1 s, from the last one to the first; data is let go when it ends."""
        last = float(len(parameters))
        ready = {name: last - position for position, name in enumerate(parameters)}
        return Times(ready, dict.fromkeys(parameters, last + 1.0))


#: among what could be sent now, the least goes first: (order, ready time, whether it is a gather) -> key
Urgency = Callable[[int, float, bool], tuple[float, ...]]


def front_first(order: int, ready: float, gather: bool) -> tuple[float, ...]:
    """Front layers first; within a layer reductions first."""
    return (order, gather, ready)


def reductions_first(order: int, ready: float, gather: bool) -> tuple[float, ...]:
    """Reductions as they become ready, then gathers, front layers first."""
    return (True, order) if gather else (False, ready)


class Simulation:
    """One link, one transfer at a time, the most urgent one that is ready; it idles only where nothing should start.

    Reductions become ready at `times.ready`, gathers when the slice is reduced and its data let go. A gather does not start where
    the next gradient would find it under way for longer than `overrun_seconds`: a reduction that comes late may hold up the next
    forward. Deterministic; ties go by position.

    Args:
        item_bytes: of an element. batch: nominal samples of a step over all ranks, for the errors of linear layers.
    """

    def __init__(
        self,
        slices: Sequence[Slice],
        times: Times,
        link: LinkModel,
        ranks: int,
        item_bytes: int,
        batch: int,
        urgency: Urgency,
        overrun_seconds: float = 0.0,
    ) -> None:
        self._slices, self._times, self._urgency, self._overrun_seconds = slices, times, urgency, overrun_seconds
        # Slices of one linear layer's factors are reduced together, with the first.
        together = [layer_slices(slices, k) for k in range(len(slices))]
        self._together = [each if each[0] == k else () for k, each in enumerate(together)]
        self._gather_seconds = [link.allgather_seconds(each.size * item_bytes, ranks) for each in slices]
        self._reduce_seconds = [
            link.allgather_seconds((batch * each.unit if each.factors else each.size) * item_bytes, ranks) for each in slices
        ]
        self._reductions: list[tuple[float, int]] = []  # (ready time, slice), the next one last
        self._reduced: list[tuple[float, int]] = []  # (when it may be gathered, slice), a heap
        self._waiting: list[tuple[tuple[float, ...], int, bool]] = []  # (urgency, slice, gather), a heap
        self._gathered = [0.0] * len(slices)  # when each slice has been gathered

    def stall_seconds(self) -> float:
        """After `order`: how long the next forward waits for parameters in all, where times say when it reads them."""
        latest: dict[str, float] = {}
        for each, at in zip(self._slices, self._gathered, strict=True):
            for name in (*each.parameters, *each.replicated):
                latest[name] = max(at, latest.get(name, 0.0))
        stall = 0.0
        for name, needed in sorted(self._times.needed.items(), key=lambda item: item[1]):
            stall += max(0.0, latest[name] - (self._times.end_seconds + needed + stall))
        return stall

    def order(self) -> list[tuple[int, bool]]:
        """(slice, whether it is its gather) in the order in which they are sent."""
        ready = ((self._latest(self._times.ready, self._slices[k]), k) for k, each in enumerate(self._together) if each)
        self._reductions = sorted(ready, reverse=True)
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
                for each in self._together[k]:
                    heappush(self._reduced, (max(now, self._latest(self._times.free, self._slices[each])), each))
        return sent

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

    def _latest(self, times: Mapping[str, float], each: Slice) -> float:
        return max(times[name] for name in (*each.parameters, *each.replicated))


def best_order(
    slices: Sequence[Slice], times: Times, link: LinkModel, ranks: int, item_bytes: int, batch: int, urgency: Urgency
) -> list[tuple[int, bool]]:
    """The order that exposes least, of a few: gathers under backward never hold up a gradient, or do for so long at most."""
    gap = times.longest_gap() if times.needed else 0.0
    found: list[tuple[float, int, list[tuple[int, bool]]]] = []
    for overrun_seconds in (0.0, gap / 4, gap, math.inf) if gap else (0.0,):
        simulation = Simulation(slices, times, link, ranks, item_bytes, batch, urgency, overrun_seconds)
        order = simulation.order()
        found.append((simulation.stall_seconds(), len(found), order))
    return min(found)[2]


def check_positive(name: str, value: int) -> int:
    """`value` itself.

    Raises:
        ConfigError: it is below 1.
    """
    if value < 1:
        raise ConfigError(f"{name} is {value}, but must be at least 1.")
    return value


def check_sizes(sizes: Sizes, name: str, by_hand: int | None) -> Sizes:
    """`sizes` itself.

    Raises:
        ConfigError: sizes are to be measured, though the option `name` sets them by hand.
    """
    if sizes == "measured" and by_hand is not None:
        raise ConfigError(f"sizes is measured, but {name} is {by_hand}, which sets them; leave one of the two out.")
    return sizes


def in_request(sizes: Sizes | None) -> str:
    """The words that the option adds to those that a stored schedule is known by; sizes by rule, the default, add nothing."""
    return ", sizes measured" if sizes == "measured" else ""


def check_optional(name: str, value: int | None) -> int | None:
    """`value` itself; None: not set by hand.

    Raises:
        ConfigError: it is below 1.
    """
    return None if value is None else check_positive(name, value)
