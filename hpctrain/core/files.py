"""Reads files that users name into memory: only regular files, and only up to a limit.

A device has no end and a named pipe may have no writer, so that neither is opened. Refusals are `OSError`s whose `strerror` has
the reason, like the system's own.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

#: size limit of a text that people write, such as a configuration, in bytes
TEXT_BYTES = 1 << 18
#: size limit of a record that programs write, such as metrics, in bytes
RECORD_BYTES = 1 << 31
_BLOCK = 1 << 20
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISLNK, "a link that leads back to itself"),
)


def kind_of(mode: int) -> str:
    """Return the kind of a file that is not regular, in words, from its mode."""
    return next((words for matches, words in _KINDS if matches(mode)), "a device")


def require_regular(path: str | Path, *, pipes: bool = False) -> None:
    """Raise unless the path, with links followed, is that of a regular file.

    Args:
        pipes: whether an unnamed pipe, such as `<(command)` or `/dev/stdin`, is accepted as well.

    Raises:
        OSError: the path does not exist, or is another kind of file.
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
        most: size limit in bytes. pipes: see `require_regular`.

    Raises:
        OSError: the file cannot be read, is not regular, or is larger.
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
    """Return the text of a file in UTF-8, with all line ends as newlines; see `read_bytes`.

    Raises:
        OSError: as `read_bytes`. UnicodeDecodeError: it is no UTF-8.
    """
    return read_bytes(path, most, pipes=pipes).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def json_object(text: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a text; None if the text is no JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
