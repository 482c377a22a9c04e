"""Made-up recordings: traced steps, flight records, a reporter's lines; and the line numbers of a test."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.flight.ring import FlightRecord, RecordedOperation
from hpctrain.launch.process_end import End
from hpctrain.trace.time_table import TimeTable, tabulate
from hpctrain.trace.tracer import Category, Events, Tracer
from hpctrain.training.metrics import Reporter


class Heard(Reporter):
    """A reporter that keeps what it gets. lines: in order. records: (kind, values), in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.records: list[tuple[str, Mapping[str, Any]]] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        self.records.append((kind, values))


def line(offset: int = 0) -> str:
    """Return "FILE.py:LINE" of the call, or of the line that is `offset` lines below it."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"{Path(frame.f_back.f_code.co_filename).name}:{frame.f_back.f_lineno + offset}"


MS = 1_000_000


class Script:
    """Records events at given milliseconds."""

    def __init__(self) -> None:
        self.tracer = Tracer(200)

    def __call__(self, category: Category, name: str, start: float, stop: float, number: int = 0, track: str = "") -> None:
        self.tracer.add(category, name, round(start * MS), round(stop * MS), track, number)

    def events(self) -> Events:
        """Return all recorded events."""
        return self.tracer.events()


def record_step(at: float, script: Script) -> None:
    """Record a step of 10 ms: loading 1, a forward with a wait of 2 in its hook, an update in that wait, backward, idle 0.5."""
    script(Category.LOADING, "data loading", at, at + 1)
    script(Category.UPDATE, "conv.weight", at + 2, at + 2.5)  # in the wait
    script(Category.WAIT, "conv.weight", at + 1.5, at + 3.5, 7, "column")
    script(Category.AVERAGING, "hooks", at + 1, at + 4)
    script(Category.FORWARD, "conv", at + 4, at + 6)
    script(Category.FORWARD, "fc", at + 6, at + 7)
    script(Category.PARAMETERS, "fc", at + 7, at + 8)
    script(Category.INPUT, "fc", at + 8, at + 8.5)
    script(Category.COMMUNICATION, "fc.weight", at + 8, at + 9, 8, "column")  # 8 .. 9, without a wait
    script(Category.COMMUNICATION, "conv.weight", at - 1, at + 3.5, 7, "column")  # begun in the step before
    script(Category.PARAMETERS, "conv", at + 8.5, at + 9.5)
    script(Category.STEP, "step", at, at + 10)


def recorded_table(steps: int = 4) -> TimeTable:
    """Return the table of `steps` steps, and of one operation for a step that is not recorded."""
    script = Script()
    for number in range(steps):
        record_step(100 + 10 * number, script)
    end = 100 + 10 * steps
    script(Category.COMMUNICATION, "conv.weight", end - 1, end + 3.5, 7, "column")  # for a step that is not recorded
    table = tabulate(script.events())
    assert table is not None
    return table


SECOND = 1_000_000_000

ALL = "all gradients of 0-3"


def operation(number: int, purpose: str, *, started: bool = True, done: bool = False, **more: Any) -> RecordedOperation:
    """Return an operation that was queued in second `number`, which is its sequence, too."""
    at = number * SECOND
    text = more.pop("operation", "reduce-scatter of 64 float32 elements" if started else "")
    return RecordedOperation(number, more.pop("queue", ALL), purpose, number, text, at, at * started, at * done, **more)


def record(rank: int, *operations: RecordedOperation, ranks: int = 4, **more: Any) -> FlightRecord:
    values = {
        "job": 1,
        "rank": rank,
        "ranks": ranks,
        "process": 100 + rank,
        "host": "node",
        "end": End.RUNNING,
        "signal": 0,
        "wall_offset_ns": 0,
        "begun_ns": 0,
        "seen_ns": 100 * SECOND,
        "alive_ns": 0,
        "phase": "a training step",
        "phase_since_ns": 30 * SECOND,
        "epoch": 1,
        "step": 812,
        "wait": "",
        "wait_since_ns": 0,
        "wait_number": 0,
        "sentence": "",
        "blamed": (),
        "deadline_ns": 60 * SECOND,
        "operations": operations,
    }
    return FlightRecord(**{**values, **more})


def waiting(rank: int, awaited: RecordedOperation, *before: RecordedOperation, **more: Any) -> FlightRecord:
    """Return the record of a rank that has waited since second 40 for an operation of its queue."""
    given = {"wait": awaited.purpose, "wait_number": awaited.number, "wait_since_ns": 40 * SECOND, **more}
    return record(rank, *before, awaited, **given)
