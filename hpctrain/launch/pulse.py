"""A number in memory that a rank shares with its keeper: it moves while the rank's heartbeat does.

A rank that is stopped, or in which some library holds the interpreter's lock without end, can notice nothing any more. Its
keeper, a process of its own, sees that the number stands still. It counts its own looks, so a job that was suspended as a whole,
keepers included, is an hour older afterwards, but has not stood still for one.
"""

from __future__ import annotations

import mmap

_BEATS, _DEADLINE = 0, 1


class Pulse:
    """The number, and the seconds that it may stand still. Made before the fork; the rank writes, the keeper reads."""

    def __init__(self) -> None:
        self._words = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
        self._seen = 0
        self._still_seconds = 0.0

    def watch(self, deadline_seconds: float) -> None:
        """In the rank: from now on it is not to stand still for so long."""
        self._words[_BEATS] += 1
        self._words[_DEADLINE] = max(1, int(deadline_seconds * 1e9))

    def beat(self) -> None:
        """In the rank: the heartbeat lives."""
        self._words[_BEATS] += 1

    def rest(self) -> None:
        """In the rank: from now on it may stand still."""
        self._words[_DEADLINE] = 0

    def look(self, seconds: float) -> bool:
        """In the keeper, every so many seconds: whether it has stood still for too long."""
        deadline_seconds, beats = self._words[_DEADLINE] * 1e-9, self._words[_BEATS]
        if not deadline_seconds or beats != self._seen:
            self._seen, self._still_seconds = beats, 0.0
            return False
        self._still_seconds += seconds
        return self._still_seconds >= deadline_seconds
