"""Times at which gradients become ready and parameters are needed in a step: measured, and agreed on over all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import numpy as np

from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.core.intervals import even


@dataclass(frozen=True)
class Times:
    """Seconds since a step's begin, of the compute alone: what a rank waited is taken out.

    ready: by parameter, when its gradient (or the error of its layer) is announced. free: when its data is let go. needed: when
    forward reads it; empty where that is unknown. end_seconds: when backward ends.
    """

    ready: Mapping[str, float]
    free: Mapping[str, float]
    needed: Mapping[str, float] = field(default_factory=dict)
    end_seconds: float = 0.0

    def longest_gap(self) -> float:
        """Seconds between two gradients that become ready one after the other."""
        return max((later - earlier for earlier, later in pairwise(sorted(self.ready.values()))), default=0.0)

    def late(self) -> Times:
        """As if all became ready one gradient later. What a single queue sends next must be ready then, or all behind it wait."""
        later = self.longest_gap()
        ready, free = ({name: at + later for name, at in times.items()} for times in (self.ready, self.free))
        return Times(ready, free, self.needed, self.end_seconds)

    def looks(self) -> list[float]:
        """The instants at which the program surely looks at messages, ascending: where a parameter's part of the work ends."""
        read = (self.end_seconds + at for at in self.needed.values())  # of the next step
        return sorted({*self.ready.values(), *self.free.values(), *read})

    @staticmethod
    def unknown(parameters: Sequence[str]) -> Times:
        """Backward as if each parameter took 1 s, from the last one to the first; data is let go when it ends."""
        last = float(len(parameters))
        ready = {name: last - position for position, name in enumerate(parameters)}
        return Times(ready, dict.fromkeys(parameters, last + 1.0))

    def to_array(self, parameters: Sequence[str]) -> np.ndarray:
        """Float64 (3 n + 1,), of n parameters: ready, free, needed (NaN where unknown), then the end."""
        of_kinds = (of_kind.get(name, np.nan) for of_kind in (self.ready, self.free, self.needed) for name in parameters)
        return np.array([*of_kinds, self.end_seconds])

    @staticmethod
    def from_array(parameters: Sequence[str], values: np.ndarray) -> Times:
        """The times that `to_array` gave."""
        *of_kinds, end_seconds = values.tolist()
        ready, free, needed = (
            {name: at for name, at in zip(parameters, of_kind, strict=True) if not math.isnan(at)}
            for of_kind in np.reshape(of_kinds, (3, len(parameters))).tolist()
        )
        return Times(ready, free, needed, end_seconds)


def upper_medians(seconds: np.ndarray) -> np.ndarray:
    """(ranks, events) -> (events,): of each event the upper median over the ranks that know it; NaN where none does.

    Of two ranks it is the later one, as a collective starts when both have posted it; of many no odd one matters, be it a rank
    that something disturbed while it measured. A maximum would follow that one, and a mean in part.
    """
    ordered = np.sort(seconds, axis=0)  # NaN last
    known = np.count_nonzero(~np.isnan(seconds), axis=0)
    medians: np.ndarray = np.take_along_axis(ordered, known[np.newaxis] // 2, axis=0)[0]
    return medians


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
