"""The flight records of a directory: read, and told in lines."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.core.errors import DataError
from hpctrain.flight.autopsy import autopsy, newest
from hpctrain.flight.findings import place
from hpctrain.launch.exit_codes import End
from hpctrain.flight.ring import FlightRecord, file_name, read

_ENDS = {
    End.RUNNING: "did not say",
    End.FINISHED: "finished",
    End.FAILED: "failed",
    End.DEADLINE: "deadline",
    End.SIGNAL: "killed",
    End.LEFT: "left",
    End.WENT_ON: "went on",
    End.LAUNCHER: "launcher",
    End.CLOSED: "closed",
}
_NAME = re.compile(re.escape(file_name(0)).replace("00000", r"(\d{5,7})"))
#: prefix of directories, numbered from 1, with the records from before a loss of ranks
BEFORE_LOSS = "before-loss-"
# Largest number of damaged records that are reported one by one; the others are counted.
_MOST_NOTES = 8


@dataclass(frozen=True)
class FoundRecords:
    """The content of a directory of records.

    Attributes:
        records: of the latest start, by rank. damaged: a sentence per record that cannot be read. others: number of entries
            that are no records.
    """

    records: tuple[FlightRecord, ...]
    damaged: tuple[str, ...] = ()
    others: int = 0

    def notes(self) -> list[str]:
        """Return a sentence for each of the first damaged records, and one with the number of the others."""
        lines = list(self.damaged[:_MOST_NOTES])
        if len(self.damaged) > _MOST_NOTES:
            lines.append(f"{len(self.damaged) - _MOST_NOTES} more records cannot be read.")
        if self.others:
            lines.append(f"{self.others} {'entry is' if self.others == 1 else 'entries are'} no flight record, and left out.")
        return lines


def find_records(directory: Path, *, operations: bool = True) -> FoundRecords:
    """Return the records of the latest start in a directory, and what else it holds. operations: see `read`.

    Raises:
        DataError: the directory or none of its records can be read.
    """
    try:
        names = sorted(os.listdir(directory))
    except NotADirectoryError as error:
        raise DataError(f"{directory} is no directory; give that of a run.") from error
    except FileNotFoundError as error:
        raise DataError(f"There is no directory {directory}; give that of a run.") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{str(directory)!r} cannot be read ({error}); give the directory of a run.") from error
    records, damaged = [], []
    ours = [(int(match[1]), directory / name) for name in names if (match := _NAME.fullmatch(name))]
    for rank, path in ours:
        try:
            record = read(path, operations=operations)
        except DataError as error:
            damaged.append(str(error))
        except OSError as error:
            damaged.append(f"{path} cannot be read: {error.strerror or error}.")
        else:
            if record.rank == rank:
                records.append(record)
            else:
                damaged.append(f"{path} holds the record of rank {record.rank}; delete it.")
    if not records:
        if damaged:
            raise DataError(f"No flight record in {directory} can be read. {damaged[0]}")
        raise DataError(f"{directory} holds no flight records (rank-*.flight); give the directory of a run that kept them.")
    earlier = sum(name.startswith(BEFORE_LOSS) for name in names)
    return FoundRecords(newest(records), tuple(damaged), len(names) - len(ours) - earlier)


def records_in(directory: Path, *, operations: bool = True) -> tuple[FlightRecord, ...]:
    """Return the records of the latest start in a directory, by rank; see `find_records`.

    Raises:
        DataError: no record there can be read.
    """
    return find_records(directory, operations=operations).records


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


def as_json(records: Sequence[FlightRecord], notes: Sequence[str] = ()) -> dict[str, object]:
    """Return the findings, and each rank's state with its unfinished operations. notes: about files that were left out."""
    result = autopsy(records)
    return {
        "findings": list(result.sentences),
        "blamed": list(result.blamed),
        "notes": list(notes),
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
