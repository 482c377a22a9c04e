"""The flight record of a process from its first line on, in a directory for the ranks of one start, until the run has its own.

The directory is that of HPCTRAIN_RECORDS, which all nodes may share; else one on the node's own disk, named after the launcher's
process there, so that the ranks of a node share it. A run directory takes the record over. What stays is of starts that came to
none; the latest of those stay for `hpctrain autopsy`.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpctrain.flight.recorder import FlightRecorder
from hpctrain.flight.ring import End, file_name
from hpctrain.launch.launcher import Launcher
from hpctrain.launch.processes import launcher_process, status_of

#: in the environment: the directory for the records of a start
RECORDS = "HPCTRAIN_RECORDS"
#: starts whose records stay
KEPT = 8

_START = "start-"
# Of this process: the record that it has begun, and the same until it is taken.
_BEGUN: list[FlightRecorder] = []
_TO_TAKE: list[FlightRecorder] = []


def place_of_start(environ: Mapping[str, str], launcher: Launcher) -> Path:
    """Return the path of this process's record. Call it in the process that the launcher has started."""
    process = launcher_process(launcher.rank_variable) or os.getpid()
    status = status_of(process)
    begun = 0 if status is None else status.begun
    directory = Path(environ[RECORDS]) if environ.get(RECORDS) else _own(environ) / f"{_START}{process}-{begun}"
    return directory / file_name(launcher.rank or 0)


def begin(path: Path, launcher: Launcher) -> FlightRecorder:
    """Begin the record of this process in a file, or in memory where there can be none; `taken` returns it."""
    recorder = FlightRecorder()
    recorder.join(launcher.rank or 0, launcher.expected_size or 1, 0, 0.0)
    with contextlib.suppress(OSError):
        new = not path.parent.exists()
        if path.parent.name.startswith(_START):
            path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_own(path.parent.parent):
                raise PermissionError
        recorder.begun_at = recorder.keep_in(path.parent)
        if new:
            _prune(path.parent)
    _BEGUN[:] = _TO_TAKE[:] = [recorder]
    return recorder


@contextlib.contextmanager
def recorded(path: Path, launcher: Launcher) -> Iterator[None]:
    """While this lasts, this process has a record, which has its end, too, where nothing below has written one."""
    recorder = begin(path, launcher)
    try:
        yield
    except SystemExit as left:
        if left.code in (0, None):
            recorder.ended(End.FINISHED)
        else:
            recorder.ended(End.FAILED, f"the program left with {left.code!r}")
        raise
    except BaseException as error:
        recorder.ended(End.FAILED, f"{type(error).__name__}: {error}")
        raise
    recorder.ended(End.FINISHED)


def hint() -> list[str]:
    """Return a line that tells where the record of this process lies, as long as it has no run directory."""
    path = _BEGUN[-1].begun_at if _BEGUN else None
    return [] if path is None else [f"`hpctrain autopsy {path.parent}` has the records of this start"]


def failed(sentence: str, ranks: Sequence[int]) -> None:
    """Keep the error in the record that this process has begun, if any. ranks: at which its cause lies."""
    if _BEGUN:
        _BEGUN[-1].ended(End.FAILED, sentence, ranks)


def taken() -> FlightRecorder:
    """Return the record that this process has begun, once; a new one later, and where there is none."""
    return _TO_TAKE.pop() if _TO_TAKE else FlightRecorder()


def latest(environ: Mapping[str, str]) -> Path | None:
    """Return the directory of the latest start of this user that has left records here; None where there is none."""
    if environ.get(RECORDS):
        return Path(environ[RECORDS])
    return next(iter(_starts(_own(environ))), None)


def _own(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("TMPDIR") or "/tmp") / f"hpctrain-{os.getuid()}"


def _is_own(directory: Path) -> bool:
    """Whether it is a real directory of this user, in which no other may write."""
    status = directory.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _starts(own: Path) -> list[Path]:
    """The directories of starts, the one that was made last first."""
    with contextlib.suppress(OSError):
        if _is_own(own):
            starts = [entry for entry in os.scandir(own) if entry.name.startswith(_START) and entry.is_dir(follow_symlinks=False)]
            return [Path(entry.path) for entry in sorted(starts, key=lambda entry: -entry.stat().st_ctime_ns)]
    return []


def _prune(new: Path) -> None:
    """Remove the records of all but the latest starts; those of a launcher that lives stay."""
    for directory in _starts(new.parent)[KEPT:] if new.name.startswith(_START) else ():
        number, _, begun = directory.name.removeprefix(_START).partition("-")
        status = status_of(int(number)) if number.isdecimal() else None
        if status is None or str(status.begun) != begun:
            with contextlib.suppress(OSError):
                for path in directory.glob("rank-*"):
                    path.unlink()
                directory.rmdir()
