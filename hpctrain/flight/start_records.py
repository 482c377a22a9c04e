"""Flight record of a process before the run has a directory, in a directory shared by the ranks of one start.

The environment variable HPCTRAIN_RECORDS may name a directory, which nodes may share. By default the directory is on the node's
local disk and is named after the launcher's process, so that the ranks of a node share it. Later the record moves to the run
directory. Records of starts without a run directory are kept for `hpctrain autopsy`, for the latest starts only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpctrain.core.files import is_private
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.flight.ring import file_name
from hpctrain.launch.launcher import Launcher
from hpctrain.launch.process_end import FINISHED, STOPPED, End
from hpctrain.launch.processes import launcher_process, status_of

#: environment variable with the directory for the records of a start
RECORDS = "HPCTRAIN_RECORDS"
#: number of latest starts whose records are kept
KEPT = 8

_START = "start-"
# The record that this process began; `_TO_TAKE` holds it until `taken` returns it.
_BEGUN: list[FlightRecorder] = []
_TO_TAKE: list[FlightRecorder] = []


def place_of_start(environ: Mapping[str, str], launcher: Launcher) -> Path:
    """Return the path of this process's record. Call it in the process that the launcher started, before any fork."""
    process = launcher_process(launcher.rank_variable) or os.getpid()
    status = status_of(process)
    begun = 0 if status is None else status.begun
    directory = Path(environ[RECORDS]) if environ.get(RECORDS) else _user_directory(environ) / f"{_START}{process}-{begun}"
    return directory / file_name(launcher.rank or 0)


def begin(path: Path, launcher: Launcher) -> FlightRecorder:
    """Begin the record of this process, in a file if possible, otherwise in memory. `taken` returns it later."""
    recorder = FlightRecorder()
    recorder.join(launcher.rank or 0, launcher.expected_size or 1, 0, 0.0)
    with contextlib.suppress(OSError):
        new = not path.parent.exists()
        if path.parent.name.startswith(_START):
            path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not is_private(path.parent.parent):
                raise PermissionError
        recorder.begun_at = recorder.keep_in(path.parent)
        if new:
            _prune(path.parent)
    _BEGUN[:] = _TO_TAKE[:] = [recorder]
    return recorder


@contextlib.contextmanager
def recorded(path: Path, launcher: Launcher) -> Iterator[None]:
    """Keep a record of this process during the block, and record the end of the block unless an end was already recorded."""
    recorder = begin(path, launcher)
    try:
        yield
    except SystemExit as left:
        if left.code in (FINISHED, STOPPED, None):
            recorder.ended(End.FINISHED)
        else:
            recorder.ended(End.FAILED, f"the program exited with {left.code!r}")
        raise
    except BaseException as error:
        recorder.ended(End.FAILED, f"{type(error).__name__}: {error}")
        raise
    recorder.ended(End.FINISHED)


def hint() -> list[str]:
    """Return a line with the place of this process's record; empty if it is in a run directory or in memory."""
    path = _BEGUN[-1].begun_at if _BEGUN else None
    return [] if path is None else [f"`hpctrain autopsy {path.parent}` shows the flight records of this start"]


def failed(sentence: str, ranks: Sequence[int]) -> None:
    """Write an error, and the ranks that caused it, to the record of this process, if there is one."""
    if _BEGUN:
        _BEGUN[-1].ended(End.FAILED, sentence, ranks)


def taken() -> FlightRecorder:
    """Return the recorder that this process began; at later calls, or if it began none, return a new recorder."""
    return _TO_TAKE.pop() if _TO_TAKE else FlightRecorder()


def latest(environ: Mapping[str, str], *, ended: bool = False) -> Path | None:
    """Return the directory of this user's latest start that left records on this machine; None if there is none.

    If HPCTRAIN_RECORDS is set, return its directory instead, which may have no records.

    Args:
        ended: whether to leave out starts whose launcher is alive.
    """
    if environ.get(RECORDS):
        return Path(environ[RECORDS])
    starts = _starts(_user_directory(environ))
    return next((start for start in starts if not (ended and _is_alive(start))), None)


def _user_directory(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("TMPDIR") or "/tmp") / f"hpctrain-{os.getuid()}"


def _starts(own: Path) -> list[Path]:
    """Return the directories of starts, latest first."""
    with contextlib.suppress(OSError):
        if is_private(own):
            starts = [entry for entry in os.scandir(own) if entry.name.startswith(_START) and entry.is_dir(follow_symlinks=False)]
            return [Path(entry.path) for entry in sorted(starts, key=lambda entry: -entry.stat().st_ctime_ns)]
    return []


def _prune(new: Path) -> None:
    """Remove the records of all starts next to `new` except the latest ones and those whose launcher is alive."""
    for directory in _starts(new.parent)[KEPT:] if new.name.startswith(_START) else ():
        if not _is_alive(directory):
            with contextlib.suppress(OSError):
                for path in directory.glob("rank-*"):
                    path.unlink()
                directory.rmdir()


def _is_alive(start: Path) -> bool:
    """Return whether the launcher of a start is alive."""
    number, _, begun = start.name.removeprefix(_START).partition("-")
    status = status_of(int(number)) if number.isdecimal() else None
    return status is not None and str(status.begun) == begun
