"""The events of a simulated process, in the format that runs record."""

from __future__ import annotations

from array import array

import numpy as np

from hpctrain.trace.tracer import Category, Events

_NANOSECONDS = 1e9


class EventRecorder:
    """Records events from `begin` on. Times are given in seconds since the simulation's begin, and kept in ns."""

    def __init__(self) -> None:
        self.recording = False
        self._end = float("inf")
        self._numbers = [array("q") for _ in range(4)]  # category, name, track, number
        self._seconds = [array("d"), array("d")]
        self._names: dict[str, int] = {}
        self._tracks: dict[str, int] = {"": 0}

    def begin(self) -> None:
        """Record from now on; what has begun before and is still under way, too."""
        self.recording = True

    def end(self, seconds: float) -> None:
        """Record nothing that begins later."""
        self._end = seconds

    def add(self, category: Category, name: str, start: float, stop: float, track: str = "", number: int = 0) -> None:
        """Record one event."""
        if not self.recording or start >= self._end:
            return
        names, tracks, numbers = self._names, self._tracks, self._numbers
        numbers[0].append(category)
        numbers[1].append(names.setdefault(name, len(names)))
        numbers[2].append(tracks.setdefault(track, len(tracks)))
        numbers[3].append(number)
        self._seconds[0].append(start)
        self._seconds[1].append(stop)

    def events(self) -> Events:
        """A copy of what was recorded so far, by their begin; of those of the same instants, the one around the others first."""
        numbers = np.array(self._numbers, np.int64)
        start, stop = np.rint(np.array(self._seconds) * _NANOSECONDS).astype(np.int64)
        depth = np.select([numbers[0] == Category.STEP, numbers[0] == Category.WAIT], [0, 1], 2)
        order = np.lexsort((depth, -stop, start))
        category, name, track, number = numbers[:, order]
        return Events(
            tuple(self._names),
            tuple(self._tracks),
            category.astype(np.int32),
            name.astype(np.int32),
            track.astype(np.int32),
            number,
            start[order],
            stop[order],
        )
