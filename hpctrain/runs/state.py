"""State of a run, read from its directory during the run, after it, and after a crash.

Unusual events in its metrics are described as text. Nothing is written. MPI and NumPy are not needed.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.core.errors import CheckpointError, DataError, RunOwnedError
from hpctrain.core.files import json_object, read_bytes
from hpctrain.core.text import loss_text
from hpctrain.flight.autopsy import autopsy, records_in
from hpctrain.flight.ring import FlightRecord
from hpctrain.launch.process_end import End
from hpctrain.runs.directory import RunDirectory, stored_checkpoints
from hpctrain.runs.owner import living_owner


@dataclass(frozen=True)
class RunEvent:
    """Unusual event of a run.

    Attributes:
        time: seconds of the wall clock.
    """

    time: float
    text: str


def run_events(records: Iterable[Mapping[str, Any]]) -> list[RunEvent]:
    """Return the events among the records of a run, in order. A missing field of a record appears as None in its text."""
    events = []
    for record in records:
        words = _TEXTS.get(str(record.get("kind")))
        if words is not None:
            events.append(RunEvent(float(record.get("time") or 0.0), _shown(words(record))))
    return events


def _start(record: Mapping[str, Any]) -> str:
    done = record.get("done_samples") or 0
    return f"training begins after {done:,} samples" if done else "training begins"


def _resume(record: Mapping[str, Any]) -> str:
    changes = ", ".join(record.get("changes") or ())
    return f"resumed at step {record.get('step')}" + (f" with changed {changes}" if changes else "")


def _skip(record: Mapping[str, Any]) -> str:
    of = f" of {record['layer']}" if record.get("layer") else ""
    return f"step {record.get('step')} skipped: {record.get('held') or 'a value'}{of} not finite"


#: text of an event, by the kind of its record
_TEXTS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "start": _start,
    "resume": _resume,
    "skip": _skip,
    "rollback": lambda record: (
        f"went back from step {record.get('from_step')} to step {record.get('step')}: {record.get('error')}"
    ),
    "checkpoint": lambda record: str(record.get("warning")),
    "unreadable": lambda record: f"samples that could not be read, by step {record.get('step')}",
    "image_size": lambda record: f"images of {record.get('size')} px from epoch {record.get('epoch')}",
    "stop": lambda record: f"stopped by {record.get('by')} after step {record.get('step')}",
}


#: time without a sign of life after which a rank on this machine is considered silent; the heartbeat writes one per second
SILENT_SECONDS = 10.0
# Maximum plausible difference between two clocks.
_CLOCK_ERROR_SECONDS = 86400.0

Record = Mapping[str, Any]
#: (step, value) pairs, in the order of recording
Curve = tuple[tuple[float, float], ...]


def means_text(values: Record, unknown: str = "-") -> tuple[str, str, str]:
    """Return loss, top-1 and top-5 accuracy of a record as text; `unknown` for values that are missing or not finite."""
    loss, accuracies = values.get("loss"), (values.get("top1"), values.get("top5"))
    top1, top5 = (unknown if value is None else f"{value:.2%}" for value in accuracies)
    return unknown if loss is None else loss_text(loss), top1, top5


def evaluated_set(evaluation: Record) -> str:
    """Return the set of an evaluation: "validation" or "test"."""
    return str(evaluation.get("set", "test"))


@dataclass(frozen=True)
class RunState:
    """State of a run at an instant.

    Args:
        now: the instant, in seconds of the wall clock.
        records: readable lines of its metrics.
        ranks: flight records of the ranks of the latest start.
        checkpoint: path of the newest checkpoint, which is not opened; None: there is none.
        end: sentence on how the run ended; None: it continues, or its end is unknown.
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
        """Latest step that is known to have begun; 0 before the first."""
        running = max((record.step for record in self.ranks), default=0)
        return running or self.latest("interval", "epoch", "stop").get("step") or 0

    @property
    def done_samples(self) -> int:
        """Number of samples processed until the latest record, over all epochs."""
        start, record = self.latest("start"), self.latest("interval", "epoch")
        if "epoch" not in record or "samples" not in start:
            return int(start.get("done_samples", 0))
        return int((record["epoch"] - 1) * start["samples"] + record.get("images", 0))

    @property
    def seconds_left(self) -> float | None:
        """Estimated time for the rest of the training, at the pace since its latest start; None if it is unknown."""
        start, record = self.latest("start"), self.latest("interval", "epoch")
        done = self.done_samples - start.get("done_samples", 0)
        seconds = (record.get("time") or 0.0) - (start.get("time") or 0.0)
        if done <= 0 or seconds <= 0 or "last_sample" not in start:
            return None
        pace = seconds / done
        return float(pace * max(0, start["last_sample"] - self.done_samples))

    def curve(self, measure: str, *kinds: str) -> Curve:
        """Return the metric `measure` of records of these kinds over steps, without values that are not finite."""
        points = ((record.get("step"), record.get(measure)) for record in self.of_kind(*kinds))
        return tuple((step, value) for step, value in points if step is not None and value is not None)

    @property
    def events(self) -> list[RunEvent]:
        """Unusual events, in order."""
        return run_events(self.records)

    def silent_seconds(self, record: FlightRecord) -> float:
        """Return the time since a rank's last sign of life."""
        return max(0.0, self.now - record.wall_seconds(record.last_ns))


class RunReader:
    """Reader of the state of a run. It reads the metrics again only if their file has changed.

    Args:
        directory: directory of the run.
        follows: whether `read` is called repeatedly. In that case the silence of ranks on other machines, whose clocks may
            differ, is measured by the time between reads.
    """

    def __init__(self, directory: RunDirectory, *, follows: bool = False) -> None:
        self.directory = directory
        self._follows = follows
        self._last_signs: dict[tuple[int, int], tuple[int, float]] = {}
        self._read_at: tuple[int, ...] = ()
        self._records: tuple[Record, ...] = ()

    def read(self, now: float) -> RunState:
        """Return the state at an instant of the wall clock. Metrics and flight records that cannot be read are left out."""
        records, ranks = self._metrics(), _flight(self.directory)
        newest = next(reversed(stored_checkpoints(self.directory.checkpoints)), None)
        path, age_seconds = (None, now) if newest is None else (newest.path, max(0.0, now - newest.written))
        end = _end(records, ranks, now, self._silences(ranks))
        return RunState(self.directory.path, now, records, ranks, path, age_seconds, end)

    def _silences(self, ranks: Sequence[FlightRecord]) -> Mapping[int, float] | None:
        """Return, by rank, the time since this reader last saw a new sign of life; None if it does not follow the run."""
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


def is_training(run: RunDirectory) -> bool:
    """Return whether a run is training, as far as this machine can see."""
    with suppress(CheckpointError):
        with suppress(RunOwnedError, OSError):  # an owner whose record cannot be read may be alive
            if living_owner(run.path) is None:
                return False
        return RunReader(run).read(time.time()).end is None
    return False


def _lines(content: bytes) -> list[Record]:
    """Return all complete lines that are JSON objects, without values that no run writes, so that readers need no checks."""
    records = (json_object(line) for line in content.split(b"\n")[:-1])
    return [
        {key: _shown(value) if isinstance(value, str) else value for key, value in record.items() if _fits(key, value)}
        for record in records
        if record is not None
    ]


_WHOLE = frozenset(("epoch", "epochs", "step", "from_step", "images", "samples", "done_samples", "last_sample", "size"))
_NUMBERS = frozenset(("loss", "top1", "top5", "ema_loss", "ema_top1", "ema_top5", "lr", "images_per_second", "time"))
_TEXTS_OF_RUNS = frozenset(("kind", "set", "by", "error", "warning", "held", "layer"))
_LARGEST_WHOLE, _LARGEST, _LATEST = 1 << 53, 1e200, 1e11
_MOST_CHARACTERS = 2000


def _fits(key: str, value: object) -> bool:
    """Return whether a run can have written this value of a field of a record."""
    if key in _WHOLE:
        return type(value) is int and abs(value) <= _LARGEST_WHOLE
    if key in ("lost", "ranks"):
        return all(type(item) is int and 0 <= item <= _LARGEST_WHOLE for item in (value if isinstance(value, list) else [value]))
    if key in _NUMBERS and value is None:  # it was not finite
        return True
    expected = str if key in _TEXTS_OF_RUNS else dict if key == "changes" else int | float if key in _NUMBERS else object
    if not isinstance(value, expected) or (key in _NUMBERS and isinstance(value, bool)):
        return False
    return not isinstance(value, int | float) or abs(value) <= (_LATEST if key == "time" else _LARGEST)


def _shown(text: str) -> str:
    """Return a text cut to a bounded length, with a substitute for each character that UTF-8 cannot encode."""
    return text[:_MOST_CHARACTERS].encode(errors="replace").decode()


def _flight(directory: RunDirectory) -> tuple[FlightRecord, ...]:
    """Return the records of the ranks without their operations; none if they cannot be read on this machine."""
    try:
        return records_in(directory.flight_records(), operations=False)
    except (DataError, OSError):
        return ()


def _end(
    records: Sequence[Record], ranks: Sequence[FlightRecord], now: float, silences: Mapping[int, float] | None = None
) -> str | None:
    """Return how the run ended; None if it continues or its end is unknown.

    Without flight records, only the metrics of the run are used.

    Args:
        silences: see `RunReader._silences`.
    """
    if not ranks:
        return _stopped(records) or ("finished" if _complete(records) else None)
    if not all(_has_ended(record, now, None if silences is None else silences[record.rank]) for record in ranks):
        return None
    if all(record.end is End.FINISHED for record in ranks):
        return _stopped(records) or "finished"
    return autopsy(ranks).sentences[0].rstrip(".")


def _has_ended(record: FlightRecord, now: float, silent_seconds: float | None = None) -> bool:
    """Return whether a rank has ended.

    It has ended if it has recorded its end, if its process on this machine is gone, or if it has been silent for too long.

    Args:
        silent_seconds: silence measured by the reader; None: not measured. It replaces a silence of less than a day between the
            clocks of two machines, which may differ by hours.
    """
    if record.end is not End.RUNNING:
        return True
    silent = now - record.wall_seconds(record.last_ns)
    if record.host == socket.gethostname():
        return abs(silent) > SILENT_SECONDS and not _lives(record.process)  # the clock may have been set back
    if silent_seconds is not None and silent < _CLOCK_ERROR_SECONDS:
        silent = silent_seconds
    return silent > SILENT_SECONDS + record.deadline_ns * 1e-9  # maximum delay of a record from another node


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _stopped(records: Sequence[Record]) -> str | None:
    """Return as text what stopped the run; None if it was not stopped, or was started again afterwards."""
    last = next((record for record in reversed(records) if record.get("kind") in ("stop", "start")), {})
    return f"stopped by {last.get('by')} after step {last.get('step')}" if last.get("kind") == "stop" else None


def _complete(records: Sequence[Record]) -> bool:
    """Return whether the last epoch of the latest start was recorded."""
    start = next((record for record in reversed(records) if record.get("kind") == "start"), {})
    return any(record.get("kind") == "epoch" and record.get("epoch") == start.get("epochs") for record in records)
