"""Exponential moving average of the weights, kept next to an optimiser's state by the ranks that update them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.backend.arithmetic import Array
from hpctrain.nn.parameter import FlatGroup, Segment
from hpctrain.optim.base import ForwardingOptimizer, Norms, Optimizer, Packing, UpdateCounts

#: name of the state
EMA = "ema"


@dataclass(frozen=True)
class EmaRule:
    """Decay of an average of the weights.

    Args:
        decay: share of the average that each update keeps, in (0, 1).
        warm_up: whether the t-th update keeps (1 + t) / (10 + t) while that is less than `decay`.
    """

    decay: float
    warm_up: bool = True

    def kept(self, number: int) -> float:
        """Return the share of the average that update `number` keeps. The first update has number 1."""
        return min(self.decay, (1 + number) / (10 + number)) if self.warm_up else self.decay


class EmaOptimizer(ForwardingOptimizer):
    """Optimiser with an average of its weights: a := w before the first update; a := (a - w) * kept + w after each update.

    Like all optimiser state, the average covers only the owned segments. A step that leaves out a parameter also leaves out its
    average.
    """

    def __init__(self, inner: Optimizer, rule: EmaRule) -> None:
        super().__init__(inner)
        self._rule = rule
        self._group: FlatGroup | None = None
        self._packing = Packing(())
        self._counts: UpdateCounts | None = None
        self._average: Array = None

    def bind(self, group: FlatGroup, owned: Sequence[Segment]) -> None:
        super().bind(group, owned)
        self._group, self._packing, self._counts = group, Packing(owned), UpdateCounts(group, owned)
        self._average = group.arithmetic.zeros(self._packing.size, group.dtype)
        self._copy(owned)

    def begin_step(self, left_out: Collection[str] = ()) -> None:
        super().begin_step(left_out)
        self._bound[1].begin_step(left_out)

    def update(self, segments: Sequence[Segment], lr: float, norms: Norms | None) -> None:
        group, counts = self._bound
        numbered = [(segment, counts.count(segment)) for segment in segments if segment.size]
        # The parameters may have been loaded since the average was bound.
        self._copy([segment for segment, number in numbered if number == 1])
        super().update(segments, lr, norms)
        for segment, number in _joined(numbered):
            average = self._average[self._packing.place(segment)]
            group.arithmetic.average_into(average, group.data[segment.start : segment.stop], self._rule.kept(number))

    def state(self, segment: Segment) -> dict[str, Array]:
        return {**super().state(segment), EMA: self._average[self._packing.place(segment)]}

    def counters(self) -> dict[str, int]:
        return {**super().counters(), **self._bound[1].counters()}

    def load_counters(self, counters: Mapping[str, int]) -> None:
        super().load_counters(counters)
        self._bound[1].load_counters(counters)

    @property
    def _bound(self) -> tuple[FlatGroup, UpdateCounts]:
        assert self._group is not None, "the optimiser is not bound"
        assert self._counts is not None, "the optimiser is not bound"
        return self._group, self._counts

    def _copy(self, segments: Sequence[Segment]) -> None:
        """Set the average of `segments` to their weights."""
        group, _ = self._bound
        for segment in segments:
            group.arithmetic.copy(self._average[self._packing.place(segment)], group.data[segment.start : segment.stop])


def _joined(numbered: Sequence[tuple[Segment, int]]) -> Iterator[tuple[Segment, int]]:
    """Yield the same elements in fewer segments: adjacent segments with the same number of updates are joined."""
    pending: tuple[Segment, int] | None = None
    for segment, number in sorted(numbered, key=lambda entry: entry[0].start):
        if pending is not None and (pending[0].stop, pending[1]) == (segment.start, number):
            first = pending[0]
            pending = Segment(first.parameter, first.start, segment.stop, first.order, first.decay), number
            continue
        if pending is not None:
            yield pending
        pending = segment, number
    if pending is not None:
        yield pending


def with_ema(inner: Optimizer, rule: EmaRule | None) -> Optimizer:
    """Return `inner` with an average of its weights, or `inner` itself if `rule` is None."""
    return inner if rule is None else EmaOptimizer(inner, rule)
