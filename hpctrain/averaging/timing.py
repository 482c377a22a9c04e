"""When gradients become ready, measured."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from hpctrain.averaging.planning import Times
from hpctrain.comm.progress import ProgressEngine


class StepClock:
    """When gradients are ready and data is let go, in seconds of compute since the step's begin. Medians over steps."""

    def __init__(self, progress: ProgressEngine) -> None:
        self._progress = progress
        self._on = False
        self._ready: dict[str, list[float]] = {}
        self._free: dict[str, list[float]] = {}

    def begin(self, on: bool) -> None:
        self._on = on
        self._begin = self._compute_seconds()

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

    def times(self) -> Times:
        return Times(*({name: median(each) for name, each in times.items()} for times in (self._ready, self._free)))

    def _note(self, times: dict[str, list[float]], name: str) -> None:
        if self._on:
            times.setdefault(name, []).append(self._compute_seconds() - self._begin)

    def _compute_seconds(self) -> float:
        return self._progress.now() - self._progress.waited_seconds
