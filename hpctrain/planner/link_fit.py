"""From measured points to a link: straight lines between neighbouring sizes, what polls move, and what passes after a pause."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, permutations
from statistics import median

from hpctrain.planner.link_measurement import MessagePoint
from hpctrain.planner.machine import Link, LinkSegment

# Messages that take so many polls more than the time between polls explains move in chunks, one between two polls.
_CHUNKED_POLLS = 7
# A second message of the largest size takes longer than the first by no more than this, for what a pause saves; of a smaller one
# that is a larger share.
_LONGER = 0.1
# Messages from this share of the largest on have the rate of large ones, which follows from those that are so far apart.
_LARGE, _APART = 0.25, 0.5
# A burst is a little larger than it seems: what it lets pass takes time as well.
_COVERED = 1.25
# Bytes that seem to pass at once are none where they are less than this share of all.
_LEAST_BURST = 0.2
_BURST_SIZES = (512 << 10, 2 << 20)  # a smaller message may fit into buffers on the way, and of a larger one it is a small share


def link(points: Sequence[MessagePoint], *, bursts: bool = True) -> Link:
    """The link of which these are the points, by rising size; at least two. bursts: it may let bytes pass at once."""
    burst_bytes = burst(points) if bursts else 0
    return Link(
        segments=segments(points, burst_bytes),
        operation_seconds=points[0].core_seconds,
        byte_seconds=_byte_seconds(points),
        sum_seconds=_sum_seconds(points),
        burst_bytes=burst_bytes,
    )


def burst(points: Sequence[MessagePoint]) -> int:
    """Bytes that pass at once after a pause: those for which messages take no time at the rate of large ones; 0 where none do.

    Other work makes them fewer, so the most count.
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
    """Lines through neighbouring points, each from its smaller one on; the last goes on without end, the first begins at 0 bytes.

    On a link with a burst every byte has the rate of large messages, and alpha is what a message takes after a pause beside the
    bytes that the burst does not cover.
    """
    times = _rising([point.seconds for point in points])
    rate = _large_beta(points)
    made: list[LinkSegment] = []
    for position, (here, there) in enumerate(pairwise(range(len(points)))):
        first, second = points[here].n_bytes, points[there].n_bytes
        if burst_bytes:
            beta = rate
            alpha = sum(_beside(points[k].n_bytes, times[k], rate, burst_bytes) for k in (here, there)) / 2
        else:
            beta = (times[there] - times[here]) / (second - first)
            alpha = times[here] - beta * first
            if alpha < 0:  # a jump to another protocol lies between: the line goes on to where that begins
                alpha, beta = 0.0, times[here] / first
        unattended, polls = _between_polls(points[here])
        chunk, _ = _between_polls(points[there])
        if chunk is not None and abs(points[here].polls - 1 - first / chunk) < 1:  # it fits into a few of its neighbour's chunks
            unattended, polls = chunk, 1
        made.append(LinkSegment(0 if position == 0 else first, alpha, beta, unattended, polls))
    last, (unattended, polls) = points[-1], _between_polls(points[-1])
    made.append(LinkSegment(last.n_bytes, made[-1].alpha_seconds, made[-1].beta_seconds_per_byte, unattended, polls))
    return _joined(made)


def _beside(n_bytes: int, seconds: float, rate: float, burst_bytes: int) -> float:
    """Time of a message after a pause, beside the bytes that the burst does not cover."""
    covered = n_bytes < _COVERED * burst_bytes  # the time of a message that just fits is none of the link's rate
    return seconds if covered else max(0.0, seconds - rate * (n_bytes - burst_bytes))


def _between_polls(point: MessagePoint) -> tuple[int | None, int]:
    """(bytes that move between two polls, None: all; polls before the first byte moves)."""
    if not point.polls:
        return None, 0
    explained = point.seconds / point.gap_seconds if point.gap_seconds else 0.0
    if point.polls > _CHUNKED_POLLS + explained:
        return round(point.n_bytes / (point.polls - 1)), 1
    return None, max(0, round(point.polls - 1 - explained))


def _joined(made: Sequence[LinkSegment]) -> tuple[LinkSegment, ...]:
    """Segments of which the next one differs."""
    kept: list[LinkSegment] = []
    for one in made:
        if not kept or _numbers(kept[-1]) != _numbers(one):
            kept.append(one)
    return tuple(kept)


def _numbers(segment: LinkSegment) -> tuple[float | None, ...]:
    return (segment.alpha_seconds, segment.beta_seconds_per_byte, segment.unattended_bytes, segment.polls)


def _rising(times: Sequence[float]) -> list[float]:
    """Times of which none is above a later one: a smaller message that seems slower was disturbed."""
    return [min(times[position:]) for position in range(len(times))]


def _large_beta(points: Sequence[MessagePoint]) -> float:
    """The rate of large messages: the median slope among them, after Theil and Sen, as some are disturbed."""
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


def _byte_seconds(points: Sequence[MessagePoint]) -> float:
    """Seconds of a core per byte sent or received, from large messages."""
    first = points[0]
    return median(
        max(0.0, point.core_seconds - first.core_seconds) / (2 * point.n_bytes) for point in points[-3:] if point is not first
    )


def _sum_seconds(points: Sequence[MessagePoint]) -> float:
    """Seconds of a core per byte added up, from what reduce-scatters of large messages take beside allgathers."""
    return median(max(0.0, point.summing_core_seconds - point.core_seconds) / point.n_bytes for point in points[-3:])
