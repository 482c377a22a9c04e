"""An exponential moving average of the weights, kept beside an optimiser's state by the ranks that update them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.backend.arithmetic import Array
from hpctrain.core.errors import ConfigError
from hpctrain.nn.parameter import FlatGroup, Segment
from hpctrain.optim.base import Norms, NormsNeeded, Optimizer, Packing, UpdateCounts

#: the name of the state
EMA = "ema"


@dataclass(frozen=True)
class EmaRule:
    """How much of an average is kept.

    Args:
        decay: the share in an update, in (0, 1). warm_up: (1 + t) / (10 + t) in the t-th one, as long as that is less.

    Raises:
        ConfigError: a decay outside its range.
    """

    decay: float
    warm_up: bool = True

    def __post_init__(self) -> None:
        if not 0.0 < self.decay < 1.0:
            raise ConfigError(f"The decay {self.decay} of the average of weights is outside (0, 1); a usual value is 0.9999.")

    def kept(self, number: int) -> float:
        """The share that is kept in the update of that number, counted from 1."""
        return min(self.decay, (1 + number) / (10 + number)) if self.warm_up else self.decay


class EmaOptimizer(Optimizer):
    """`inner`, which keeps the average of what it updates: a := w before the first update; a := (a - w) * kept + w after each.

    Like all state it is of the owned segments alone, and in steps that leave a parameter out its average stays as it is.
    """

    def __init__(self, inner: Optimizer, rule: EmaRule) -> None:
        self._inner, self._rule = inner, rule
        self.clip_norm = inner.clip_norm
        self.momentum = inner.momentum
        self.prepares_norms = inner.prepares_norms
        self._group: FlatGroup | None = None
        self._packing = Packing(())
        self._counts: UpdateCounts | None = None
        self._average: Array = None

    @property
    def norms_needed(self) -> NormsNeeded:
        return self._inner.norms_needed

    def bind(self, group: FlatGroup, owned: Sequence[Segment]) -> None:
        self._inner.bind(group, owned)
        self._group, self._packing, self._counts = group, Packing(owned), UpdateCounts(group, owned)
        self._average = group.arithmetic.zeros(self._packing.size, group.dtype)
        self._copy(owned)

    def begin_step(self, left_out: Collection[str] = ()) -> None:
        self._inner.begin_step(left_out)
        self._bound[1].begin_step(left_out)

    def prepare_norms(self, segments: Sequence[Segment]) -> None:
        self._inner.prepare_norms(segments)

    def update(self, segments: Sequence[Segment], lr: float, norms: Norms | None) -> None:
        group, counts = self._bound
        numbered = [(segment, counts.count(segment)) for segment in segments if segment.size]
        # The parameters may have been loaded since the average was bound.
        self._copy([segment for segment, number in numbered if number == 1])
        self._inner.update(segments, lr, norms)
        for segment, number in _joined(numbered):
            average = self._average[self._packing.place(segment)]
            group.arithmetic.average_into(average, group.data[segment.start : segment.stop], self._rule.kept(number))

    def state(self, segment: Segment) -> dict[str, Array]:
        return {**self._inner.state(segment), EMA: self._average[self._packing.place(segment)]}

    def counters(self) -> dict[str, int]:
        return {**self._inner.counters(), **self._bound[1].counters()}

    def load_counters(self, counters: Mapping[str, int]) -> None:
        self._inner.load_counters(counters)
        self._bound[1].load_counters(counters)

    @property
    def _bound(self) -> tuple[FlatGroup, UpdateCounts]:
        assert self._group is not None, "the optimiser is not bound"
        assert self._counts is not None, "the optimiser is not bound"
        return self._group, self._counts

    def _copy(self, segments: Sequence[Segment]) -> None:
        """Make the average of `segments` what their weights are."""
        group, _ = self._bound
        for segment in segments:
            group.arithmetic.copy(self._average[self._packing.place(segment)], group.data[segment.start : segment.stop])


def _joined(numbered: Sequence[tuple[Segment, int]]) -> Iterator[tuple[Segment, int]]:
    """The same elements in fewer segments: neighbours with as many updates are one."""
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


class _LayerwiseEmaOptimizer(EmaOptimizer):
    """The same for one that needs each layer's norms."""

    layer_norms = True


def with_ema(inner: Optimizer, rule: EmaRule | None) -> Optimizer:
    """`inner`, which keeps the average of its weights; None: `inner` itself."""
    if rule is None:
        return inner
    return _LayerwiseEmaOptimizer(inner, rule) if inner.layer_norms else EmaOptimizer(inner, rule)
