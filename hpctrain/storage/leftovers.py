"""Leftovers of interrupted writes and deletions of checkpoints: nothing reads them, and the next write removes them.

In a directory that nobody writes to any more they stay, until they are looked for. Whether a write is still under way there
nobody can tell but by its age; one whose files are taken away fails, and is tried again.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from pathlib import Path

from hpctrain.storage.atomic_write import PARTIAL

#: a write that has added nothing for so long is over
ABANDONED_SECONDS = 3600.0

_NAMES = (f"*.h5{PARTIAL}", f"*.shards.*{PARTIAL}")


def remove_left(directory: Path, but: Path | None = None, *, least_age_seconds: float = 0.0) -> list[Path]:
    """Delete what is left in a directory, but not `but`, and nothing that was written to later; give what is deleted."""
    latest = time.time() - least_age_seconds
    left = [path for name in _NAMES for path in directory.glob(name) if path != but]
    old = [path for path in left if not least_age_seconds or _written(path) <= latest]
    for path in old:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    return [path for path in old if not path.exists()]


def _written(path: Path) -> float:
    """The time of the last write to a file, or to a directory and its files."""
    try:
        files = list(path.iterdir()) if path.is_dir() else []
        return max(each.stat().st_mtime for each in (path, *files))
    except OSError:  # somebody is at it
        return math.inf
