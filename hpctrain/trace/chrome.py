"""Trace files in Chrome's trace event format: write the traces of all ranks to one file, and read the last step from it.

Perfetto (ui.perfetto.dev) and chrome://tracing open such files. Each rank is a process of the file. Its program is one thread
with nested events. Each queue is a track with asynchronous events, because its operations may overlap. Times are microseconds of
rank 0's clock. `last_steps` returns when each rank computed, waited, and had messages in flight.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from hpctrain.core.files import open_regular
from hpctrain.trace.tracer import Category, Events

_PROGRAM = 0  # thread number of the program's own events; queues follow


class ChromeTrace:
    """Writer of a trace file, one rank after another. The file is complete at the end of the `with` block.

    Args:
        base_ns: time of rank 0's clock that becomes 0.

    Attributes:
        error: first operating system error, or None. Nothing is written after it, and the file is removed at the end.
    """

    def __init__(self, path: Path, base_ns: int) -> None:
        self._path = path
        self._base_ns = base_ns
        self._file: TextIO | None = None
        self._metadata: dict[str, Any] = {}
        self._first = True
        self.error: OSError | None = None

    def __enter__(self) -> ChromeTrace:
        with self._kept_errors():
            self._file = open(open_regular(self._path, os.O_WRONLY | os.O_CREAT), "w", encoding="utf-8")
            self._file.truncate(0)
            self._file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._kept_errors():
            if self._file is not None:
                self._file.write(f'\n],\n"otherData": {json.dumps(self._metadata)}}}\n')
                self._file.close()
        if self.error is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _kept_errors(self) -> Iterator[None]:
        """Catch operating system errors inside the block, and write nothing after the first one."""
        try:
            yield
        except OSError as error:
            self.error = self.error or error
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                if file is not None:
                    file.close()

    def describe(self, values: Mapping[str, Any]) -> None:
        """Add values to the file's metadata."""
        self._metadata.update(values)

    def add_rank(self, rank: int, events: Events, name: str | None = None) -> None:
        """Write the events of one rank.

        Args:
            events: events with times of rank 0's clock.
            name: name of the rank in viewers; None: "rank 3".
        """
        with self._kept_errors():
            self._add_rank(rank, events, f"rank {rank}" if name is None else name)

    def _add_rank(self, rank: int, events: Events, label: str) -> None:
        self._write({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": label}})
        self._write({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        for thread, track in enumerate(("program", *events.tracks[1:])):
            self._write({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": track}})
        labels = [json.dumps(name) for name in events.names]
        kinds = [category.name.lower() for category in Category]
        begin_us = (events.start_ns - self._base_ns) / 1e3
        length_us = (events.stop_ns - events.start_ns) / 1e3
        rows = zip(
            events.category.tolist(),
            events.name.tolist(),
            events.track.tolist(),
            events.number.tolist(),
            begin_us.tolist(),
            length_us.tolist(),
            strict=True,
        )
        for category, label_index, track, number, begin, length in rows:
            head = f'"name":{labels[label_index]},"cat":"{kinds[category]}","pid":{rank}'
            if category in (Category.COMMUNICATION, Category.DELAY):
                common = f'{head},"tid":{track},"id":"{rank}.{track}.{number}"'
                self._line(f'{{"ph":"b",{common},"ts":{begin:.3f},"args":{{"sequence":{number}}}}}')
                self._line(f'{{"ph":"e",{common},"ts":{begin + length:.3f}}}')
            else:
                extra = f',"args":{{"number":{number}}}' if category in (Category.WAIT, Category.STEP) else ""
                self._line(f'{{"ph":"X",{head},"tid":{_PROGRAM},"ts":{begin:.3f},"dur":{length:.3f}{extra}}}')

    def _write(self, event: Mapping[str, Any]) -> None:
        self._line(json.dumps(event))

    def _line(self, text: str) -> None:
        if self._file is None:  # closed after an error
            return
        self._file.write("\n" + text if self._first else ",\n" + text)
        self._first = False


Interval = tuple[float, float]
Event = Mapping[str, Any]

#: kind of the program's activity for each category of events
PROGRAM = {"forward": "forward", "input": "backward", "parameters": "backward", "update": "update", "wait": "waiting"}
MESSAGES = "messages"
_SECONDS = 1e-6


@dataclass(frozen=True)
class StepLanes:
    """Intervals of a rank's activities in one step.

    Attributes:
        begin_seconds, seconds: begin of the step, in seconds after the earliest begin of all ranks, and its duration.
        lanes: disjoint sorted intervals by kind (the values of `PROGRAM`, and `MESSAGES`), in seconds after the earliest begin.
        tracks: intervals of messages by the name of their queue.
    """

    rank: int
    begin_seconds: float
    seconds: float
    lanes: Mapping[str, tuple[Interval, ...]]
    tracks: Mapping[str, tuple[Interval, ...]]


def last_steps(trace: Mapping[str, Any]) -> tuple[StepLanes, ...]:
    """Return the last step of every rank in the content of a trace file, ordered by rank; empty if no step was recorded."""
    by_rank: dict[int, list[Event]] = {}
    for event in trace.get("traceEvents", ()):
        if event.get("ph") in ("X", "b", "e") or event.get("name") == "thread_name":
            by_rank.setdefault(event["pid"], []).append(event)
    steps: dict[int, Interval] = {}
    for rank, events in sorted(by_rank.items()):
        spans = [(event["ts"], event["ts"] + event["dur"]) for event in events if event["ph"] == "X" and event["cat"] == "step"]
        if spans:
            steps[rank] = max(spans)
    zero = min((begin for begin, _ in steps.values()), default=0.0)
    return tuple(_rank_lanes(rank, by_rank[rank], step, zero) for rank, step in steps.items())


def _rank_lanes(rank: int, events: Sequence[Event], step: Interval, zero: float) -> StepLanes:
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
    """Return the interval of each operation from its post to its end, by track."""
    names = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    posted = {event["id"]: event["ts"] for event in events if event["ph"] == "b" and event.get("cat") == "communication"}
    tracks: dict[str, list[Interval]] = {}
    for event in events:
        if event["ph"] == "e" and event["id"] in posted:
            tracks.setdefault(names.get(event["tid"], str(event["tid"])), []).append((posted[event["id"]], event["ts"]))
    return tracks


def _within(intervals: Iterable[Interval], step: Interval, zero: float) -> list[Interval]:
    """Return the sorted parts of the intervals inside a step, in seconds since `zero`."""
    inside = ((max(first, step[0]), min(last, step[1])) for first, last in intervals)
    return sorted(((first - zero) * _SECONDS, (last - zero) * _SECONDS) for first, last in inside if last > first)


def joined(intervals: Iterable[Interval]) -> Iterator[Interval]:
    """Merge sorted intervals that overlap or touch, and yield the results in order."""
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
