"""Leftovers of interrupted writes and deletions of checkpoints: nothing reads them, and the next write removes them.

In a directory that nobody writes to any more they stay, until they are looked for. Whether a write is still under way there
nobody can tell but by its age; one whose files are taken away fails, and is tried again.
"""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import time
from pathlib import Path

from hpctrain.storage.atomic_write import PARTIAL

#: a write that has added nothing for so long is over
ABANDONED_SECONDS = 3600.0

_LEFT = re.compile(rf"(?P<of>.+?\.(?:h5|shards))(?:\..+)?{re.escape(PARTIAL)}", re.DOTALL)
_OF_A_RUN = re.compile(r"checkpoint-\d{8,}(?:-before)?(?:-set-aside)?\.(?:h5|shards)")


def remove_left(
    directory: Path, but: Path | None = None, *, of: Path | None = None, least_age_seconds: float = 0.0
) -> list[Path]:
    """Delete what is left in a directory, but not `but`, and nothing that was written to later; give what is deleted.

    of: the checkpoint that is to be written. Where its name is not that of a run's checkpoint, the directory may be anybody's,
        and only what is left of this checkpoint is deleted. None: a run's.
    """
    latest = time.time() - least_age_seconds
    own = None if of is None or _OF_A_RUN.fullmatch(of.name) else of.name
    left = [path for path in directory.iterdir() if path != but and _is_left(path.name, own)] if directory.is_dir() else []
    old = [path for path in left if not least_age_seconds or _written(path) <= latest]
    for path in old:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    return [path for path in old if not path.exists()]


def _is_left(name: str, own: str | None) -> bool:
    """Return whether a name is that of an unfinished checkpoint of a run, or of the file `own`."""
    match = _LEFT.fullmatch(name)
    if match is None:
        return False
    return match["of"] == own if own is not None else _OF_A_RUN.fullmatch(match["of"]) is not None


def _written(path: Path) -> float:
    """The time of the last write to a file, or to a directory and its files."""
    try:
        files = list(path.iterdir()) if path.is_dir() else []
        return max(each.stat().st_mtime for each in (path, *files))
    except OSError:  # somebody is at it
        return math.inf
