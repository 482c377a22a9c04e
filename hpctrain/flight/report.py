"""The flight records of a directory: read, and told in lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpctrain.errors import DataError
from hpctrain.flight.autopsy import autopsy, newest
from hpctrain.flight.findings import place
from hpctrain.flight.ring import End, FlightRecord, file_name, read

_ENDS = {
    End.RUNNING: "did not say",
    End.FINISHED: "finished",
    End.FAILED: "failed",
    End.DEADLINE: "deadline",
    End.SIGNAL: "killed",
    End.LEFT: "left",
    End.WENT_ON: "went on",
}


def records_in(directory: Path, *, operations: bool = True) -> tuple[FlightRecord, ...]:
    """The records of the latest start in a directory, by rank. operations: as `read` takes it.

    Raises:
        DataError: there are none, or a file is none.
    """
    if not directory.is_dir():
        raise DataError(f"There is no directory {directory}; give that of a run.")
    paths = sorted(directory.glob(file_name(0).replace("00000", "*")))
    if not paths:
        raise DataError(f"{directory} holds no flight records (rank-*.flight); give the directory of a run that kept them.")
    return newest([read(path, operations=operations) for path in paths])


def explanation(directory: Path | None) -> list[str]:
    """Lines for the end of a job that hangs; none where nothing is kept."""
    if directory is None:
        return []
    try:
        return [f"autopsy: {sentence}" for sentence in autopsy(records_in(directory)).sentences]
    except (DataError, OSError) as error:
        return [f"autopsy: {error}"]


def table(records: Sequence[FlightRecord]) -> list[tuple[str, ...]]:
    """The cells of a table of the ranks, heads first: how each ended, its step, its phase and its wait with their seconds."""
    rows: list[tuple[str, ...]] = [("rank", "host", "end", "step", "phase", "for, s", "waits for", "for, s")]
    for record in records:
        waits = (record.wait, _seconds(record.last_ns - record.wait_since_ns)) if record.wait else ("", "")
        phase = record.phase or "start"
        since = _seconds(record.last_ns - (record.phase_since_ns or record.begun_ns))
        rows.append((str(record.rank), record.host, _ENDS[record.end], str(record.step or ""), phase, since, *waits))
    return rows


def as_json(records: Sequence[FlightRecord]) -> dict[str, object]:
    """All of it: the findings, and each rank's state with its unfinished operations."""
    result = autopsy(records)
    return {
        "findings": list(result.sentences),
        "blamed": list(result.blamed),
        "ranks": [_state(record) for record in records],
    }


def _state(record: FlightRecord) -> dict[str, object]:
    unfinished = [operation for operation in record.operations if not operation.done_ns]
    return {
        "rank": record.rank,
        "host": record.host,
        "process": record.process,
        "end": _ENDS[record.end],
        "sentence": record.sentence,
        "epoch": record.epoch,
        "step": record.step,
        "place": place(record),
        "seen": record.wall_seconds(record.seen_ns),
        "last": record.wall_seconds(record.last_ns),
        "waits_for": record.wait,
        "unfinished": [
            {
                "queue": operation.queue,
                "number": operation.sequence,
                "purpose": operation.purpose,
                "operation": operation.operation,
                "line": operation.line,
            }
            for operation in unfinished
        ],
    }


def _seconds(nanoseconds: int) -> str:
    return f"{max(0.0, nanoseconds * 1e-9):.1f}"
