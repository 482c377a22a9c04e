"""The proof that a directory is a run, and an order of runs that does not depend on clocks or time zones.

A run has a marker file, `run.json`. Runs of earlier versions have none. They are recognised by their versions.json, and are
marked when they go on. Files in a directory are written, cut or deleted only after this proof, as other programs may have a
`config.yaml` or a `metrics.jsonl`, too.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hpctrain.storage.atomic_write import write_json

#: name of a run directory: the time of its start, and a number if several runs began in that second
STAMP = re.compile(r".*-(\d{8}-\d{6})(?:-(\d+))?", re.DOTALL)
#: name of the file that proves that a directory is a run
MARKER = "run.json"
_FORMAT, _FORMAT_VERSION = "hpctrain-run", 1
#: size limit of a small JSON file, in bytes: it may belong to another program
_MOST_BYTES = 1 << 20
_MOST_NS = 1 << 62


@dataclass(frozen=True)
class RunMarker:
    """The identity of a run, and its place in the order of runs.

    Args:
        identity: random; the run's checkpoints hold it, too.
        order: nanoseconds since 1970 at the start of the run, but always greater than those of all earlier runs. So the order of
            the runs in an output directory does not depend on clocks that differ, go back or jump.
    """

    identity: str
    order: int


def mark(path: Path, marker: RunMarker) -> None:
    """Write the marker of the run directory `path`, atomically.

    Raises:
        OSError: it cannot be written.
    """
    begun = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(marker.order // 10**9))
    content = {"format": _FORMAT, "format_version": _FORMAT_VERSION, "run": marker.identity, "order": marker.order}
    write_json(path / MARKER, {**content, "begun": begun})


def marker_of(path: Path) -> RunMarker | None:
    """Return the marker of the run directory `path`; None if it has none, as in runs of earlier versions."""
    try:
        status = (path / MARKER).stat()
    except OSError:
        return None
    return _read_marker(path.absolute(), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@lru_cache(maxsize=1 << 10)
def _read_marker(path: Path, *version: int) -> RunMarker | None:
    """Return the marker in a run directory. Cached per version of the file, as a start asks for it several times."""
    content = _json_object(path / MARKER)
    identity, order = content.get("run"), content.get("order")
    if content.get("format") != _FORMAT or not isinstance(identity, str) or not isinstance(order, int):
        return None
    return RunMarker(identity, min(max(0, order), _MOST_NS))


def is_run(path: Path) -> bool:
    """Return whether `path` is proven to be a run directory: by its marker, or in earlier versions by its versions.json."""
    if not (path / "config.yaml").is_file():
        return False
    if marker_of(path) is not None:
        return True
    versions = _json_object(path / "versions.json")
    return "python" in versions and "hpctrain" in versions


def claim(path: Path) -> None:
    """Mark the run directory `path` if it has no marker, as in earlier versions. Keeps its place in the order of runs.

    Raises:
        OSError: the marker cannot be written.
    """
    if marker_of(path) is None:
        mark(path, RunMarker(secrets.token_hex(8), order_of(path)))


def _json_object(path: Path) -> Mapping[str, object]:
    """Return the JSON object in a small file; an empty one if the file is missing, too large or no JSON object."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return {}
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def order_of(path: Path) -> int:
    """Return the place of a run in the order of runs. Without a marker, the time of its first record decides."""
    marker = marker_of(path)
    if marker is not None:
        return marker.order
    seconds = _first_seconds(path / "metrics.jsonl")
    match = STAMP.fullmatch(path.name)
    if seconds is None and match is not None:  # only the name is left, in the local time of the machine on which the run began
        with contextlib.suppress(ValueError, OverflowError):
            seconds = time.mktime(time.strptime(match[1], "%Y%m%d-%H%M%S"))
    return 0 if seconds is None else min(max(0, int(seconds * 1e9)), _MOST_NS)


def _first_seconds(metrics: Path) -> float | None:
    """Return the time of a run's first record, in seconds since 1970; None if it cannot be read."""
    try:
        if metrics.is_file():
            with open(metrics, "rb") as file:
                seconds = json.loads(file.readline(_MOST_BYTES))["time"]
                return seconds if isinstance(seconds, int | float) and math.isfinite(seconds) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass
    return None
