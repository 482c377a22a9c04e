"""Exit codes of a job, the same on every rank. 128 + n stands for an end by signal n that left no checkpoint."""

from __future__ import annotations

FINISHED = 0
BUG = 1
USER_ERROR = 2
#: a signal or the limit of time asked for the end, and a checkpoint to go on from was written: requeue on it
STOPPED = 85
#: a wait among the ranks took longer than the deadline
DEADLINE = 124
SIGNALLED = 128
