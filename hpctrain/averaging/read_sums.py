"""Sums over the parameters that a step reads, taken just before the update of that step overwrites them.

A rank's copy of a parameter that another rank owns is overwritten in every step. Damage to the copy therefore lasts one step
only, but that step has computed with it. Comparing the sums of all ranks reveals the damage afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hpctrain.backend.arithmetic import ArrayChecksums, Fetch
from hpctrain.nn.parameter import FlatGroup, Segment


class ReadSums:
    """Sum the 32-bit words of one group's parameters. Made at set-up, alike on every rank of the group.

    Args:
        parts: the segments that are written together; each element of the group is in at most one part.
        places: elements of the flat buffers at which segments are cut, so that no piece has elements of several owners.

    Attributes:
        pieces: the summed segments, part after part.
    """

    def __init__(self, group: FlatGroup, parts: Sequence[Sequence[Segment]], places: Sequence[int] = ()) -> None:
        self.pieces: list[Segment] = []
        self._sums: list[ArrayChecksums] = []
        for part in parts:
            pieces = [piece for segment in part for piece in _cut(segment, places)]
            if pieces:
                self._sums.append(group.arithmetic.watched([group.data[one.start : one.stop] for one in pieces]).sums())
            self.pieces += pieces
        counts = [bool(_size(part)) for part in parts]
        #: by part, the index of its sums; None for a part without elements
        self._place = [sum(counts[:number]) if sized else None for number, sized in enumerate(counts)]
        self._step: StepReads | None = None

    def begin(self) -> StepReads:
        """Begin a step and return its sums."""
        self._step = StepReads(self._sums, self._place)
        return self._step

    def complete(self) -> list[Fetch]:
        """Return pending fetches of the sums of all parts, in order. Call it after the step's last read. Does not wait."""
        step, self._step = self._step or self.begin(), None
        return step.complete()


class StepReads:
    """The sums of one step, part by part."""

    def __init__(self, sums: Sequence[ArrayChecksums], place: Sequence[int | None]) -> None:
        self._sums, self._place = sums, place
        self._fetches: list[Fetch | None] = [None] * len(sums)

    def take(self, part: int) -> None:
        """Take the sums of a part that is about to be written, unless they were taken before."""
        place = self._place[part]
        if place is not None:
            self._take(place)

    def complete(self) -> list[Fetch]:
        """Take the sums of all remaining parts, and return those of all parts."""
        return [self._take(place) for place in range(len(self._sums))]

    def _take(self, place: int) -> Fetch:
        fetch = self._fetches[place]
        if fetch is None:
            fetch = self._fetches[place] = self._sums[place].fetch()
        return fetch


def _size(part: Sequence[Segment]) -> int:
    return sum(segment.size for segment in part)


def _cut(segment: Segment, places: Sequence[int]) -> list[Segment]:
    """Cut a segment at places, and return the non-empty parts."""
    inside = sorted({place for place in places if segment.start < place < segment.stop})
    bounds = pairwise((segment.start, *inside, segment.stop))
    return [part for part in (segment.part(begin, end) for begin, end in bounds) if part.size]
