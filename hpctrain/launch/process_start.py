"""What a process sets up first: the signals that it blocks, and its standard streams.

Signals come before everything else: until they are blocked, one ends the process without a message. Therefore this module imports
only what Python has loaded at its start, and `signal`.

A starter may close a standard stream (`>&-`; some batch systems close stdin). Standard output may be a file on a full or failing
disk; a run does not end because it cannot print.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import stat
import sys
from signal import Signals

TYPE_CHECKING = False  # as in typing, which takes milliseconds to load
if TYPE_CHECKING:
    from typing import Any

#: signals that request the end of the run with a checkpoint
STOPS = (Signals.SIGINT, Signals.SIGTERM, Signals.SIGUSR1, Signals.SIGHUP)
#: signal that prints the stacks of all threads; the run continues
STACKS = Signals.SIGUSR2
# Signals that are ignored: they have no meaning for a run and must not end it.
_DROPPED = (Signals.SIGALRM, Signals.SIGPROF, Signals.SIGCHLD)
#: signals blocked in the process of a run
HELD = (*STOPS, STACKS, *_DROPPED)
#: signals blocked in a user's own program, which may use the others
OF_PROGRAMS = (*STOPS, STACKS)

# Errors of a write with which a disk refuses data.
_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE, errno.ENOTCONN)


def hold(numbers: tuple[Signals, ...] = HELD) -> frozenset[Signals]:
    """Block signals in this thread and in all threads that it starts; return the blocked signals.

    A signal that the starter of this process ignores stays ignored (`nohup`: SIGHUP; a script's background job: SIGINT). If it
    were blocked, the thread that waits for signals would receive it.
    """
    held = frozenset(number for number in numbers if signal.getsignal(number) != signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, held)
    return held


def release() -> None:
    """Unblock the signals in this thread; call it in a child between fork and exec, as exec keeps the mask."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)


def open_closed_streams() -> None:
    """Open /dev/null for each of the descriptors 0 to 2 that is closed. Call it before any file is opened.

    Otherwise the next file, possibly a checkpoint, would get that number, and messages of MPI, the keeper or a signal would be
    written into it. A stream of Python that is None is replaced. Output streams escape characters that their encoding lacks.
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


class ForgivingFile(io.RawIOBase):
    """Writer to a descriptor, which stays open. Data that the disk refuses are dropped; the first refusal goes to stderr."""

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
                sentence = f"hpctrain: cannot write to standard output ({error.strerror}); the run continues without it.\n"
                with contextlib.suppress(OSError):
                    os.write(2, sentence.encode())
            return len(data)


def continue_without_output() -> None:
    """Make standard output drop what a disk refuses instead of raising. A terminal, pipe or socket stays unchanged."""
    with contextlib.suppress(OSError, ValueError):
        mode = os.fstat(1).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(1) or sys.stdout.fileno() != 1:
            return
        sys.stdout.flush()
        file = io.BufferedWriter(ForgivingFile(1))
        sys.stdout = io.TextIOWrapper(file, sys.stdout.encoding, sys.stdout.errors, write_through=False)
