"""The last step in a trace file, rank by rank: when each computed, waited, and had messages under way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Interval = tuple[float, float]
Event = Mapping[str, Any]

#: kinds of what a program does, by the category of its events
PROGRAM = {"forward": "forward", "input": "backward", "parameters": "backward", "update": "update", "wait": "waiting"}
MESSAGES = "messages"
_SECONDS = 1e-6


@dataclass(frozen=True)
class StepLanes:
    """One step of one rank.

    Args:
        begin_seconds, seconds: when it began after the first rank's did, and its length. lanes: by kind (the values of `PROGRAM`,
            and `MESSAGES`), intervals in seconds from the first rank's begin, apart, in order. tracks: the same of messages, by
            the name of their queue.
    """

    rank: int
    begin_seconds: float
    seconds: float
    lanes: Mapping[str, tuple[Interval, ...]]
    tracks: Mapping[str, tuple[Interval, ...]]


def last_steps(trace: Mapping[str, Any]) -> tuple[StepLanes, ...]:
    """The last step of every rank in the content of a trace file, by rank; none where no step was recorded."""
    by_rank: dict[int, list[Event]] = {}
    for event in trace.get("traceEvents", ()):
        if event.get("ph") in ("X", "b", "e") or event.get("name") == "thread_name":
            by_rank.setdefault(event["pid"], []).append(event)
    steps = {rank: step for rank, events in sorted(by_rank.items()) if (step := _last_step(events)) is not None}
    zero = min((begin for begin, _ in steps.values()), default=0.0)
    return tuple(_of_rank(rank, by_rank[rank], step, zero) for rank, step in steps.items())


def _last_step(events: Sequence[Event]) -> Interval | None:
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in events if event["ph"] == "X" and event["cat"] == "step"]
    return max(spans, default=None)


def _of_rank(rank: int, events: Sequence[Event], step: Interval, zero: float) -> StepLanes:
    spans: dict[str, list[Interval]] = {kind: [] for kind in PROGRAM.values()}
    for event in events:
        if event["ph"] == "X" and event["cat"] in PROGRAM:
            spans[PROGRAM[event["cat"]]].append((event["ts"], event["ts"] + event["dur"]))
    by_track = _messages(events)
    spans[MESSAGES] = [interval for intervals in by_track.values() for interval in intervals]

    def lanes(of: Mapping[str, Sequence[Interval]]) -> dict[str, tuple[Interval, ...]]:
        return {kind: tuple(joined(_within(intervals, step, zero))) for kind, intervals in of.items()}

    return StepLanes(rank, (step[0] - zero) * _SECONDS, (step[1] - step[0]) * _SECONDS, lanes(spans), lanes(by_track))


def _messages(events: Sequence[Event]) -> dict[str, list[Interval]]:
    """By track, each operation from its posting to its end."""
    names = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    posted = {event["id"]: event["ts"] for event in events if event["ph"] == "b" and event.get("cat") == "communication"}
    tracks: dict[str, list[Interval]] = {}
    for event in events:
        if event["ph"] == "e" and event["id"] in posted:
            tracks.setdefault(names.get(event["tid"], str(event["tid"])), []).append((posted[event["id"]], event["ts"]))
    return tracks


def _within(intervals: Iterable[Interval], step: Interval, zero: float) -> list[Interval]:
    """The intervals, as far as they lie in a step, in seconds from `zero` on, in order."""
    inside = ((max(first, step[0]), min(last, step[1])) for first, last in intervals)
    return sorted(((first - zero) * _SECONDS, (last - zero) * _SECONDS) for first, last in inside if last > first)


def joined(intervals: Iterable[Interval]) -> Iterator[Interval]:
    """Intervals that are in order; those that overlap or touch as one."""
    current: Interval | None = None
    for first, last in intervals:
        if current is not None and first <= current[1] + 1e-9:
            current = (current[0], max(current[1], last))
            continue
        if current is not None:
            yield current
        current = (first, last)
    if current is not None:
        yield current
