"""Files that users name, read into memory: regular files alone, and no more bytes than such a file can have.

A device has no end and a named pipe may have no writer, so that neither is opened. What is refused is an `OSError` whose
`strerror` has the reason, as the system's own refusals are.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

#: most bytes of a text that people write, such as a configuration
TEXT_BYTES = 1 << 18
#: most bytes of a record that programs write, such as metrics
RECORD_BYTES = 1 << 31
_BLOCK = 1 << 20
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISLNK, "a link that leads back to itself"),
)


def kind_of(mode: int) -> str:
    """Return in words what a file that is not regular is, from its mode."""
    return next((words for matches, words in _KINDS if matches(mode)), "a device")


def require_regular(path: str | Path, *, pipes: bool = False) -> None:
    """Raise unless the path is that of a regular file, links followed.

    Args:
        pipes: whether a pipe without a name, as `<(command)` and `/dev/stdin` are, passes, too.

    Raises:
        OSError: nothing is there, or something else.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode) and not os.path.lexists(os.path.realpath(path))):
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise OSError(errno.EINVAL, f"it is {kind_of(mode)}, not a regular file", os.fspath(path))


def read_bytes(path: str | Path, most: int = RECORD_BYTES, *, pipes: bool = False) -> bytes:
    """Return the content of a file.

    Args:
        most: largest number of bytes that it may have. pipes: as for `require_regular`.

    Raises:
        OSError: it cannot be read, is no regular file, or has more bytes.
    """
    require_regular(path, pipes=pipes)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        blocks, count = [], 0
        while block := os.read(descriptor, min(_BLOCK, most + 1 - count)):
            count += len(block)
            if count > most:
                raise OSError(errno.EFBIG, f"it has more than {most:,} bytes, which no such file has", os.fspath(path))
            blocks.append(block)
    finally:
        os.close(descriptor)
    return b"".join(blocks)


def read_text(path: str | Path, most: int = RECORD_BYTES, *, pipes: bool = False) -> str:
    """Return the text of a file in UTF-8, lines ended by newlines alone; see `read_bytes`.

    Raises:
        OSError: as `read_bytes`. UnicodeDecodeError: it is no UTF-8.
    """
    return read_bytes(path, most, pipes=pipes).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def json_object(text: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a text; None where it is none that can be read."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
