"""The times at which gradients become ready and parameters are let go, measured."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np

from hpctrain.averaging.step_times import Times, upper_medians
from hpctrain.core.intervals import even
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine


class StepClock:
    """Times of reading, of ready gradients and of data let go: seconds of compute since the step's begin, medians over steps.

    Waits are taken out: what hides under them would otherwise be planned as if it cost time.
    """

    def __init__(self, progress: ProgressEngine) -> None:
        self._progress = progress
        self._on = False
        self._begin = 0.0
        self._ready: dict[str, list[float]] = {}
        self._free: dict[str, list[float]] = {}
        self._needed: dict[str, list[float]] = {}
        self._ends: list[float] = []

    def begin(self, on: bool) -> None:
        """A step begins. on: it is measured."""
        self._on = on
        self._begin = self._compute_seconds()

    def needed(self, name: str) -> None:
        """Forward reads a parameter."""
        if len(self._needed.get(name, ())) == len(self._ends):  # the first of several micro-batches
            self._note(self._needed, name)

    def ready(self, name: str) -> None:
        """A gradient is announced."""
        self._note(self._ready, name)

    def free(self, name: str) -> None:
        """Backward has let go of a parameter's data."""
        self._note(self._free, name)

    def end(self, names: Sequence[str]) -> None:
        """Backward has ended: so has what was not announced."""
        for name in names:
            for times in (self._ready, self._free):
                if self._on and len(times.get(name, ())) < max(map(len, times.values()), default=1):
                    self._note(times, name)
        if self._on:
            self._ends.append(self._compute_seconds() - self._begin)

    def times(self) -> Times:
        """The medians over the measured steps; there must have been one."""
        ready, free, needed = (
            {name: median(seconds) for name, seconds in times.items()} for times in (self._ready, self._free, self._needed)
        )
        return Times(ready, free, needed, median(self._ends))

    def _note(self, times: dict[str, list[float]], name: str) -> None:
        if self._on:
            times.setdefault(name, []).append(self._compute_seconds() - self._begin)

    def _compute_seconds(self) -> float:
        return self._progress.now() - self._progress.waited_seconds


def over_ranks(times: Times, names: Sequence[str], comm: Communicator, progress: ProgressEngine) -> Times:
    """The times of a typical rank (`upper_medians`), from those of all ranks. Collective; the same bits on every rank.

    Args:
        times: measured on this rank. names: of the parameters, the same on every rank.
        comm: all ranks that order their operations alike; nothing else is under way on it.
    """
    measured = times.to_array(names)
    counts = even(measured.size, comm.size)  # each rank looks at a share of the events, so that none holds those of all ranks
    share = np.empty((comm.size, counts[comm.rank]))
    progress.wait_handle(
        comm.ialltoall(measured, share.reshape(-1), counts, [counts[comm.rank]] * comm.size), "times of all ranks"
    )
    typical = np.empty(measured.size)
    progress.wait_handle(comm.iallgather(upper_medians(share), typical, counts), "times of a typical rank")
    return Times.from_array(names, typical)
