"""Counters in memory that a rank shares with its keeper: one grows with the rank's heartbeat, the other with the keeper's looks.

A rank that is stopped, or in which a library never releases the interpreter's lock, cannot notice anything itself. Its keeper, a
separate process, sees that the rank's counter stands still. A stopped keeper can neither end the rank nor report its end to the
launcher; the rank's heartbeat sees that. Each side counts its own looks. So the time for which a whole job, keepers included, was
suspended does not count as standing still.
"""

from __future__ import annotations

import mmap

_BEATS, _DEADLINE, _WATCHED, _KEEPER, _GUARDED, _TOLD = range(6)


class Pulse:
    """The counters, and the deadline for which they may stand still. Made before the fork, and written by both processes."""

    def __init__(self) -> None:
        self._words = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
        self._seen = self._keeper_seen = 0
        self._still_seconds = self._keeper_still_seconds = 0.0

    @property
    def deadline_seconds(self) -> float:
        """The latest deadline of the rank, also while it rests; 0 before there is one."""
        return self._words[_DEADLINE] * 1e-9

    def watch(self, deadline_seconds: float) -> None:
        """Begin the watch of the rank: its counter must not stand still for the deadline. Called in the rank."""
        self._words[_BEATS] += 1
        self._words[_DEADLINE] = max(1, int(deadline_seconds * 1e9))
        self._words[_WATCHED] = 1

    def beat(self) -> None:
        """Count a beat of the heartbeat. Called in the rank."""
        self._words[_BEATS] += 1

    def rest(self) -> None:
        """Pause the watch of the rank. Called in the rank."""
        self._words[_WATCHED] = 0

    def guard(self, guarded: bool) -> None:
        """Note whether a timer that needs no interpreter lock will end the rank, with the exit code of a bug.

        Called in the rank.
        """
        self._words[_GUARDED] = guarded

    @property
    def guarded(self) -> bool:
        """Whether such a timer is running, or has ended the rank."""
        return self._words[_GUARDED] != 0

    def tell(self) -> None:
        """Note that the rank is about to tell the other ranks of its end. Called in the rank."""
        self._words[_TOLD] = 1

    @property
    def told(self) -> bool:
        """Whether the rank has called `tell`."""
        return self._words[_TOLD] != 0

    def look(self, seconds: float) -> bool:
        """Return whether the rank has stood still for the deadline. Called in the keeper, every `seconds`."""
        beats = self._words[_BEATS]
        if not self._words[_WATCHED] or beats != self._seen:
            self._seen, self._still_seconds = beats, 0.0
            return False
        self._still_seconds += seconds
        return self._still_seconds >= self.deadline_seconds

    def keep(self) -> None:
        """Count a look of the keeper. Called in the keeper."""
        self._words[_KEEPER] += 1

    def look_at_keeper(self, seconds: float) -> bool:
        """Return whether the keeper has stood still for the deadline; False without a keeper.

        Called in the rank, every `seconds`.
        """
        beats = self._words[_KEEPER]
        if beats != self._keeper_seen or not beats:
            self._keeper_seen, self._keeper_still_seconds = beats, 0.0
            return False
        self._keeper_still_seconds += seconds
        return self._keeper_still_seconds >= self.deadline_seconds
