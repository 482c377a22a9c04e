"""Standard streams of a process: open what its starter closed, survive a full disk, and flush before the end.

A starter may close a descriptor (`>&-`; some batch systems close stdin). Standard output may be a file on a disk that is full or
fails: a run does not end because of what it prints.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import io
import os
import stat
import sys
import termios
import time
from typing import Any

_LOOK_SECONDS = 1e-3


def open_closed_streams() -> None:
    """Open /dev/null for each of the descriptors 0 to 2 that is closed. Call it before any file is opened.

    Otherwise the next file, possibly a checkpoint, would get that number, and messages of MPI, the keeper or a signal would be
    written into it. Python has None for such a stream. Outputs are also made to escape characters that their encoding lacks.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            stream = open(number, mode, closefd=False)  # noqa: SIM115  as long as the process
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper) and output.errors == "strict":  # e.g. class names in a batch job's C locale
            output.reconfigure(errors="backslashreplace")


def flush_to_reader(seconds: float = 1.0) -> None:
    """Flush standard output and error, and wait until their readers have taken everything, at most `seconds`.

    A launcher that is told to end a job may not read what ranks wrote just before: the sentence with the reason.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # it has no reader, or it is closed
            stream.flush()
    end = time.monotonic() + seconds
    while any(_unread(descriptor) for descriptor in (1, 2)) and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)


def _unread(descriptor: int) -> int:
    """Return the bytes in a pipe that its reader has not taken; 0 for anything else."""
    count = array.array("i", [0])
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            fcntl.ioctl(descriptor, termios.FIONREAD, count)
    return count[0]


_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE, errno.ENOTCONN)


class ForgivingFile(io.RawIOBase):
    """Writes to a descriptor, which stays open. What the disk refuses is dropped, and reported once on standard error."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._reported = False

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
            if not self._reported:
                self._reported = True
                sentence = f"hpctrain: the standard output cannot be written ({error.strerror}); the run continues without it.\n"
                with contextlib.suppress(OSError):
                    os.write(2, sentence.encode())
            return len(data)


def continue_without_output() -> None:
    """Let no refusal of a disk end the process from now on. A terminal, and a pipe whose reader may leave, stay as they are."""
    with contextlib.suppress(OSError, ValueError):
        mode = os.fstat(1).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(1) or sys.stdout.fileno() != 1:
            return
        sys.stdout.flush()
        file = io.BufferedWriter(ForgivingFile(1))
        sys.stdout = io.TextIOWrapper(file, sys.stdout.encoding, sys.stdout.errors, write_through=False)
