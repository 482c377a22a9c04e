"""Leftovers of interrupted writes and deletions of checkpoints: nothing reads them, and the next write removes them.

Each file names the process that has begun it, and stays while that process is alive. Whether a process on another machine is
alive cannot be seen. Its files are removed once they have not been written to for ABANDONED_SECONDS, or as soon as the directory
has another owner (`run_owner`), since the process is then dead.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import tempfile
from pathlib import Path

from hpctrain.launch import process_mark
from hpctrain.storage.atomic_write import PARTIAL, writer_of

#: a write that has added nothing for so long is over
ABANDONED_SECONDS = 3600.0

_LEFT = re.compile(rf"(?P<of>.+?\.(?:h5|shards))(?:\..+)?{re.escape(PARTIAL)}", re.DOTALL)
_OF_A_RUN = re.compile(r"checkpoint-\d{8,}(?:-before)?(?:-set-aside)?\.(?:h5|shards)")


def remove_left(
    directory: Path,
    but: Path | None = None,
    *,
    of: Path | None = None,
    least_age_seconds: float = 0.0,
    owned: bool = False,
) -> list[Path]:
    """Delete leftovers in a directory, and return their paths.

    Args:
        but: a path that stays. least_age_seconds: files that were written to more recently stay.
        of: the checkpoint that is about to be written; None: one of a run. If its name is not that of a run's checkpoint, the
            directory may belong to any program, and only leftovers of this checkpoint are deleted.
        owned: whether the directory is of a run that this process owns, so that no process on another machine writes there. Then
            unfinished files of any kind that other processes have left are deleted.
    """
    own = None if of is None or _OF_A_RUN.fullmatch(of.name) else of.name
    paths = [path for path in directory.iterdir() if path != but] if directory.is_dir() else []
    left = [path for path in paths if _is_left(path.name, own) or (owned and _is_of_a_process(path))]
    if not left:
        return []
    now = _now(directory)
    old = [path for path in left if _is_over(path, now, least_age_seconds, owned=owned)]
    for path in old:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    return [path for path in old if not path.exists()]


def _is_left(name: str, own: str | None) -> bool:
    """Return whether a name is that of an unfinished checkpoint of a run; if `own` is given, of the checkpoint `own`."""
    match = _LEFT.fullmatch(name)
    if match is None:
        return False
    return match["of"] == own if own is not None else _OF_A_RUN.fullmatch(match["of"]) is not None


def _is_of_a_process(path: Path) -> bool:
    """Return whether a path is an unfinished file that names the process that has begun it."""
    return path.name.endswith(PARTIAL) and writer_of(path) is not None


def _is_over(path: Path, now: float, least_age_seconds: float, *, owned: bool) -> bool:
    """Return whether the write of an unfinished file is over. now: by the clock of the file server."""
    writer = writer_of(path)
    if writer is not None:
        if writer == process_mark.own() or writer.lives:
            return False
        if writer.lives is None and not owned:
            least_age_seconds = max(least_age_seconds, ABANDONED_SECONDS)
    return not least_age_seconds or _written(path) <= now - least_age_seconds


def _now(directory: Path) -> float:
    """Return the time by the clock that dates files in a directory; minus infinity if it is unknown."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return -math.inf


def _written(path: Path) -> float:
    """The time of the last write to a file, or to a directory and its files."""
    try:
        files = list(path.iterdir()) if path.is_dir() else []
        return max(each.stat().st_mtime for each in (path, *files))
    except OSError:  # somebody is at it
        return math.inf
