"""The number of updates that each parameter has had, for optimisers whose updates follow from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from hpctrain.nn.parameter import FlatGroup, Segment

_UPDATES = "updates"
_LEFT_OUT = "left_out/"


class UpdateCounts:
    """Counts on every rank the updates of all parameters of a group, also of those that it does not own.

    Steps are counted as they begin, and the updates of an owned segment as they are made, which may be in a later step.

    Args:
        owned: segments that are always updated as they are here.
    """

    def __init__(self, group: FlatGroup, owned: Sequence[Segment]) -> None:
        self._names = frozenset(group.parameters)
        self._parameter = {segment.start: segment.parameter for segment in owned if segment.size}
        self._done = dict.fromkeys(self._parameter, 0)
        self._steps = 0
        self._left_out: Counter[str] = Counter()

    def begin_step(self, left_out: Collection[str]) -> None:
        """A step begins that updates all parameters of the group but `left_out`."""
        self._steps += 1
        self._left_out.update(left_out)

    def count(self, segment: Segment) -> int:
        """Count an update of an owned segment, and give the number of all that it has had."""
        self._done[segment.start] += 1
        return self._done[segment.start]

    def counters(self) -> dict[str, int]:
        """The counts by name, the same on every rank. After all updates of the steps so far."""
        return {_UPDATES: self._steps} | {f"{_LEFT_OUT}{name}": steps for name, steps in sorted(self._left_out.items())}

    def load_counters(self, counters: Mapping[str, int]) -> None:
        """Take what `counters` gave, of this group or of others; names that are missing stand for 0."""
        self._steps = counters.get(_UPDATES, 0)
        steps = {name: counters.get(f"{_LEFT_OUT}{name}", 0) for name in self._names}
        self._left_out = Counter({name: number for name, number in steps.items() if number})
        for start, name in self._parameter.items():
            self._done[start] = self._steps - steps[name]
