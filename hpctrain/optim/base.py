"""Optimisers: one pass over the segments that a rank owns.

An optimiser is bound to a flat group and to the segments that this rank updates (all of them, or a shard): its state holds just
those. It never communicates; what must be summed over ranks (squared norms, for LARS and clipping) is completed by the averager.

The module also holds what several optimisers share: the places of owned segments in the state (`Packing`), and the number of
updates of each parameter (`UpdateCounts`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import pairwise

import numpy as np

from hpctrain.backend.arithmetic import Array, UpdateRun
from hpctrain.nn.parameter import FlatGroup, Segment, whole


class NormsNeeded(StrEnum):
    """The norms that updates are made with, and so what each update waits for."""

    NONE = "none"
    #: of the parameters that are updated, and of no others (LARS, LAMB)
    LAYER = "layer"
    #: of all parameters together (clipping)
    GLOBAL = "global"


class Norms:
    """Squared norms of whole parameters, float64: of the data and of the gradient, complete over all owners.

    `squares[i] = (|w|^2, |g|^2)` of `group.segments[i]`.
    """

    def __init__(self, group: FlatGroup) -> None:
        self.index = {segment.parameter: i for i, segment in enumerate(group.segments)}
        self.squares = np.zeros((len(group.segments), 2), np.float64)

    def add_partial(self, group: FlatGroup, segments: Sequence[Segment]) -> None:
        """Add the squares of the elements in `segments`. The sum over all owners of all partial sums is the norm."""
        flats = (group.data, group.grad)
        sums = group.arithmetic.square_sums([flat[segment.start : segment.stop] for segment in segments for flat in flats])
        for segment, squares in zip(segments, sums.reshape(-1, len(flats)), strict=True):
            self.squares[self.index[segment.parameter]] += squares

    def clear(self, places: slice) -> None:
        """Zero the norms of the parameters at these places, before `add_partial`."""
        self.squares[places] = 0.0

    def message(self, places: slice) -> np.ndarray:
        """Return a view of this rank's partial sums of the parameters at these places, to be summed over the ranks."""
        return self.squares[places]

    def complete(self, places: slice) -> None:
        """Take note that the message of these places now holds sums over all ranks."""

    def global_gradient(self) -> float:
        """Return |g| over all parameters."""
        return float(np.sqrt(self.squares[:, 1].sum()))


class Optimizer(ABC):
    """Updates `group.data` from `group.grad`.

    Options common to all are weight_decay, decay_exclude ("norm_and_bias" or "none") and clip_norm (None: off).
    """

    #: it computes by the arithmetic of its group alone, so arrays may lie on a device; NumPy knows those of the host only
    any_arrays: bool = False
    #: the update of a layer needs that layer's norms (LARS, LAMB)
    layer_norms: bool = False
    clip_norm: float | None = None
    #: share of the previous update's direction that is kept; 0 if an optimiser has none
    momentum: float = 0.0
    #: `prepare_norms` does something
    prepares_norms: bool = False

    @property
    def norms_needed(self) -> NormsNeeded:
        """The norms that must be complete before `update`."""
        if self.clip_norm is not None:
            return NormsNeeded.GLOBAL
        return NormsNeeded.LAYER if self.layer_norms else NormsNeeded.NONE

    @property
    def needs_norms(self) -> bool:
        """Whether `update` must be given `norms` (LARS, LAMB or clipping)."""
        return self.norms_needed is not NormsNeeded.NONE

    @abstractmethod
    def bind(self, group: FlatGroup, owned: Sequence[Segment]) -> None:
        """Allocate the state of the owned segments, zeroed."""

    def begin_step(self, left_out: Collection[str] = ()) -> None:  # noqa: B027  most count nothing
        """Begin a step that updates all parameters of the group but `left_out`; updates of earlier steps may still come."""

    def prepare_norms(self, segments: Sequence[Segment]) -> None:  # noqa: B027  most take the norms of the gradient
        """Replace the gradients of `segments`, which are complete, by the arrays whose norms the update needs.

        Called once per update, which then gets the same segments. Does not write to the parameters.
        """

    @abstractmethod
    def update(self, segments: Sequence[Segment], lr: float, norms: Norms | None) -> None:
        """Update the data of `segments` (each one of the bound ones) from their gradients, which may be overwritten."""

    @abstractmethod
    def state(self, segment: Segment) -> dict[str, Array]:
        """Return views of the state of one owned segment, 1-D, by name ("momentum"), for checkpoints to write and restore."""

    def counters(self) -> dict[str, int]:
        """Return counts by name that later updates follow from, the same on every rank of the group. Call it between steps."""
        return {}

    def load_counters(self, counters: Mapping[str, int]) -> None:  # noqa: B027
        """Take the counts that `counters` returned; others are ignored, and missing ones are as in a new run."""


class ForwardingOptimizer(Optimizer):
    """The base of optimisers that add something to the updates of `inner`; forwards all else."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self.any_arrays, self.layer_norms = inner.any_arrays, inner.layer_norms
        self.clip_norm, self.momentum, self.prepares_norms = inner.clip_norm, inner.momentum, inner.prepares_norms

    @property
    def norms_needed(self) -> NormsNeeded:
        return self.inner.norms_needed

    def bind(self, group: FlatGroup, owned: Sequence[Segment]) -> None:
        self.inner.bind(group, owned)

    def begin_step(self, left_out: Collection[str] = ()) -> None:
        self.inner.begin_step(left_out)

    def prepare_norms(self, segments: Sequence[Segment]) -> None:
        self.inner.prepare_norms(segments)

    def update(self, segments: Sequence[Segment], lr: float, norms: Norms | None) -> None:
        self.inner.update(segments, lr, norms)

    def state(self, segment: Segment) -> dict[str, Array]:
        return self.inner.state(segment)

    def counters(self) -> dict[str, int]:
        return self.inner.counters()

    def load_counters(self, counters: Mapping[str, int]) -> None:
        self.inner.load_counters(counters)


class Packing:
    """The places of owned segments in an optimiser's state, where they lie one after another without gaps.

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
        """Return the place in the state minus the place in the flat buffers, for elements [start, stop)."""
        i = bisect_right(self._starts, start) - 1
        owned = i >= 0 and stop <= self._stops[i]
        assert owned, f"elements [{start}, {stop}) are not owned here"
        return self._offsets[i]

    def place(self, segment: Segment) -> slice:
        """Return the place of an owned segment, of a part of one, or of one without elements."""
        low = segment.start + (self.offset(segment.start, segment.stop) if segment.size else 0)
        return slice(low, low + segment.size)

    def placed(self, run: UpdateRun) -> UpdateRun:
        """Return the same run with its place in the state."""
        offset = self.offset(run.start, run.stop)
        return replace(run, offset=offset) if offset else run


_UPDATES = "updates"
_LEFT_OUT = "left_out/"


class UpdateCounts:
    """The number of updates of all parameters of a group, counted on every rank, also of parameters that it does not own.

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
        """Count a step that updates all parameters of the group but `left_out`."""
        self._steps += 1
        self._left_out.update(left_out)

    def count(self, segment: Segment) -> int:
        """Count an update of an owned segment; return the number of its updates so far."""
        self._done[segment.start] += 1
        return self._done[segment.start]

    def counters(self) -> dict[str, int]:
        """Return the counts by name, the same on every rank. Call it after all updates of the steps so far."""
        return {_UPDATES: self._steps} | {f"{_LEFT_OUT}{name}": steps for name, steps in sorted(self._left_out.items())}

    def load_counters(self, counters: Mapping[str, int]) -> None:
        """Take the counts that `counters` returned, of this group or of others; names that are missing stand for 0."""
        self._steps = counters.get(_UPDATES, 0)
        steps = {name: counters.get(f"{_LEFT_OUT}{name}", 0) for name in self._names}
        self._left_out = Counter({name: number for name, number in steps.items() if number})
        for start, name in self._parameter.items():
            self._done[start] = self._steps - steps[name]
