"""Sums over the parameters that a step reads, taken at the last moment before the update of that step writes over them.

A copy of a parameter that another rank owns is written in every step, so damage to it lasts one step, which has used it. Sums of
all ranks over what they read tell of it afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hpctrain.backend.arithmetic import ArrayChecksums, Fetch
from hpctrain.nn.parameter import FlatGroup, Segment


class ReadSums:
    """Sums of the words of one group's parameters. Made at set-up, alike on every rank of the group.

    Args:
        parts: the segments that are written at once; each element of the group is in one of them at most.
        places: elements of the flat buffers at which segments are cut, so that no piece has elements of several owners.

    Attributes:
        pieces: what is summed, the pieces of each part one after another.
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
        #: by part, the place of its sums; None for one without elements
        self._place = [sum(counts[:number]) if sized else None for number, sized in enumerate(counts)]
        self._step: StepReads | None = None

    def begin(self) -> StepReads:
        """Return the sums of a step that begins."""
        self._step = StepReads(self._sums, self._place)
        return self._step

    def complete(self) -> list[Fetch]:
        """Return the sums of the step, of all parts in order, on their way: after its last read. Does not wait."""
        step, self._step = self._step or self.begin(), None
        return step.complete()


class StepReads:
    """The sums of one step, part by part."""

    def __init__(self, sums: Sequence[ArrayChecksums], place: Sequence[int | None]) -> None:
        self._sums, self._place = sums, place
        self._fetches: list[Fetch | None] = [None] * len(sums)

    def take(self, part: int) -> None:
        """Take the sums of a part, which is about to be written; nothing where they were taken before."""
        place = self._place[part]
        if place is not None:
            self._take(place)

    def complete(self) -> list[Fetch]:
        """Take those of all parts that are not written yet, and return all."""
        return [self._take(place) for place in range(len(self._sums))]

    def _take(self, place: int) -> Fetch:
        fetch = self._fetches[place]
        if fetch is None:
            fetch = self._fetches[place] = self._sums[place].fetch()
        return fetch


def _size(part: Sequence[Segment]) -> int:
    return sum(segment.size for segment in part)


def _cut(segment: Segment, places: Sequence[int]) -> list[Segment]:
    """The parts of a segment between neighbouring places, without empty ones."""
    inside = sorted({place for place in places if segment.start < place < segment.stop})
    bounds = pairwise((segment.start, *inside, segment.stop))
    return [part for part in (segment.part(begin, end) for begin, end in bounds) if part.size]
