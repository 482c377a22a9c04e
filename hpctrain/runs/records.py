"""Records of a run: files of JSON lines that grow with it, including its hashes.

Each append writes whole lines. A resume cuts the files back, so that no step is recorded twice. These files are not essential: if
their disk is full or missing, `Bookkeeping` warns once and the training continues. Lines are written later if possible, and lost
lines are reported at the end. Checkpoints are not written this way.

The file of a run's hashes has one compact line for each step with hashes:

    {"tensors": ["parameters/conv1.weight", ...]}                        keys for the following lines, until the next line of keys
    {"step": 100, "epoch": 1, "all": "5f0c...", "hashes": "91b2..."}     16 digits for each tensor, concatenated

One process writes. Nothing here communicates.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.core.errors import CheckpointError, DataError
from hpctrain.core.files import json_object, read_bytes
from hpctrain.core.text import counted
from hpctrain.storage.atomic_write import write_bytes

#: maximum number of records queued in memory; the oldest ones are dropped first
MOST_WAITING = 100_000

_log = logging.getLogger(__name__)


class Bookkeeping:
    """Writer of files that are not essential for the run. It logs each failure once, and is not thread-safe."""

    def __init__(self) -> None:
        self._failing: dict[str, str] = {}

    def attempt(self, what: str, write: Callable[[], object]) -> bool:
        """Call `write`. If it fails, log a warning unless the previous attempt failed for the same reason.

        Args:
            what: name of the files for messages, for example "metrics".

        Returns:
            Whether the write succeeded.
        """
        try:
            write()
        except OSError as error:
            why = reason(error)
            if self._failing.get(what) != why:
                _log.warning("Cannot write the %s (%s); the run continues and will try again.", what, why)
            self._failing[what] = why
            return False
        if self._failing.pop(what, None) is not None:
            _log.warning("The %s can be written again.", what)
        return True

    def lost(self, what: str, extent: str) -> None:
        """Log that records of the files `what` are lost.

        Args:
            extent: amount, for example "3 lines".
        """
        _log.warning("%s of the %s could not be written (%s) and are lost.", extent, what, self._failing.get(what, "no reason"))


class PatientRecords:
    """Queue of records, written in order as soon as possible.

    Args:
        append: function that writes one record atomically.
    """

    def __init__(self, bookkeeping: Bookkeeping, what: str, append: Callable[[Mapping[str, Any]], None]) -> None:
        self._bookkeeping, self._what, self._append = bookkeeping, what, append
        self._waiting: list[Mapping[str, Any]] = []
        self._dropped = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Queue a record, and try to write the queue. If the queue is full, its oldest record is lost."""
        self._waiting.append(record)
        if len(self._waiting) > MOST_WAITING:
            del self._waiting[0]
            self._dropped += 1
        self._bookkeeping.attempt(self._what, self._write)

    def close(self) -> None:
        """Try once more to write the queued records, and log the number of lost ones. A second call has no effect."""
        if self._waiting:
            self._bookkeeping.attempt(self._what, self._write)
        lost = len(self._waiting) + self._dropped
        if lost:
            self._bookkeeping.lost(self._what, counted(lost, "line"))
        self._waiting, self._dropped = [], 0

    def _write(self) -> None:
        while self._waiting:
            self._append(self._waiting[0])
            del self._waiting[0]


def reason(error: OSError) -> str:
    """Return the operating system's description of an error."""
    return error.strerror or str(error)


def append_lines(path: Path, text: str) -> None:
    """Append lines and hand them to the operating system. An incomplete last line, left by a killed process, is removed first.

    One process appends at a time.
    """
    with open(path, "ab+") as file:
        _cut_torn_line(file.fileno())
        file.write(text.encode())


def _cut_torn_line(descriptor: int) -> None:
    """Truncate the file to its last complete line."""
    size = os.fstat(descriptor).st_size
    end, block = size, b""
    while end and b"\n" not in block:
        start = max(0, end - 4096)
        block = os.pread(descriptor, end - start, start)
        end = start + block.rindex(b"\n") + 1 if b"\n" in block else start
    if end != size:
        os.ftruncate(descriptor, end)


def cut_back(path: Path, epoch: int, step: int, *, evaluates: bool = False, goes_back: bool = False) -> None:
    """Remove the records after a position from `path`, because the run will record them again.

    Records without a step are kept, as are lines that no run has written. An incomplete last line is removed. Any other line that
    is not a JSON object is moved to `unreadable_path`, with a warning. The file on the disk is replaced atomically. One process
    at a time may call this.

    Args:
        epoch: epoch of the next step, counted from 0.
        evaluates: whether the position will be evaluated again.
        goes_back: True: a running training rolls back to the position, and its records of earlier rollbacks are kept. False: a
            run resumes there.

    Raises:
        CheckpointError: the file cannot be read or written; it is unchanged.
    """
    if not path.exists():
        return
    try:
        text = read_bytes(path)
    except OSError as error:
        raise CheckpointError(
            f"Cannot read the records {path} ({reason(error)}); make the file readable, or delete it."
        ) from error
    *lines, _torn = text.split(b"\n")
    records = [json_object(line) for line in lines]
    unreadable = [line for line, record in zip(lines, records, strict=True) if record is None]
    kept = [
        line
        for line, record in zip(lines, records, strict=True)
        if record is not None and not _is_recorded_again(record, epoch, step, evaluates, goes_back)
    ]
    new = b"".join(line + b"\n" for line in kept)
    if new == text:
        return
    try:
        if unreadable:
            _keep_unreadable(path, unreadable)
        write_bytes(path, new)
    except OSError as error:
        raise CheckpointError(f"Cannot cut the records {path} back to step {step} ({reason(error)}).") from error


def unreadable_path(path: Path) -> Path:
    """Return the path of the file that receives lines of `path` that are not JSON objects."""
    return path.with_name(f"{path.stem}-unreadable.txt")


def _is_recorded_again(record: Mapping[str, object], epoch: int, step: int, evaluates: bool, goes_back: bool) -> bool:
    """Return whether a run that resumes at this position will write this record again.

    A checkpoint of an epoch's last step may predate the epoch's summary. In that case it still belongs to that epoch.
    """
    its_step, its_epoch = record.get("step"), record.get("epoch")
    is_of_a_run = isinstance(record.get("kind"), str) or isinstance(record.get("hashes"), str)
    if not isinstance(its_step, int) or not is_of_a_run:
        return False
    if its_step != step or not isinstance(its_epoch, int):
        return its_step > step
    if record.get("kind") == "epoch":
        return its_epoch > epoch
    if record.get("kind") == "evaluation":  # `epoch` is the number of epochs done
        return its_epoch > epoch or evaluates
    if record.get("kind") == "test":  # a resumed run tests again
        return True
    if record.get("kind") == "image_size":  # recorded at the start of the epoch that begins here
        return True
    if record.get("kind") == "rollback":  # a rollback to this step
        return not goes_back
    return False


def _keep_unreadable(path: Path, lines: Sequence[bytes]) -> None:
    other = unreadable_path(path)
    first = lines[0][:80].decode(errors="replace")
    moved = counted(len(lines), "line")
    _log.warning("Moved %s without a JSON object (first %r) from %s to %s.", moved, first, path, other)
    with open(other, "ab") as file:
        file.write(b"".join(line + b"\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())


#: number of hexadecimal digits of a hash
DIGITS = 16


@dataclass(frozen=True)
class HashRecord:
    """Hashes of a run's state after `step` steps.

    Attributes:
        keys: keys of the tensors, as in a checkpoint, parameters first.
        digests: concatenated hashes of the tensors, `DIGITS` hexadecimal digits each.
        whole: one hash of all tensors.
    """

    step: int
    keys: tuple[str, ...]
    digests: str
    whole: str

    def by_key(self) -> dict[str, str]:
        """Return the hash of each tensor by key."""
        return {key: self.digests[DIGITS * place : DIGITS * (place + 1)] for place, key in enumerate(self.keys)}

    def different(self, other: HashRecord) -> tuple[str, ...]:
        """Return the keys of tensors whose hashes differ or that only one record has, parameters first."""
        if (self.keys, self.digests) == (other.keys, other.digests):
            return ()
        here, there = self.by_key(), other.by_key()
        return tuple(key for key in dict.fromkeys([*here, *there]) if here.get(key) != there.get(key))


class HashFile:
    """Writer of the file of a run's hashes, which a resume may have cut back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys: tuple[str, ...] | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record atomically, unless an earlier part of the run ends with a record of the same step.

        Args:
            record: "step", "epoch", "all", and "hashes" by key.

        Raises:
            OSError: the write failed.
        """
        if self._keys is None:
            self._keys, step = self._latest()
            if step == record["step"]:
                return
        keys = tuple(record["hashes"])
        lines = [{**record, "hashes": "".join(record["hashes"].values())}]
        if keys != self._keys:
            lines.insert(0, {"tensors": list(keys)})
        append_lines(self._path, "".join(json.dumps(line) + "\n" for line in lines))
        self._keys = keys

    def _latest(self) -> tuple[tuple[str, ...], int | None]:
        """Return the last keys of an earlier part of the run and its last step; ((), None) if they cannot be read."""
        try:
            records = read_hashes(self._path)
            *_, (keys, _) = _lines(self._path, read_bytes(self._path))
        except (DataError, OSError, ValueError):
            return (), None
        return keys, max(records, default=None)


def read_hashes(path: Path) -> dict[int, HashRecord]:
    """Return all complete records of a file by step, without an incomplete last line; {} if there is no file.

    Raises:
        DataError: another line is not a record.
    """
    if not path.exists():
        return {}
    return {
        line["step"]: HashRecord(line["step"], keys, line["hashes"], str(line.get("all", "")))
        for keys, line in _lines(path, read_bytes(path))
        if line is not None
    }


def _lines(path: Path, content: bytes) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any] | None]]:
    """Yield (keys, record) for each complete line; the record is None for a line of keys."""
    keys: tuple[str, ...] = ()
    *lines, _torn = content.split(b"\n")
    for number, text in enumerate(lines, 1):
        line = json_object(text) or {}
        tensors = line.get("tensors")
        if isinstance(tensors, list) and all(isinstance(key, str) for key in tensors):
            keys = tuple(tensors)
            yield keys, None
        elif _is_record(line, keys):
            yield keys, line
        else:
            raise DataError(f"Line {number} of {path} does not contain hashes of {len(keys)} tensors; delete the line.")


def _is_record(line: Mapping[str, Any], keys: tuple[str, ...]) -> bool:
    step, digests = line.get("step"), line.get("hashes")
    return isinstance(step, int) and isinstance(digests, str) and len(digests) == DIGITS * len(keys)
