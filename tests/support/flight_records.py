"""Flight records as ranks leave them, made up: of a job whose ranks wait for each other."""

from __future__ import annotations

from typing import Any

from hpctrain.flight.ring import End, FlightRecord, RecordedOperation

SECOND = 1_000_000_000
ALL = "all gradients of 0-3"


def operation(number: int, purpose: str, *, started: bool = True, done: bool = False, **more: Any) -> RecordedOperation:
    """Queued one second after the other; number and sequence are the same here."""
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
    """Since the 40th second, for an operation of its queue."""
    given = {"wait": awaited.purpose, "wait_number": awaited.number, "wait_since_ns": 40 * SECOND, **more}
    return record(rank, *before, awaited, **given)
