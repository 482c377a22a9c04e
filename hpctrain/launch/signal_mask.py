"""The signals that a process that computes holds back, and the mask for them.

Imports almost nothing: until the mask is set, a signal ends the process without a word.
"""

from __future__ import annotations

import signal
from signal import Signals

#: ask for the end of the run with a checkpoint
STOPS = (Signals.SIGINT, Signals.SIGTERM, Signals.SIGUSR1, Signals.SIGHUP)
#: prints the stacks of all threads; the run continues
STACKS = Signals.SIGUSR2
# Mean nothing to a run, and must not end it.
_DROPPED = (Signals.SIGALRM, Signals.SIGPROF, Signals.SIGCHLD)
HELD = (*STOPS, STACKS, *_DROPPED)
#: in a user's own program, which may use the others
OF_PROGRAMS = (*STOPS, STACKS)


def hold(numbers: tuple[Signals, ...] = HELD) -> frozenset[Signals]:
    """Block the signals in this thread and in all threads it starts; return those that are blocked.

    A signal that the starter of this process ignores stays ignored (`nohup`: SIGHUP; a script's background job: SIGINT). If it
    were blocked, it would be kept for the thread that waits.
    """
    held = frozenset(number for number in numbers if signal.getsignal(number) != signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, held)
    return held


def release() -> None:
    """Unblock the signals in this thread: for a child between its fork and its program, which would inherit the mask."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
