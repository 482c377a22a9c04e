"""The form of an autopsy's findings, and the words that its rules share: ranks, places, silences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.flight.ring import FlightRecord, RecordedOperation
from hpctrain.rank_spans import spans

# A process that has been silent for so much longer than the latest one is taken for dead, or stopped: its heartbeat looks once a
# second, and twenty times within a deadline that is short.
_SILENT_SECONDS = 3.0
_SILENT_SHARE = 0.5


@dataclass(frozen=True)
class Autopsy:
    """The findings, the most important first, and the ranks that they blame."""

    sentences: tuple[str, ...]
    blamed: tuple[int, ...] = ()


def place(record: FlightRecord) -> str:
    """The phase and the step of a rank."""
    phase = record.phase or "its start"
    return f"{phase}, step {record.step}" if record.step else phase


def named(ranks: Sequence[int]) -> str:
    """'rank 3', or 'ranks 0-2, 5'."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks)}"


def posted_at(operation: RecordedOperation) -> str:
    """The line of the program that posted an operation, as the end of a clause; empty where it is not known."""
    return f" ({operation.line})" if operation.line else ""


def latest_seconds(records: Sequence[FlightRecord]) -> float:
    """The last instant at which any of the processes is known to have lived, on the wall clock."""
    return max(record.wall_seconds(record.last_ns) for record in records)


def silent_seconds(record: FlightRecord, latest: float) -> float:
    """Seconds from the last sign of life of a process to the latest of all; 0 where they are too few to say anything."""
    silent = latest - record.wall_seconds(record.last_ns)
    least = min(_SILENT_SECONDS, _SILENT_SHARE * record.deadline_ns * 1e-9) if record.deadline_ns else _SILENT_SECONDS
    return silent if silent > least else 0.0


def silence(record: FlightRecord, seconds: float) -> str:
    """The sentence about a process that has been silent for so long."""
    last = f"Rank {record.rank} was silent for {seconds:.0f} s at the end, last in {place(record)}"
    return f"{last}: ended, stopped, or its node lost."
