"""Recorder of timed events, in arrays that are allocated once.

Events are not objects, and code without a recorder has no cost: it holds a `Tracer` or None and tests `if tracer is not None`.
Times are nanoseconds of one process's clock; `ClockMap` (comm/link.py) maps the clocks of several processes to one. `chrome.py`
writes the events, and `time_table.py` sums them up.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np

# maximum number of events in a job's file that viewers can open, and minimum and maximum number of events of one rank
_JOB_EVENTS = 1 << 21
_FEWEST_EVENTS = 1 << 14
_MOST_EVENTS = 1 << 18


#: name of the row for the work of the averager and the progress engine: between operators, and for messages inside them
HOOKS = "posting and progress"


class Category(IntEnum):
    """Kind of an event. Kinds in CONCURRENT overlap with the program; events of other kinds are the program's time, and nest."""

    FORWARD = 0  # first of an operator's three phases; name: name of the layer
    PARAMETERS = 1
    INPUT = 2
    COMMUNICATION = 3  # from the start of the post until completion was noticed; name: purpose, track: queue, number: sequence
    WAIT = 4  # the program waits; name, track and number: those of the awaited operation
    UPDATE = 5  # update by the optimiser
    AVERAGING = 6  # work of the averager between operators: posting and progress
    LOADING = 7  # wait for the next batch
    WORK = 8  # other named work of the step
    STEP = 9  # a whole step with the loading of its batch; number: position in the epoch
    MESSAGES = 10  # time of the engine for posting and progress, outside of waits; an update inside is a separate event
    DELAY = 11  # concurrent: from the turn of an operation until its posting began; track and number


#: kinds that overlap with the program
CONCURRENT = (Category.COMMUNICATION, Category.DELAY)


_COLUMNS = ("category", "number", "start_ns", "stop_ns")


@dataclass(frozen=True)
class Events:
    """Events of one process, in the order in which they were recorded.

    Attributes:
        names, tracks: strings; `name` and `track` are indices into them.
        category, name, track: int32 (n,).
        number: int64 (n,).
        start_ns, stop_ns: times of the process's clock, int64 (n,).
        dropped: number of events that exceeded the capacity.
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
    """Recorder of the events of one thread. Events that exceed the capacity are counted as dropped.

    Args:
        clock_ns: function that returns nanoseconds since an arbitrary start.
    """

    def __init__(self, capacity: int, *, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        assert capacity >= 1
        self.clock_ns = clock_ns
        self.capacity = capacity
        self.dropped = 0
        self._count = 0
        # Writing an element of a plain array is several times faster than one of a NumPy array.
        self._category = array("i", bytes(4 * capacity))
        self._name = array("i", bytes(4 * capacity))
        self._track = array("i", bytes(4 * capacity))
        self._number = array("q", bytes(8 * capacity))
        self._start = array("q", bytes(8 * capacity))
        self._stop = array("q", bytes(8 * capacity))
        self._names: dict[str, int] = {}
        self._tracks: dict[str, int] = {"": 0}

    def __len__(self) -> int:
        return self._count

    def add(self, category: int, name: str, start_ns: int, stop_ns: int, track: str = "", number: int = 0) -> None:
        """Record one event, which lasted from `start_ns` to `stop_ns` on the tracer's clock."""
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

    def events(self) -> Events:
        """Return a copy of the recorded events."""
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


def capacity_for(ranks: int) -> int:
    """Return the maximum number of events to record on each rank, so that viewers can open the file of the whole job."""
    return max(_FEWEST_EVENTS, min(_MOST_EVENTS, _JOB_EVENTS // ranks))


def cost_per_event_seconds(events: int = 20_000) -> float:
    """Measure and return the CPU time of two clock readings and the record of one event; the minimum of three measurements."""
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
