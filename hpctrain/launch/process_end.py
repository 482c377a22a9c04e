"""The end of a process: exit codes of a job, kinds of an end, and the last output of a process that ends the job.

Exit codes are the same on every rank; 128 + n means an end by signal n without a checkpoint. Last output is written in whole
lines with the rank's place, also to its log file, and by only a few ranks of a job.
"""

from __future__ import annotations

import array
import contextlib
import faulthandler
import fcntl
import os
import stat
import sys
import termios
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import TextIO

from hpctrain.core import log
from hpctrain.core.text import beginning_with, write_lines
from hpctrain.launch.launcher import place_of

FINISHED = 0
BUG = 1
USER_ERROR = 2
#: a signal or the time limit stopped the run after a checkpoint; requeue the job
STOPPED = 85
#: a wait for other ranks exceeded the deadline
DEADLINE = 124
SIGNALLED = 128


class End(IntEnum):
    """Kind of a process's end, as noted by the process or by its keeper."""

    RUNNING = 0
    FINISHED = 1
    FAILED = 2
    DEADLINE = 3
    SIGNAL = 4
    EXITED = 5  # code of the program or a library ended the process
    LAUNCHER = 7  # by its keeper, because the launcher's process had ended or was stopped
    CLOSED = 8  # by its keeper, because the process had closed descriptors of other parts of the program


# Time until a job ends after another rank has given up.
_TURN_SECONDS = 1.0
_LARGEST_SHARE = 0.25
_POLL_SECONDS = 1e-3


def turn_seconds(rank: int, deadline_seconds: float) -> float:
    """Return the time for which a rank at its deadline lets others report first: one second per binary digit of its number.

    All ranks that wait for one rank reach the deadline together, and the first one that reports ends the job. Rank 0 reports at
    once. If rank 0 is the cause, rank 1 reports a second later. In a job of 1,000 ranks in which one rank hangs, no further rank
    reports.

    Args:
        deadline_seconds: deadline that has passed; the wait is at most a quarter of it.
    """
    return min(rank.bit_length() * _TURN_SECONDS, _LARGEST_SHARE * deadline_seconds)


def await_turn(rank: int | None, deadline_seconds: float) -> None:
    """Wait until this rank's turn to report. Usually the job ends during the wait."""
    time.sleep(turn_seconds(rank or 0, deadline_seconds))


def say_last_words(rank: int | None, lines: Sequence[str], stream: TextIO | None = None, *, stacks: bool = True) -> None:
    """Print lines on standard error with this rank's place, followed by the stacks of all threads if `stacks` is true.

    Python's streams are bypassed, since a thread that hangs may hold their locks.

    Args:
        stream: output to use instead of standard error.
    """
    text = beginning_with(place_of(rank), "\n".join(lines))
    if stacks:
        with os.fdopen(os.memfd_create("stacks"), "w+", errors="replace") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            text += beginning_with(place_of(rank), file.read())
    with contextlib.suppress(OSError):
        if stream is None:
            write_lines(text)
        else:
            stream.write(text)
            stream.flush()
    log.tee(text, last=True)


def flush_to_reader(seconds: float = 1.0) -> None:
    """Flush standard output and error, and wait at most `seconds` until the readers of their pipes have read everything.

    A launcher that ends a job may discard what ranks wrote just before, including the message with the reason.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # it has no reader, or it is closed
            stream.flush()
    end = time.monotonic() + seconds
    while any(_unread(descriptor) for descriptor in (1, 2)) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)


def _unread(descriptor: int) -> int:
    """Return the number of bytes in a pipe that its reader has not read; 0 if the descriptor is not a pipe."""
    count = array.array("i", [0])
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            fcntl.ioctl(descriptor, termios.FIONREAD, count)
    return count[0]
