"""When gradients become ready, measured."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from hpctrain.averaging.planning import Times
from hpctrain.comm.progress import ProgressEngine


class StepClock:
    """When parameters are read, gradients ready, data let go: seconds of compute since the step's begin, medians over steps."""

    def __init__(self, progress: ProgressEngine) -> None:
        self._progress = progress
        self._on = False
        self._ready: dict[str, list[float]] = {}
        self._free: dict[str, list[float]] = {}
        self._needed: dict[str, list[float]] = {}
        self._ends: list[float] = []

    def begin(self, on: bool) -> None:
        self._on = on
        self._begin = self._compute_seconds()

    def needed(self, name: str) -> None:
        if len(self._needed.get(name, ())) == len(self._ends):  # the first of several micro-batches
            self._note(self._needed, name)

    def ready(self, name: str) -> None:
        self._note(self._ready, name)

    def free(self, name: str) -> None:
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
        ready, free, needed = (
            {name: median(each) for name, each in times.items()} for times in (self._ready, self._free, self._needed)
        )
        return Times(ready, free, needed, median(self._ends))

    def _note(self, times: dict[str, list[float]], name: str) -> None:
        if self._on:
            times.setdefault(name, []).append(self._compute_seconds() - self._begin)

    def _compute_seconds(self) -> float:
        return self._progress.now() - self._progress.waited_seconds
