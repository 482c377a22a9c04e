"""The state of a run, as its directory tells it from outside: while it runs, after it, and after it died.

Events in its metrics that are out of the ordinary come in words for people. Only reads; needs no MPI and no NumPy.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.core.errors import DataError
from hpctrain.core.files import json_object, read_bytes
from hpctrain.core.text import loss_text, spans
from hpctrain.flight.autopsy import autopsy, records_in
from hpctrain.flight.ring import FlightRecord
from hpctrain.launch.process_end import End
from hpctrain.runs.directory import RunDirectory, stored_checkpoints


@dataclass(frozen=True)
class RunEvent:
    """An event. time: seconds of the wall clock."""

    time: float
    text: str


def events_of(records: Iterable[Mapping[str, Any]]) -> list[RunEvent]:
    """Return the events among the records of a run, in their order; a record that lacks something is told as far as it goes."""
    events = []
    for record in records:
        words = _WORDS.get(str(record.get("kind")))
        if words is not None:
            events.append(RunEvent(float(record.get("time") or 0.0), words(record)))
    return events


def _start(record: Mapping[str, Any]) -> str:
    done = record.get("done_samples") or 0
    return f"training begins behind {done:,} samples" if done else "training begins"


def _resume(record: Mapping[str, Any]) -> str:
    changes = ", ".join(record.get("changes") or ())
    return f"resumed at step {record.get('step')}" + (f" with other {changes}" if changes else "")


def _skip(record: Mapping[str, Any]) -> str:
    return f"step {record.get('step')} skipped: {record.get('held') or 'a value'} of {record.get('layer') or 'it'} not finite"


def _rollback(record: Mapping[str, Any]) -> str:
    return f"went back from step {record.get('from_step')} to step {record.get('step')}: {record.get('error')}"


def _shrink(record: Mapping[str, Any]) -> str:
    lost = spans(record.get("lost") or ())
    return f"lost rank {lost}; continued with {record.get('ranks')} from step {record.get('step')}"


def _checkpoint(record: Mapping[str, Any]) -> str:
    return str(record.get("warning"))


def _unreadable(record: Mapping[str, Any]) -> str:
    return f"samples that could not be read, by step {record.get('step')}"


def _image_size(record: Mapping[str, Any]) -> str:
    return f"images of {record.get('size')} px from epoch {record.get('epoch')}"


def _stop(record: Mapping[str, Any]) -> str:
    return f"stopped by {record.get('by')} after step {record.get('step')}"


_WORDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "start": _start,
    "resume": _resume,
    "skip": _skip,
    "rollback": _rollback,
    "shrink": _shrink,
    "checkpoint": _checkpoint,
    "unreadable": _unreadable,
    "image_size": _image_size,
    "stop": _stop,
}


#: without a sign of life after which a rank of this machine counts as silent; the heartbeat gives one every second
SILENT_SECONDS = 10.0
# Largest plausible difference between two clocks.
_CLOCK_ERROR_SECONDS = 86400.0

Record = Mapping[str, Any]
#: (step, value), in the order of recording
Curve = tuple[tuple[float, float], ...]


def means_text(values: Record, unknown: str = "-") -> tuple[str, str, str]:
    """Return loss, top-1 and top-5 accuracy of a record as texts; `unknown` for values that are missing or not finite."""
    loss, accuracies = values.get("loss"), (values.get("top1"), values.get("top5"))
    top1, top5 = (unknown if value is None else f"{value:.2%}" for value in accuracies)
    return unknown if loss is None else loss_text(loss), top1, top5


@dataclass(frozen=True)
class RunState:
    """All that is known of a run at an instant.

    Args:
        now: seconds of the wall clock. records: lines of its metrics that can be read. ranks: records of the latest start.
        checkpoint: path of the newest one, without a look into it. end: a sentence on how it ended; None: it continues, or nobody
            knows.
    """

    path: Path
    now: float
    records: tuple[Record, ...]
    ranks: tuple[FlightRecord, ...]
    checkpoint: Path | None
    checkpoint_age_seconds: float
    end: str | None

    def latest(self, *kinds: str) -> Record:
        """Return the latest record of these kinds; an empty one if there is none."""
        return next(reversed(self.of_kind(*kinds)), {})

    def of_kind(self, *kinds: str) -> list[Record]:
        """Return all records of these kinds, in the order of recording."""
        return [record for record in self.records if record.get("kind") in kinds]

    @property
    def step(self) -> int:
        """The latest step that is known to have begun; 0 before the first."""
        running = max((record.step for record in self.ranks), default=0)
        return running or _number(self.latest("interval", "epoch", "stop").get("step")) or 0

    @property
    def done_samples(self) -> int:
        """Samples over all epochs at the latest record."""
        start, record = self.latest("start"), self.latest("interval", "epoch")
        if "epoch" not in record or "samples" not in start:
            return int(start.get("done_samples", 0))
        return int((record["epoch"] - 1) * start["samples"] + record.get("images", 0))

    @property
    def seconds_left(self) -> float | None:
        """For the rest of the training, at the pace since its latest start; None if that is not known."""
        start, record = self.latest("start"), self.latest("interval", "epoch")
        done = self.done_samples - start.get("done_samples", 0)
        seconds = (record.get("time") or 0.0) - (start.get("time") or 0.0)
        if done <= 0 or seconds <= 0:
            return None
        pace = seconds / done
        return float(pace * max(0, start["last_sample"] - self.done_samples))

    def curve(self, measure: str, *kinds: str) -> Curve:
        """Return a measure over steps; values that are not finite are left out."""
        points = ((record.get("step"), record.get(measure)) for record in self.of_kind(*kinds))
        return tuple((step, value) for step, value in points if isinstance(step, int) and isinstance(value, int | float))

    @property
    def events(self) -> list[RunEvent]:
        """Events out of the ordinary, in order."""
        return events_of(self.records)

    def silent_seconds(self, record: FlightRecord) -> float:
        """Return the seconds since a rank last gave a sign of life."""
        return max(0.0, self.now - record.wall_seconds(record.last_ns))


class RunReader:
    """Reads a run again and again; its metrics only where they have changed.

    Args:
        directory: of the run. follows: whether it is read repeatedly. Silence of ranks on other machines, whose clocks may
            differ, is then measured by the time between reads.
    """

    def __init__(self, directory: RunDirectory, *, follows: bool = False) -> None:
        self.directory = directory
        self._follows = follows
        self._last_signs: dict[tuple[int, int], tuple[int, float]] = {}
        self._read_at: tuple[int, ...] = ()
        self._records: tuple[Record, ...] = ()

    def read(self, now: float) -> RunState:
        """Return the state at an instant of the wall clock. What is being written, is torn or is gone meanwhile is left out."""
        records, ranks = self._metrics(), _flight(self.directory)
        newest = next(reversed(stored_checkpoints(self.directory.checkpoints)), None)
        path, age_seconds = (None, now) if newest is None else (newest.path, max(0.0, now - newest.written))
        end = _end(records, ranks, now, self._silences(ranks))
        return RunState(self.directory.path, now, records, ranks, path, age_seconds, end)

    def _silences(self, ranks: Sequence[FlightRecord]) -> Mapping[int, float] | None:
        """Return, by rank, the seconds since this reader last saw a sign of life; None if it does not follow the run."""
        if not self._follows:
            return None
        seconds = time.monotonic()
        for record in ranks:
            known = self._last_signs.get((record.job, record.rank))
            if known is None or known[0] != record.last_ns:
                self._last_signs[record.job, record.rank] = record.last_ns, seconds
        return {record.rank: seconds - self._last_signs[record.job, record.rank][1] for record in ranks}

    def _metrics(self) -> tuple[Record, ...]:
        try:
            status = os.stat(self.directory.metrics_path)
            read_at = (status.st_ino, status.st_size, status.st_mtime_ns)
            if read_at != self._read_at:
                self._records = tuple(_lines(read_bytes(self.directory.metrics_path)))
                self._read_at = read_at
        except (DataError, OSError):
            return ()
        return self._records


def _lines(content: bytes) -> list[Record]:
    """Return all whole lines that are JSON objects."""
    records = (json_object(line) for line in content.split(b"\n")[:-1])
    return [record for record in records if record is not None]


def _flight(directory: RunDirectory) -> tuple[FlightRecord, ...]:
    """Return the records of the ranks, without their operations; none if none can be read here."""
    try:
        return records_in(directory.flight_records(), operations=False)
    except (DataError, OSError):
        return ()


def _end(
    records: Sequence[Record], ranks: Sequence[FlightRecord], now: float, silences: Mapping[int, float] | None = None
) -> str | None:
    """Return how the run ended, by its metrics alone if no records of ranks are kept. silences: see `RunReader._silences`."""
    if not ranks:
        return _stopped(records) or ("finished" if _complete(records) else None)
    if not all(_has_ended(record, now, None if silences is None else silences[record.rank]) for record in ranks):
        return None
    if all(record.end is End.FINISHED for record in ranks):
        return _stopped(records) or "finished"
    return autopsy(ranks).sentences[0].rstrip(".")


def _has_ended(record: FlightRecord, now: float, silent_seconds: float | None = None) -> bool:
    """Return whether a rank has recorded its end, is no process of this machine any more, or has been silent for too long.

    silent_seconds: the silence that the reader has measured; None: not measured. It replaces a silence of less than a day by the
    clocks of two machines, which may be wrong by hours.
    """
    if record.end is not End.RUNNING:
        return True
    silent = now - record.wall_seconds(record.last_ns)
    if record.host == socket.gethostname():
        return abs(silent) > SILENT_SECONDS and not _lives(record.process)  # the clock may have been set back
    if silent_seconds is not None and silent < _CLOCK_ERROR_SECONDS:
        silent = silent_seconds
    return silent > SILENT_SECONDS + record.deadline_ns * 1e-9  # the record may come from its node as late as that


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _stopped(records: Sequence[Record]) -> str | None:
    """Return the words on what has stopped the run, if nothing has begun since."""
    last = next((record for record in reversed(records) if record.get("kind") in ("stop", "start")), {})
    return f"stopped by {last.get('by')} after step {last.get('step')}" if last.get("kind") == "stop" else None


def _complete(records: Sequence[Record]) -> bool:
    """Return whether the last epoch of the latest start was recorded."""
    start = next((record for record in reversed(records) if record.get("kind") == "start"), {})
    return any(record.get("kind") == "epoch" and record.get("epoch") == start.get("epochs") for record in records)


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None
