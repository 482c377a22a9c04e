"""Measure one link between two ranks, and fit a `Link` to the measured points.

`LinkProbe` posts, polls and waits for messages of several sizes, as averagers do. Times of messages are the minimum of several
measurements, because other work only increases them. The fit joins neighbouring sizes by straight lines. It also
derives the bytes that move between two polls, and the burst: the bytes that pass without delay after a pause.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import groupby, pairwise, permutations
from statistics import fmean, median

import numpy as np

from hpctrain.backend.host_arithmetic import HostArithmetic
from hpctrain.comm.base import Communicator, Handle
from hpctrain.comm.progress import ProgressEngine
from hpctrain.planner.costs.machine import Link, LinkSegment

#: message sizes in bytes per direction; denser near the sizes at which transports change their protocol
SIZES = (512, 4 << 10, 16 << 10, 64 << 10, 128 << 10, 512 << 10, 2 << 20, 3 << 20, 4 << 20, 8 << 20)
_LONG_BYTES = 512 << 10
_REPEATS_SHORT, _REPEATS_LONG = 20, 2
_POLLED_REPEATS = 2


@dataclass(frozen=True)
class Effort:
    """Number of sizes and passes of a measurement.

    Attributes:
        sizes: bytes of messages, ascending.
        passes: maximum number of passes over all sizes.
        alike: relative difference between the last pass and the fastest earlier one below which no further pass follows.
        pause_seconds: pause before a long message, after which a link has its full burst; shorter messages do not show a burst.
    """

    sizes: tuple[int, ...]
    passes: int
    alike: float
    pause_seconds: float = 0.03


#: effort for a machine file, and for a choice at the start of a job, whose sizes suffice for its order of candidates
THOROUGH, QUICK = Effort(SIZES, 8, 0.01), Effort((512, 64 << 10, 512 << 10, 2 << 20), 3, 0.05, 0.015)
_POLLED_FROM = 16 << 10
_MOST_GAP_SECONDS, _LEAST_GAP_SECONDS = 0.01, 0.5e-3
_MOST_POLLS = 150
_MOST_POLLED_SECONDS = 1.5
# The core's time is measured next to laps: products of matrices of _EXTENT rows and columns, which stay in a core's cache, so
# that laps vary less than copies through memory. The median of _LAPS_ALONE laps without messages is their usual time.
_LAP_SECONDS, _EXTENT, _LAPS_ALONE = 1e-3, 192, 9
# Messages lengthen a lap less than that; in a longer one, another program had the core.
_LONGEST_LAP = 3
# Of `buffered_bytes`: number of messages posted together; share of them that the link can move between two polls; longest time
# between two polls, that of a long operator. On slower links, nothing is measured.
_BUFFERED_MESSAGES, _BUFFERED_SHARE, _LONGEST_GAP_SECONDS = 12, 1 / 3, 0.07
# Messages that take longer are repeated fewer times.
_SLOW_SECONDS, _REPEATS_SLOW = 0.1, 2
# If a message takes longer, larger sizes are not measured.
_MOST_MESSAGE_SECONDS = 0.3
_PURPOSE = "measurement of a link"


@dataclass(frozen=True)
class MessagePoint:
    """Times of an allgather of two ranks, each of which sends `n_bytes` bytes to the other.

    Attributes:
        n_bytes: bytes of the message in each direction.
        seconds: time of one operation after a pause.
        next_seconds: additional time of a second operation posted at the same time.
        polls: number of polls until completion, with `gap_seconds` of computation between them; 0 if not measured.
        gap_seconds: seconds of computation between two polls.
        core_seconds: time by which the operation lengthens computation: by posts, polls, interrupts and data lost from caches.
        summing_core_seconds: the same of a reduce-scatter.
    """

    n_bytes: int
    seconds: float
    next_seconds: float
    polls: float
    gap_seconds: float
    core_seconds: float
    summing_core_seconds: float

    @property
    def both_seconds(self) -> float:
        """Time of two operations posted together."""
        return self.seconds + self.next_seconds


def _least(passes: Sequence[MessagePoint]) -> MessagePoint:
    """Return the minimum of each time over all passes; the median of the core's times, differences that noise also shortens."""
    one, both = min(point.seconds for point in passes), min(point.both_seconds for point in passes)
    core, summing = median(point.core_seconds for point in passes), median(point.summing_core_seconds for point in passes)
    fewest = min(passes, key=lambda point: point.polls)
    return replace(fewest, seconds=one, next_seconds=max(0.0, both - one), core_seconds=core, summing_core_seconds=summing)


def _settled(passes: Sequence[Sequence[MessagePoint]], alike: float) -> bool:
    """Return whether the last pass confirms the fastest earlier one; times of short messages vary too much to compare."""
    if len(passes) < 2:
        return False
    long = [k for k, point in enumerate(passes[-1]) if point.n_bytes >= _POLLED_FROM]
    times = [[(of[k].seconds, of[k].both_seconds) for k in long] for of in passes]
    fastest, now = np.min(times[:-1], axis=0), np.array(times[-1])
    return bool(np.all(abs(now - fastest) <= alike * fastest))


class LinkProbe:
    """Measurement of messages between two ranks.

    All ranks of `all_ranks` call its methods at the same time; ranks without a partner (`pair` is None) wait for the others.

    Args:
        all_ranks: communicator of the ranks that decide together.
        pair: communicator of this rank and its partner; None: no partner.
        progress: progress engine; its queues must be idle.
        at_once: communicator of all ranks with partners if they begin together; None: each pair begins by itself.
        clock: clock that measures the core's times of a `MessagePoint`; None: wall time.
    """

    def __init__(
        self,
        all_ranks: Communicator,
        pair: Communicator | None,
        progress: ProgressEngine,
        at_once: Communicator | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._all_ranks, self._pair, self._progress, self._clock = all_ranks, pair, progress, clock
        self._meeting = pair if at_once is None else at_once
        self._queue = None if pair is None else progress.queue(pair)
        self._factors = np.ones((2, _EXTENT, _EXTENT), np.float32)

    def measure(self, effort: Effort = THOROUGH, *, details: bool = True, budget_seconds: float = math.inf) -> list[MessagePoint]:
        """Return a point for each size: medians over the ranks with partners. Collective over `all_ranks`.

        After a first pass over all sizes, more follow until one takes as long as an earlier one, because a disturbance rarely
        lasts for two passes, and while rank 0 expects them to fit the time budget. If a message, or the first pass, takes too
        long, larger sizes are omitted; at least two are measured.

        Args:
            details: whether to measure more than the time of one operation.
        """
        begin, sizes = self._progress.now(), effort.sizes
        if self._pair is not None:
            self._seconds([self._gather(sizes[0])], _REPEATS_SHORT, 0.0)  # because connections are made at their first use
        passes: list[list[MessagePoint]] = []
        while len(passes) < effort.passes and not _settled(passes, effort.alike):
            points: list[MessagePoint] = []
            for n_bytes in sizes:
                own = None if self._pair is None else self._measure_size(n_bytes, effort.pause_seconds, details=details)
                of_all = self._all_ranks.allgather_object((own, self._progress.now() - begin))
                known, spent = [astuple(point)[1:] for point, _ in of_all if point is not None], of_all[0][1]
                points.append(MessagePoint(n_bytes, *(median(column) for column in zip(*known, strict=True))))
                over = not passes and spent > budget_seconds
                if len(points) > 1 and (over or points[-1].seconds > _MOST_MESSAGE_SECONDS):
                    break
            passes.append(points)
            sizes = sizes[: len(points)]
            if spent * (len(passes) + 1) / len(passes) >= budget_seconds:
                break
        return [_least(of_size) for of_size in zip(*(of_pass[: len(sizes)] for of_pass in passes), strict=True)]

    def buffered_bytes(self, point: MessagePoint) -> int | None:
        """Return the bytes of many messages like `point` that move between two polls; None: all, or unknown. Collective."""
        in_gap = round(_BUFFERED_SHARE * _BUFFERED_MESSAGES)
        gap, found = max(in_gap * point.next_seconds, _LEAST_GAP_SECONDS), math.inf
        if gap <= _LONGEST_GAP_SECONDS and self._pair is not None:
            polls = self._polls([self._gather(point.n_bytes) for _ in range(_BUFFERED_MESSAGES)], gap)
            most = max(1, *self._pair.allgather_object(polls))
            found = _BUFFERED_MESSAGES * point.n_bytes / (most - 0.5)  # the last gap is used by half on average
        found = min(self._all_ranks.allgather_object(found))
        return None if found >= in_gap * point.n_bytes else round(found)  # otherwise the link is the limit, not buffers

    def _measure_size(self, n_bytes: int, pause_seconds: float, *, details: bool) -> MessagePoint:
        gather, reduce = self._gather(n_bytes), self._reduce(n_bytes)
        long = n_bytes >= _LONG_BYTES
        repeats, pause = (_REPEATS_LONG, pause_seconds) if long else (_REPEATS_SHORT, 0.0)
        one = self._seconds([gather], repeats, pause)
        gap = min(max(2 * one, _LEAST_GAP_SECONDS), _MOST_GAP_SECONDS)
        if not details:
            return MessagePoint(n_bytes, one, one, 0, gap, 0.0, 0.0)
        two = self._seconds([gather, self._gather(n_bytes)], _REPEATS_SLOW if one > _SLOW_SECONDS else repeats, pause)
        polled = n_bytes >= _POLLED_FROM
        needed = min(self._polls([gather], gap) for _ in range(_POLLED_REPEATS)) if polled else 0
        lap, lap_seconds = self._lap()
        core, summing = (self._core_seconds(post, lap, lap_seconds) for post in (gather, reduce))
        return MessagePoint(n_bytes, one, two - one, needed, gap, core, summing)

    def _gather(self, n_bytes: int) -> Callable[[], Handle]:
        assert self._pair is not None
        pair, counts = self._pair, [n_bytes // 4] * 2
        gathered = np.ones(sum(counts), np.float32)
        return lambda: pair.iallgather(None, gathered, counts)

    def _reduce(self, n_bytes: int) -> Callable[[], Handle]:
        assert self._pair is not None
        pair, counts = self._pair, [n_bytes // 4] * 2
        whole, reduced = np.ones(sum(counts), np.float32), np.ones(counts[0], np.float32)
        return lambda: pair.ireduce_scatter(whole, reduced, counts)

    def _meet(self) -> None:
        assert self._meeting is not None
        self._progress.wait_handle(self._meeting.ibarrier(), _PURPOSE)

    def _seconds(self, posts: Sequence[Callable[[], Handle]], repeats: int, pause_seconds: float) -> float:
        """Return the shortest time for both ranks to post the operations together and wait for them.

        Without pauses, a first repeat warms up and does not count.
        """
        assert self._queue is not None
        assert self._meeting is not None
        times, warm_up = [], int(not pause_seconds)
        for _ in range(warm_up + repeats):
            _busy(pause_seconds)
            self._meet()
            begin = self._progress.now()
            self._progress.wait([self._queue.post(post, _PURPOSE) for post in posts])
            times.append(self._progress.now() - begin)
        # A late rank measures too short a time, because its partner's message has already arrived. Of pairs that share a card, a
        # different one may be the first each time. Take the longest time of all ranks that begin together.
        of_all = self._meeting.allgather_object(times[warm_up:])
        least: float = min(max(of_one) for of_one in zip(*of_all, strict=True))
        return least

    def _polls(self, posts: Sequence[Callable[[], Handle]], gap_seconds: float) -> int:
        """Return the number of polls until all operations complete, with `gap_seconds` of computation between them."""
        assert self._queue is not None
        self._meet()
        _busy(gap_seconds / 3)
        self._meet()
        tickets, polls = [self._queue.post(post, _PURPOSE) for post in posts], 0
        most = min(_MOST_POLLS, max(2, int(_MOST_POLLED_SECONDS / gap_seconds)))
        while not all(ticket.done for ticket in tickets) and polls < most:
            _busy(gap_seconds)
            self._progress.poll()
            polls += 1
        self._progress.wait(tickets)
        return polls

    def _lap(self) -> tuple[Callable[[], float], float]:
        """Return a computation of about `_LAP_SECONDS`, which returns its time, and its usual time without messages."""
        product, clock = np.empty_like(self._factors[0]), self._clock or time.perf_counter
        multiply = HostArithmetic().multiply

        def seconds(count: int) -> float:
            begin = clock()
            for _ in range(count):
                multiply(self._factors[0], self._factors[1], product)
            return clock() - begin

        self._meet()
        count = max(1, round(_LAP_SECONDS * _LAPS_ALONE / seconds(_LAPS_ALONE)))
        return partial(seconds, count), median(seconds(count) for _ in range(_LAPS_ALONE))

    def _core_seconds(self, post: Callable[[], Handle], lap: Callable[[], float], lap_seconds: float) -> float:
        """Return the time by which an operation lengthens a computation of laps with a poll after each.

        It is that of the rank with more of it, because the interrupts of a network reach one core for a while, and the other
        rank waits for this one.
        """
        assert self._queue is not None
        assert self._pair is not None
        longer, clock = [0.0] * _POLLED_REPEATS, self._clock or self._progress.now
        for repeat in range(_POLLED_REPEATS):
            self._meet()
            begin = clock()
            ticket = self._queue.post(post, _PURPOSE)
            longer[repeat] += clock() - begin
            for _ in range(_MOST_POLLS):
                if ticket.done:
                    break
                longer[repeat] += min(lap(), _LONGEST_LAP * lap_seconds) - lap_seconds
                begin = clock()
                self._progress.poll()
                longer[repeat] += clock() - begin
            self._progress.wait(ticket)
        of_both = self._pair.allgather_object(longer)
        return max(0.0, fmean(max(of_one) for of_one in zip(*of_both, strict=True)))


def _busy(seconds: float) -> None:
    """Keep the core busy for `seconds` seconds."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


# Messages move in chunks, one between two polls, if they need this many polls more than their time explains.
_CHUNKED_POLLS = 7
# Largest share by which a second message of the largest size may take longer than the first, because a pause saves time. The
# share is larger for smaller messages.
_LONGER = 0.1
# Messages of at least the first share of the largest size are large. Their rate follows from pairs of sizes that differ by at
# least the second share of the largest size.
_LARGE, _APART = 0.25, 0.5
# A burst is a little larger than measured, because its bytes take time as well.
_COVERED = 1.25
# Bytes that seem to pass at once count as a burst only if they are at least this share of all bytes.
_LEAST_BURST = 0.2
_BURST_SIZES = (512 << 10, 2 << 20)  # smaller messages may fit into buffers, and a burst is only a small share of larger ones


def link(points: Sequence[MessagePoint], *, bursts: bool = True) -> Link:
    """Return the link fitted to at least two points in ascending order of size; without a burst unless `bursts` is set."""
    burst_bytes = burst(points) if bursts else 0
    # The core's seconds of an operation and of a byte are a line through the points. The fit minimises the sum of
    # (predicted - measured)^2 / measured, so that neither long nor short messages dominate.
    roots = np.sqrt([max(point.core_seconds, 1e-9) for point in points])
    parts = np.array([(1.0, 2.0 * point.n_bytes) for point in points]) / roots[:, None]
    operation_seconds, byte_seconds = (max(0.0, float(one)) for one in np.linalg.lstsq(parts, roots, rcond=None)[0])
    return Link(
        segments=segments(points, burst_bytes),
        operation_seconds=operation_seconds,
        byte_seconds=byte_seconds,
        # time of a reduce-scatter in addition to that of an allgather
        sum_seconds=median(max(0.0, one.summing_core_seconds - one.core_seconds) / one.n_bytes for one in points[-3:]),
        burst_bytes=burst_bytes,
    )


def burst(points: Sequence[MessagePoint]) -> int:
    """Return how many bytes a link transfers after a pause beyond what the rate of large messages allows; 0 if none.

    The result is the maximum over the points, because other work on the machine can only make a burst seem smaller.
    """
    beta = _large_beta(points)
    most = 0.0
    for point in (point for point in points[:-1] if point.n_bytes in _BURST_SIZES):
        for messages, seconds in ((1, point.seconds), (2, point.seconds + point.next_seconds)):
            passed = messages * point.n_bytes - seconds / beta
            if passed > _LEAST_BURST * messages * point.n_bytes:
                most = max(most, passed)
    return int(most)


def segments(points: Sequence[MessagePoint], burst_bytes: int = 0) -> tuple[LinkSegment, ...]:
    """Return lines through neighbouring points; each line begins at its smaller point.

    The first line begins at 0 bytes, and the last one has no end. On a link with a burst, every byte has the rate of large
    messages, and alpha is the time of a message after a pause without the bytes that exceed the burst.
    """
    # Times do not decrease with size: if a smaller message seems slower, it was disturbed.
    times = [min(point.seconds for point in points[position:]) for position in range(len(points))]
    rate = _large_beta(points)
    made: list[LinkSegment] = []
    for position, (low, high) in enumerate(pairwise(range(len(points)))):
        first, second = points[low].n_bytes, points[high].n_bytes
        if burst_bytes:
            beta = rate
            alpha = sum(_uncovered_seconds(points[k].n_bytes, times[k], rate, burst_bytes) for k in (low, high)) / 2
        else:
            beta = (times[high] - times[low]) / (second - first)
            alpha = times[low] - beta * first
            if alpha < 0:  # another protocol begins between the points; assume a line through the origin
                alpha, beta = 0.0, times[low] / first
        unattended, polls = _between_polls(points[low])
        chunk, _ = _between_polls(points[high])
        if (
            chunk is not None and abs(points[low].polls - 1 - first / chunk) < 1
        ):  # the message consists of a few chunks of the neighbouring size
            unattended, polls = chunk, 1
        made.append(LinkSegment(0 if position == 0 else first, alpha, beta, unattended, polls))
    last, (unattended, polls) = points[-1], _between_polls(points[-1])
    made.append(LinkSegment(last.n_bytes, made[-1].alpha_seconds, made[-1].beta_seconds_per_byte, unattended, polls))
    # Of neighbouring segments with equal values, keep the first.
    return tuple(next(alike) for _, alike in groupby(made, key=lambda segment: replace(segment, from_bytes=0)))


def _uncovered_seconds(n_bytes: int, seconds: float, rate: float, burst_bytes: int) -> float:
    """Return the seconds of a message after a pause, less those of its bytes beyond the burst, at `rate` seconds per byte."""
    covered = n_bytes < _COVERED * burst_bytes  # a message that barely fits does not wait for the link
    return seconds if covered else max(0.0, seconds - rate * (n_bytes - burst_bytes))


def _between_polls(point: MessagePoint) -> tuple[int | None, int]:
    """Return the bytes that move between two polls (None: all bytes), and the number of polls before the first byte moves."""
    if not point.polls:
        return None, 0
    explained = point.seconds / point.gap_seconds if point.gap_seconds else 0.0
    if point.polls > _CHUNKED_POLLS + explained:
        return round(point.n_bytes / (point.polls - 1)), 1
    return None, max(0, round(point.polls - 1 - explained))


def _large_beta(points: Sequence[MessagePoint]) -> float:
    """Return the time per byte of large messages: the median slope between them (Theil and Sen), robust to outliers."""
    largest = points[-1].n_bytes
    large = [point for point in points if point.n_bytes >= _LARGE * largest]
    totals = [(point.n_bytes, point.seconds) for point in large]
    for point in large:
        second = min(point.next_seconds, (1 + _LONGER * largest / point.n_bytes) * point.seconds)
        totals.append((2 * point.n_bytes, point.seconds + second))
    slopes = [
        (seconds - less_seconds) / (n_bytes - less_bytes)
        for (n_bytes, seconds), (less_bytes, less_seconds) in permutations(totals, 2)
        if n_bytes - less_bytes >= _APART * largest
    ]
    return max(1e-15, median(slopes))
