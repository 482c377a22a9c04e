"""A recorder of timed events. Its arrays are allocated once; there is no object per event, and no cost without a recorder.

Code that can be traced holds a `Tracer` or None and tests `if tracer is not None`. Times are nanoseconds of one process's clock;
`ClockMap` (comm/link.py) maps several processes' clocks to one. `chrome.py` writes the events, `time_table.py` sums them up.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from threading import get_ident
from typing import Any

import numpy as np

#: events of a job's file that viewers can open, and the least and most events of one rank
_JOB_EVENTS = 1 << 21
_FEWEST_EVENTS = 1 << 14
_MOST_EVENTS = 1 << 18


#: name of the work of averager and progress engine between operators, and for messages inside of them
HOOKS = "posting and progress"


class Category(IntEnum):
    """The kind of an event. Events in CONCURRENT overlap with the program; all others are the program's own time and nest."""

    FORWARD = 0  # an operator's three phases; name: the layer
    PARAMETERS = 1
    INPUT = 2
    COMMUNICATION = 3  # from the start of the post until completion was noticed; name: purpose, track: queue, number: sequence
    WAIT = 4  # the program can only wait; name, track and number of the awaited operation
    UPDATE = 5  # optimiser
    AVERAGING = 6  # averager's own work between operators, posting, progress calls
    LOADING = 7  # wait for the next batch
    WORK = 8  # other named work of the step
    STEP = 9  # a whole step, loading included; number: its position in the epoch
    MESSAGES = 10  # the engine's time for posting and progress, outside of waits; an update inside is an event of its own
    THREAD = 11  # in parallel with the program: work of a second thread on messages, updates included
    DELAY = 12  # in parallel with the program: from an operation's possible turn until its posting began; track and number


#: track of a second thread's events
THREAD_TRACK = "posting thread"
#: kinds that are not the program's own time
CONCURRENT = (Category.COMMUNICATION, Category.THREAD, Category.DELAY)


_COLUMNS = ("category", "number", "start_ns", "stop_ns")


@dataclass(frozen=True)
class Events:
    """Events of one process, in the order in which they were recorded.

    Attributes:
        names, tracks: strings; `name` and `track` are indices into them.
        category, name, track: int32 (n,).
        number: int64 (n,).
        start_ns, stop_ns: int64 (n,), by the clock of the process.
        dropped: number of events that did not fit.
    """

    names: tuple[str, ...]
    tracks: tuple[str, ...]
    category: np.ndarray
    name: np.ndarray
    track: np.ndarray
    number: np.ndarray
    start_ns: np.ndarray
    stop_ns: np.ndarray
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.start_ns)

    def select(self, chosen: np.ndarray) -> Events:
        """Return the events selected by a boolean mask or by indices."""
        columns: dict[str, Any] = {column: getattr(self, column)[chosen] for column in ("name", "track", *_COLUMNS)}
        return replace(self, **columns)

    def of(self, *categories: Category) -> Events:
        """Return the events of these categories."""
        return self.select(np.isin(self.category, [int(each) for each in categories]))


class Tracer:
    """Records events of one thread, and separately those of a second thread, whose own time is of kind THREAD.

    Counts the events that exceed its capacity as dropped.

    Args:
        capacity: number of events.
        clock_ns: returns nanoseconds since any start.
    """

    def __init__(self, capacity: int, *, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        assert capacity >= 1
        self.clock_ns = clock_ns
        self.capacity = capacity
        self.dropped = 0
        self._count = 0
        # Plain arrays: writing an element is several times faster than with NumPy's.
        self._category = array("i", bytes(4 * capacity))
        self._name = array("i", bytes(4 * capacity))
        self._track = array("i", bytes(4 * capacity))
        self._number = array("q", bytes(8 * capacity))
        self._start = array("q", bytes(8 * capacity))
        self._stop = array("q", bytes(8 * capacity))
        self._names: dict[str, int] = {}
        self._tracks: dict[str, int] = {"": 0}
        self._second: int | None = None
        self._second_tracer: Tracer | None = None  # written by the second thread only

    def __len__(self) -> int:
        return self._count

    def add(self, category: int, name: str, start_ns: int, stop_ns: int, track: str = "", number: int = 0) -> None:
        """Record one event."""
        if self._second is not None and get_ident() == self._second:
            assert self._second_tracer is not None
            kind = category if category in CONCURRENT else Category.THREAD
            self._second_tracer.add(kind, name, start_ns, stop_ns, track or THREAD_TRACK, number)
            return
        position = self._count
        if position == self.capacity:
            self.dropped += 1
            return
        names, tracks = self._names, self._tracks
        if name not in names:
            names[name] = len(names)
        if track not in tracks:
            tracks[track] = len(tracks)
        self._category[position] = category
        self._name[position] = names[name]
        self._track[position] = tracks[track]
        self._number[position] = number
        self._start[position] = start_ns
        self._stop[position] = stop_ns
        self._count = position + 1

    def clear(self) -> None:
        """Discard all events; names keep their indices."""
        self._count = self.dropped = 0
        if self._second_tracer is not None:
            self._second_tracer.clear()

    def second_thread(self, identifier: int | None) -> None:
        """Record calls of the thread with this identifier separately from now on; None: there is no second thread."""
        if identifier is not None and self._second_tracer is None:
            self._second_tracer = Tracer(self.capacity, clock_ns=self.clock_ns)
        self._second = identifier

    def events(self) -> Events:
        """Return a copy of the recorded events; those of a second thread come last."""
        own_events = self._own_events()
        return own_events if self._second_tracer is None else joined(own_events, self._second_tracer.events())

    def _own_events(self) -> Events:
        return Events(
            tuple(self._names),
            tuple(self._tracks),
            category=self._copy(self._category, np.int32),
            name=self._copy(self._name, np.int32),
            track=self._copy(self._track, np.int32),
            number=self._copy(self._number, np.int64),
            start_ns=self._copy(self._start, np.int64),
            stop_ns=self._copy(self._stop, np.int64),
            dropped=self.dropped,
        )

    def _copy(self, column: array[int], kind: type[np.integer]) -> np.ndarray:
        return np.frombuffer(column, kind)[: self._count].copy()


def joined(first: Events, second: Events) -> Events:
    """Return the events of both, in this order."""
    names, tracks = (
        tuple(dict.fromkeys((*one, *other))) for one, other in ((first.names, second.names), (first.tracks, second.tracks))
    )
    name_of, track_of = ({text: number for number, text in enumerate(texts)} for texts in (names, tracks))
    columns = {column: np.concatenate([getattr(first, column), getattr(second, column)]) for column in _COLUMNS}
    renamed = {
        "name": np.array([name_of[events.names[index]] for events in (first, second) for index in events.name], np.int32),
        "track": np.array([track_of[events.tracks[index]] for events in (first, second) for index in events.track], np.int32),
    }
    return Events(names, tracks, **{**columns, **renamed}, dropped=first.dropped + second.dropped)


def capacity_for(ranks: int) -> int:
    """Return the number of events that each rank of a job records, so that viewers can open the job's file."""
    return max(_FEWEST_EVENTS, min(_MOST_EVENTS, _JOB_EVENTS // ranks))


def cost_per_event_seconds(events: int = 20_000) -> float:
    """Return the CPU time of two clock readings and the record of one event, measured now; the minimum of three."""
    tracer = Tracer(events)
    clock_ns = tracer.clock_ns
    best = float("inf")
    for _ in range(3):
        tracer.clear()
        begin = time.thread_time()
        for number in range(events):
            tracer.add(Category.WORK, "cost", clock_ns(), clock_ns(), "", number)
        best = min(best, time.thread_time() - begin)
    return best / events
