"""Standard streams: what the starter of this process has closed (`>&-`; some batch systems close stdin), and the last words."""

from __future__ import annotations

import array
import contextlib
import fcntl
import io
import os
import stat
import sys
import termios
import time

_LOOK_SECONDS = 1e-3


def open_closed_streams() -> None:
    """Put /dev/null where one of the descriptors 0 to 2 is closed: call it before any file is opened.

    The next file, be it a checkpoint, would get that number, and what MPI, the keeper or a signal has to say would be written
    into it. Python has None for such a stream. Also make the outputs escape characters that their encoding lacks.
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
    """Flush standard output and error, and wait until their readers have taken all, for so long at most.

    A launcher that is told to end a job may leave unread what ranks wrote just before: the sentence that says why.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it, or it is closed
            stream.flush()
    end = time.monotonic() + seconds
    while any(_unread(descriptor) for descriptor in (1, 2)) and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)


def _unread(descriptor: int) -> int:
    """Bytes in a pipe that its reader has not taken; 0 for what is no pipe."""
    count = array.array("i", [0])
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            fcntl.ioctl(descriptor, termios.FIONREAD, count)
    return count[0]
