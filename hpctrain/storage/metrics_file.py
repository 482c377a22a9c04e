"""Files of JSON lines that grow with a run, as its metrics do: appended to, and cut back at a resume: no step comes twice."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.core.errors import CheckpointError
from hpctrain.core.files import json_object, read_bytes
from hpctrain.log import get_logger
from hpctrain.storage.atomic_write import write_bytes

_log = get_logger(__name__)


def append(path: Path, text: str) -> None:
    """Append lines; they are the system's before this returns. A line that a kill has torn is cut off first.

    One process appends at a time.
    """
    with open(path, "ab+") as file:
        _cut_torn_line(file.fileno())
        file.write(text.encode())


def _cut_torn_line(descriptor: int) -> None:
    """Shorten the file to its last complete line."""
    size = os.fstat(descriptor).st_size
    end, block = size, b""
    while end and b"\n" not in block:
        start = max(0, end - 4096)
        block = os.pread(descriptor, end - start, start)
        end = start + block.rindex(b"\n") + 1 if b"\n" in block else start
    if end != size:
        os.ftruncate(descriptor, end)


def cut_back(path: Path, epoch: int, step: int, *, evaluates: bool = False, goes_back: bool = False) -> None:
    """Remove the records after a position from `path`, as the run will record them again.

    Records without a step stay, and so do lines that no run has written.

    A last line that a kill has torn goes. Any other line that is no JSON object moves to `unreadable_path`, with a warning. At
    every moment `path` is either what it was before or complete, on the disk. One process at a time.

    Args:
        epoch, step: of the position: the next step's epoch, and the steps done. evaluates: it will be evaluated again, too.
        goes_back: the run itself goes back to the position, so that what it says of earlier times stays.

    Raises:
        CheckpointError: the file cannot be read or written; it is what it was before.
    """
    if not path.exists():
        return
    try:
        text = read_bytes(path)
    except OSError as error:
        raise CheckpointError(f"The records {path} cannot be read ({error.strerror}); allow it, or remove the file.") from error
    *lines, _torn = text.split(b"\n")
    records = [json_object(line) for line in lines]
    unreadable = [line for line, record in zip(lines, records, strict=True) if record is None]
    kept = [
        line
        for line, record in zip(lines, records, strict=True)
        if record is not None and not _is_behind(record, epoch, step, evaluates, goes_back)
    ]
    new = b"".join(line + b"\n" for line in kept)
    if new == text:
        return
    try:
        if unreadable:
            _keep_unreadable(path, unreadable)
        write_bytes(path, new)
    except OSError as error:
        raise CheckpointError(
            f"The records {path} cannot be cut back to step {step} of the checkpoint ({error.strerror}); make room or allow it."
        ) from error


def unreadable_path(path: Path) -> Path:
    """Where lines of `path` go that are no JSON objects."""
    return path.with_name(f"{path.stem}-unreadable.txt")


def _is_behind(record: Mapping[str, object], epoch: int, step: int, evaluates: bool, goes_back: bool) -> bool:
    """Whether a run that goes on from the position records this again.

    A checkpoint at an epoch's last step may be older than the end of the epoch: then its epoch is still that one.
    """
    its_step, its_epoch = record.get("step"), record.get("epoch")
    is_of_a_run = isinstance(record.get("kind"), str) or isinstance(record.get("hashes"), str)
    if not isinstance(its_step, int) or not is_of_a_run:
        return False
    if its_step != step or not isinstance(its_epoch, int):
        return its_step > step
    if record.get("kind") == "epoch":
        counted_from_0 = "images" not in record  # as runs of earlier versions did
        return its_epoch + counted_from_0 > epoch
    if record.get("kind") == "evaluation":  # it counts the epochs done
        return its_epoch > epoch or evaluates
    if record.get("kind") == "image_size":  # of the epoch that begins here
        return True
    if record.get("kind") == "rollback":  # to here, from steps behind
        return not goes_back
    return False


def _keep_unreadable(path: Path, lines: Sequence[bytes]) -> None:
    other = unreadable_path(path)
    first = lines[0][:80].decode(errors="replace")
    _log.warning("%d lines of %s are no JSON objects (first %r); they are in %s now.", len(lines), path, first, other)
    with open(other, "ab") as file:
        file.write(b"".join(line + b"\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())
