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
            and `MESSAGES`), intervals in seconds from the first rank's begin, apart, in order.
    """

    rank: int
    begin_seconds: float
    seconds: float
    lanes: Mapping[str, tuple[Interval, ...]]


def last_steps(trace: Mapping[str, Any]) -> tuple[StepLanes, ...]:
    """The last step of every rank in the content of a trace file, by rank; none where no step was recorded."""
    by_rank: dict[int, list[Event]] = {}
    for event in trace.get("traceEvents", ()):
        if event.get("ph") in ("X", "b", "e"):
            by_rank.setdefault(event["pid"], []).append(event)
    steps = {rank: step for rank, events in sorted(by_rank.items()) if (step := _last_step(events)) is not None}
    zero = min((begin for begin, _ in steps.values()), default=0.0)
    return tuple(_of_rank(rank, by_rank[rank], step, zero) for rank, step in steps.items())


def _last_step(events: Sequence[Event]) -> Interval | None:
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") == "step" and event["ph"] == "X"]
    return max(spans, default=None)


def _of_rank(rank: int, events: Sequence[Event], step: Interval, zero: float) -> StepLanes:
    spans: dict[str, list[Interval]] = {kind: [] for kind in (*PROGRAM.values(), MESSAGES)}
    for event in events:
        if event["ph"] == "X" and event["cat"] in PROGRAM:
            spans[PROGRAM[event["cat"]]].append((event["ts"], event["ts"] + event["dur"]))
    spans[MESSAGES] = list(_messages(events))
    lanes = {kind: tuple(_joined(_within(intervals, step, zero))) for kind, intervals in spans.items()}
    return StepLanes(rank, (step[0] - zero) * _SECONDS, (step[1] - step[0]) * _SECONDS, lanes)


def _messages(events: Sequence[Event]) -> Iterator[Interval]:
    """Each operation from its posting to its end."""
    posted = {event["id"]: event["ts"] for event in events if event["ph"] == "b" and event.get("cat") == "communication"}
    for event in events:
        if event["ph"] == "e" and event["id"] in posted:
            yield posted[event["id"]], event["ts"]


def _within(intervals: Iterable[Interval], step: Interval, zero: float) -> list[Interval]:
    """What of the intervals lies in a step, in seconds from `zero` on, in order."""
    inside = ((max(first, step[0]), min(last, step[1])) for first, last in intervals)
    return sorted(((first - zero) * _SECONDS, (last - zero) * _SECONDS) for first, last in inside if last > first)


def _joined(intervals: Iterable[Interval]) -> Iterator[Interval]:
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
