"""Exit codes of a job, the same on every rank. 128 + n stands for an end by signal n that left no checkpoint."""

from __future__ import annotations

from enum import IntEnum

FINISHED = 0
BUG = 1
USER_ERROR = 2
#: a signal or the limit of time asked for the end, and a checkpoint to go on from was written: requeue on it
STOPPED = 85
#: a wait among the ranks took longer than the deadline
DEADLINE = 124
SIGNALLED = 128


class End(IntEnum):
    """How a process ended, as far as it knew, or as its keeper saw."""

    RUNNING = 0
    FINISHED = 1
    FAILED = 2
    DEADLINE = 3
    SIGNAL = 4
    LEFT = 5  # by something that called exit()
    WENT_ON = 6  # the process itself did not: another rank was lost, and it has another record from there on
    LAUNCHER = 7  # by its keeper, since the launcher's process had ended or was stopped
    CLOSED = 8  # by its keeper, since the process had closed descriptors of other parts of the program
