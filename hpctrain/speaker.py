"""Lines of a rank on a terminal or in a log that all ranks share: whose they are, and each whole.

Loaded before a rank is made of its process, so it imports little.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

from hpctrain.core.text import escaped

# A pipe takes so many bytes of one write without bytes of others in between (POSIX: 512 at least; Linux: 4096).
_WHOLE_BYTES = 4096
_TAB = "\t"


def place(rank: int | None, size: int | None = None) -> str:
    """The beginning of a rank's line where several ranks speak: "[3/64@node7] ".

    Args:
        rank: None: unknown, for which the beginning is empty. size: ranks of the job; None: unknown, and left out.
    """
    if rank is None:
        return ""
    return f"[{rank}{'' if size is None else f'/{size}'}@{platform.node().partition('.')[0]}] "


def beginning_with(beginning: str, text: str) -> str:
    """Return a text with `beginning` before each line and a newline at its end. Escape control characters."""
    return "".join(f"{beginning}{escaped(line, keep=_TAB)}\n" for line in text.splitlines())


def write_lines(text: str, descriptor: int = 2) -> None:
    """Write lines past Python's streams, in writes of whole lines, which no other rank's interrupt in a pipe.

    Only a line of more than 4096 bytes may be. text: ends with a line's end.

    Raises:
        OSError: the descriptor cannot be written.
    """
    whole = b""
    for line in text.encode(errors="backslashreplace").splitlines(keepends=True):
        if whole and len(whole) + len(line) > _WHOLE_BYTES:
            _write(whole, descriptor)
            whole = b""
        whole += line
    _write(whole, descriptor)


def _write(data: bytes, descriptor: int) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def colours(descriptor: int, environ: Mapping[str, str]) -> bool:
    """Whether lines may have colours: on a terminal that knows them, unless NO_COLOR is set (no-color.org)."""
    return not environ.get("NO_COLOR") and environ.get("TERM") != "dumb" and os.isatty(descriptor)
