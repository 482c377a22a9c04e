"""Files of a run that are read whole, such as its metrics: regular files of a bounded size, whatever lies in their place."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from hpctrain.errors import DataError

#: of what a run writes for people and for later; its metrics grow by about 100 kB an hour
LARGEST_BYTES = 1 << 30


def read_whole(path: Path, most_bytes: int = LARGEST_BYTES) -> bytes:
    """Return the content of a file. A pipe or a device in its place is not opened for reading, which might never end.

    Raises:
        DataError: it is no regular file, or has more than `most_bytes`.
        OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path} is no regular file; remove it.")
        if status.st_size > most_bytes:
            raise DataError(f"{path} has {status.st_size:,} bytes, and must have at most {most_bytes:,}; remove it, or cut it.")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(most_bytes)
    finally:
        os.close(descriptor)


def json_object(text: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a text; None where it is none that can be read."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
