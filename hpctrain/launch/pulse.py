"""Numbers in memory that a rank shares with its keeper: one moves with the rank's heartbeat, the other with the keeper's looks.

A rank that is stopped, or in which some library holds the interpreter's lock without end, can notice nothing any more. Its
keeper, a process of its own, sees that the number stands still. A keeper that is stopped can neither end the rank nor tell the
launcher of its end; the rank's heartbeat sees that. Each counts its own looks, so a job that was suspended as a whole, keepers
included, is an hour older afterwards, but has not stood still for one.
"""

from __future__ import annotations

import mmap

_BEATS, _DEADLINE, _WATCHED, _KEEPER, _GUARDED, _TOLD = range(6)


class Pulse:
    """The numbers, and the seconds that they may stand still. Made before the fork, and written by both processes."""

    def __init__(self) -> None:
        self._words = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
        self._seen = self._keeper_seen = 0
        self._still_seconds = self._keeper_still_seconds = 0.0

    @property
    def deadline_seconds(self) -> float:
        """The latest deadline of the rank, also where it rests; 0 before there is one."""
        return self._words[_DEADLINE] * 1e-9

    def watch(self, deadline_seconds: float) -> None:
        """In the rank: from now on it is not to stand still for so long."""
        self._words[_BEATS] += 1
        self._words[_DEADLINE] = max(1, int(deadline_seconds * 1e9))
        self._words[_WATCHED] = 1

    def beat(self) -> None:
        """In the rank: the heartbeat lives."""
        self._words[_BEATS] += 1

    def rest(self) -> None:
        """In the rank: from now on it may stand still."""
        self._words[_WATCHED] = 0

    def guard(self, guarded: bool) -> None:
        """In the rank: a timer that needs no interpreter's lock ends it from now on, with the exit code of a bug, or no more."""
        self._words[_GUARDED] = guarded

    @property
    def guarded(self) -> bool:
        """Whether such a timer runs, or has ended the rank."""
        return self._words[_GUARDED] != 0

    def tell(self) -> None:
        """In the rank: it is about to tell the other ranks of its end."""
        self._words[_TOLD] = 1

    @property
    def told(self) -> bool:
        """Whether it has."""
        return self._words[_TOLD] != 0

    def look(self, seconds: float) -> bool:
        """In the keeper, every so many seconds: whether the rank has stood still for too long."""
        beats = self._words[_BEATS]
        if not self._words[_WATCHED] or beats != self._seen:
            self._seen, self._still_seconds = beats, 0.0
            return False
        self._still_seconds += seconds
        return self._still_seconds >= self.deadline_seconds

    def keep(self) -> None:
        """In the keeper: it lives."""
        self._words[_KEEPER] += 1

    def look_at_keeper(self, seconds: float) -> bool:
        """In the rank, every so many seconds: whether its keeper has stood still for too long. False where it has none."""
        beats = self._words[_KEEPER]
        if beats != self._keeper_seen or not beats:
            self._keeper_seen, self._keeper_still_seconds = beats, 0.0
            return False
        self._keeper_still_seconds += seconds
        return self._keeper_still_seconds >= self.deadline_seconds
