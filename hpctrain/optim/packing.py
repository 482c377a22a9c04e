"""The places of owned segments in an optimiser's state, which holds these and nothing else."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from hpctrain.backend.arithmetic import UpdateRun
from hpctrain.nn.parameter import Segment, whole


class Packing:
    """Owned segments one behind the other.

    Args:
        owned: segments that do not overlap, in any order.

    Attributes:
        size: elements of all of them.
    """

    def __init__(self, owned: Sequence[Segment]) -> None:
        ordered = sorted((segment for segment in owned if segment.size), key=lambda segment: segment.start)
        assert all(a.stop <= b.start for a, b in pairwise(ordered)), "owned segments overlap"
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._offsets: list[int] = []
        self.size = 0
        for start, stop in whole(ordered):
            self._starts.append(start)
            self._stops.append(stop)
            self._offsets.append(self.size - start)
            self.size += stop - start

    def offset(self, start: int, stop: int) -> int:
        """The number to add to a place in the flat buffers, inside [start, stop), to get the place in the state."""
        i = bisect_right(self._starts, start) - 1
        owned = i >= 0 and stop <= self._stops[i]
        assert owned, f"elements [{start}, {stop}) are not owned here"
        return self._offsets[i]

    def place(self, segment: Segment) -> slice:
        """The place of an owned segment, of a part of one, or of one without elements."""
        low = segment.start + (self.offset(segment.start, segment.stop) if segment.size else 0)
        return slice(low, low + segment.size)

    def placed(self, run: UpdateRun) -> UpdateRun:
        """The same run with its place in the state."""
        offset = self.offset(run.start, run.stop)
        return replace(run, offset=offset) if offset else run
