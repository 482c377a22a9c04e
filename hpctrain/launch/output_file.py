"""Standard output that is a file on a disk which may be full, or fail: a run does not end for what it prints."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import sys
from typing import Any

_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE, errno.ENOTCONN)


class ForgivingFile(io.RawIOBase):
    """Writes to a descriptor, which stays open; what the disk refuses is dropped, and told once on standard error."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._told = False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return False

    def write(self, data: Any) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            if not self._told:
                self._told = True
                said = f"hpctrain: the standard output cannot be written ({error.strerror}); the run goes on without it.\n"
                with contextlib.suppress(OSError):
                    os.write(2, said.encode())
            return len(data)


def go_on_without_output() -> None:
    """From now on a disk that refuses the standard output ends nothing. A terminal, and a pipe whose reader may leave, stay."""
    with contextlib.suppress(OSError, ValueError):
        mode = os.fstat(1).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(1) or sys.stdout.fileno() != 1:
            return
        sys.stdout.flush()
        file = io.BufferedWriter(ForgivingFile(1))
        sys.stdout = io.TextIOWrapper(file, sys.stdout.encoding, sys.stdout.errors, write_through=False)
