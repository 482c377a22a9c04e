"""What a process sets up first: the signals that it blocks, and its standard streams.

Signals come before everything else: until they are blocked, one ends the process without a message. Therefore this module imports
only what Python has loaded at its start, and `signal`.

A starter may close a standard stream (`>&-`; some batch systems close stdin). Later the disk of standard output may be full, or
the reader of its pipe may end, as in `| head`. A run does not end because it cannot print.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
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

    Otherwise the next file, possibly a checkpoint, would have that number, and messages of MPI, the keeper or a signal would be
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


#: file name in the error of a write to standard output
STANDARD_OUTPUT = "standard output"


class ForgivingFile(io.RawIOBase):
    """Writer to a descriptor, which it never closes. It drops data that cannot be written.

    It reports the first failure of standard output, and none of standard error.

    Args:
        raises: whether the report is an OSError whose file name is `STANDARD_OUTPUT`; otherwise it is a line on standard error.
    """

    def __init__(self, descriptor: int, *, raises: bool = False) -> None:
        self._descriptor, self._raises = descriptor, raises
        self._reported = descriptor == 2

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        try:
            return os.write(self._descriptor, data) if len(data) else 0  # libraries try streams with empty writes
        except BlockingIOError:  # another program has made the pipe non-blocking
            import select

            select.select((), (self._descriptor,), ())
            return self.write(data)
        except OSError as error:
            reported, self._reported = self._reported, True
            if not reported and self._raises:
                raise OSError(error.errno, error.strerror, STANDARD_OUTPUT) from None
            if not reported:
                sentence = f"hpctrain: cannot write to standard output ({error.strerror}); the run continues without it.\n"
                with contextlib.suppress(OSError):
                    os.write(2, sentence.encode())
            return len(data)


def forgive_writes(*, raises: bool = False) -> None:
    """Make Python's standard output and error forgiving (see `ForgivingFile`). Streams that a program has replaced are kept.

    Args:
        raises: whether the first failure of standard output raises an error, which ends the command as it ends a Unix filter.
    """
    for name, number in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        with contextlib.suppress(OSError, ValueError, AttributeError):  # such as a stream of a notebook
            if old.fileno() != number or isinstance(getattr(old.buffer, "raw", old.buffer), ForgivingFile):
                continue
            raw, at_once = ForgivingFile(number, raises=raises), old.write_through
            file: Any = raw if at_once else io.BufferedWriter(raw)
            options = {"line_buffering": old.line_buffering, "write_through": at_once}
            setattr(sys, name, io.TextIOWrapper(file, old.encoding, old.errors, **options))
            old.flush()
