"""Times of the operators of a few early steps of a run, recorded as a trace records them, on a clock of this rank's own."""

from __future__ import annotations

import time

from hpctrain.trace.tracer import Events, Tracer
from hpctrain.train.replica import Replica

_FIRST = 6  # programs are made, orders are measured, caches fill
_STEPS = 5
_ROOM = 1 << 15  # events; a step of 2,000 operators has less than a fifth of it


class OperatorSample:
    """Records the operators of some steps of a replica, and nothing of any other.

    Args:
        threads: that the rank computes with. One thread's processor time is recorded, which no other process that shares the
            core lengthens; of several threads, the time that passes.

    Attributes:
        complete: all steps were recorded.
    """

    def __init__(self, replica: Replica, threads: int) -> None:
        self._replica = replica
        self._trace = Tracer(_ROOM, clock_ns=time.thread_time_ns if threads == 1 else time.perf_counter_ns)
        self._seen = self._taken = 0
        self.complete = False

    def begin_step(self, *, whole: bool) -> None:
        """A step begins. whole: it has the full batch."""
        self._seen += 1
        if self.complete or self._seen <= _FIRST:
            return
        self.complete = self._taken == _STEPS
        wanted = whole and not self.complete
        self._replica.record_operators(self._trace if wanted else None)
        self._taken += wanted

    def events(self) -> Events:
        """The events of the steps that were recorded so far."""
        return self._trace.events()
