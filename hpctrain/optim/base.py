"""Optimisers: one pass over the segments that a rank owns.

An optimiser is bound to a flat group and to the segments that this rank updates (all of them, or a shard). Its state covers only
these segments. It never communicates; the averager sums the squared norms (for LARS, LAMB and clipping) over the ranks.

The module also has the parts that several optimisers share: the places of owned segments in the state (`Packing`), and the number
of updates of each parameter (`UpdateCounts`).
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from functools import cache
from itertools import pairwise

import numpy as np

from hpctrain.backend.arithmetic import Array, UpdateRun
from hpctrain.core.registry import Checked
from hpctrain.nn.parameter import FlatGroup, Segment, whole


class NormsNeeded(StrEnum):
    """The norms that updates use, and therefore wait for."""

    NONE = "none"
    #: norms of the updated parameters only (LARS, LAMB)
    LAYER = "layer"
    #: norm of all parameters together (clipping)
    GLOBAL = "global"


class Norms:
    """Squared norms of whole parameters, float64: of the data and of the gradient, complete over all owners.

    `squares[i]` is (|w|^2, |g|^2) of `group.segments[i]`, and `index` maps the parameter's name to i.
    """

    def __init__(self, group: FlatGroup) -> None:
        self.index = {segment.parameter: i for i, segment in enumerate(group.segments)}
        self.squares = np.zeros((len(group.segments), 2), np.float64)

    def add_partial(self, group: FlatGroup, segments: Sequence[Segment]) -> None:
        """Add the squares of the elements in `segments`. The sum of the partial sums of all owners is the squared norm."""
        flats = (group.data, group.grad)
        sums = group.arithmetic.square_sums([flat[segment.start : segment.stop] for segment in segments for flat in flats])
        for segment, squares in zip(segments, sums.reshape(-1, len(flats)), strict=True):
            self.squares[self.index[segment.parameter]] += squares

    def clear(self, places: slice) -> None:
        """Zero the norms of the parameters at these indices, before `add_partial`."""
        self.squares[places] = 0.0

    def message(self, places: slice) -> np.ndarray:
        """Return a view of this rank's partial sums of the parameters at these indices, to be summed over the ranks."""
        return self.squares[places]

    def complete(self, places: slice) -> None:
        """Complete the norms at these indices, after `message` was summed over the ranks. The base class does nothing."""

    def global_gradient(self) -> float:
        """Return the norm |g| of the gradient of all parameters together."""
        return float(np.sqrt(self.squares[:, 1].sum()))


_PLAIN = (bool, int, float, str, type(None))
_arguments = cache(inspect.signature)


class Optimizer(Checked):
    """Base of optimisers, which update `group.data` from `group.grad`.

    The common options are weight_decay, decay_exclude ("norm_and_bias" or "none") and clip_norm (None: off).
    """

    #: whether it computes with the arithmetic of its group only, so that arrays may lie on a device; NumPy needs the host
    any_arrays: bool = False
    #: whether the update of a layer needs that layer's norms (LARS, LAMB)
    layer_norms: bool = False
    clip_norm: float | None = None
    #: factor on the previous update's direction in the next one; 0 if the optimiser has no momentum
    momentum: float = 0.0
    #: whether `prepare_norms` has an effect
    prepares_norms: bool = False

    @property
    def passes(self) -> float:
        """Time of `prepare_norms` and `update` per element, in units of the time of an addition; predictions of steps use it."""
        return 3.0

    @property
    def norms_needed(self) -> NormsNeeded:
        """Norms that must be complete before `update`."""
        if self.clip_norm is not None:
            return NormsNeeded.GLOBAL
        return NormsNeeded.LAYER if self.layer_norms else NormsNeeded.NONE

    @property
    def needs_norms(self) -> bool:
        """Whether `update` needs `norms` (LARS, LAMB or clipping)."""
        return self.norms_needed is not NormsNeeded.NONE

    def settings(self, *, arguments: bool = False) -> dict[str, object]:
        """Return the settings that must be equal on all ranks, by name: numbers and booleans as float, strings, and None.

        Args:
            arguments: whether to return only arguments of the constructor, which `bind` does not change. False: the class, and
                all attributes of these types; call it before `bind`, which may set others.
        """
        values = {name: getattr(self, name, None) for name in (_arguments(type(self)).parameters if arguments else vars(self))}
        kind = {} if arguments else {"class": type(self).__qualname__}
        plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in values.items()}
        numbers = {name: float(value) for name, value in plain.items() if isinstance(value, int | float)}  # 0 and 0.0 are equal
        return {**kind, **{name: numbers.get(name, value) for name, value in plain.items() if isinstance(value, _PLAIN)}}

    @abstractmethod
    def bind(self, group: FlatGroup, owned: Sequence[Segment]) -> None:
        """Allocate the initial state of the owned segments."""

    def begin_step(self, left_out: Collection[str] = ()) -> None:
        """Begin a step that updates all parameters of the group except `left_out`. Updates of earlier steps may be pending."""

    def prepare_norms(self, segments: Sequence[Segment]) -> None:
        """Replace the complete gradients of `segments` by the arrays whose norms the update needs.

        The averager calls it once before each update, with the same segments. It must not write to the parameters.
        """

    @abstractmethod
    def update(self, segments: Sequence[Segment], lr: float, norms: Norms | None) -> None:
        """Update the data of `segments` from their gradients, which may be overwritten.

        Args:
            norms: complete norms; None if `needs_norms` is false.
        """

    @abstractmethod
    def state(self, segment: Segment) -> dict[str, Array]:
        """Return 1-D views of the state of one owned segment by name ("momentum"), for checkpoints to write and restore."""

    def counters(self) -> dict[str, int]:
        """Return the counts that later updates depend on, by name. Call it between steps.

        The counts are equal on every rank of the group.
        """
        return {}

    def load_counters(self, counters: Mapping[str, int]) -> None:
        """Restore the counts that `counters` returned. Unknown names are ignored; missing counts start as in a new run."""


class ForwardingOptimizer(Optimizer):
    """Base of optimisers that extend the updates of `inner`, to which they forward all calls."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self.any_arrays, self.layer_norms = inner.any_arrays, inner.layer_norms
        self.clip_norm, self.momentum, self.prepares_norms = inner.clip_norm, inner.momentum, inner.prepares_norms

    def settings(self, *, arguments: bool = False) -> dict[str, object]:
        return self.inner.settings(arguments=arguments)

    @property
    def passes(self) -> float:
        return self.inner.passes

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
    """Places of owned segments in an optimiser's state, where they lie one after another without gaps.

    Args:
        owned: segments that do not overlap, in any order.

    Attributes:
        size: total number of elements.
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
        """Return the difference between the place of elements [start, stop) in the state and their place in the flat buffers."""
        i = bisect_right(self._starts, start) - 1
        owned = i >= 0 and stop <= self._stops[i]
        assert owned, f"elements [{start}, {stop}) are not owned here"
        return self._offsets[i]

    def place(self, segment: Segment) -> slice:
        """Return the place of an owned segment, of a part of one, or of an empty segment."""
        low = segment.start + (self.offset(segment.start, segment.stop) if segment.size else 0)
        return slice(low, low + segment.size)

    def placed(self, run: UpdateRun) -> UpdateRun:
        """Return the run with its place in the state."""
        offset = self.offset(run.start, run.stop)
        return UpdateRun(run.start, run.stop, run.gradient_scale, run.decay, offset) if offset else run


_UPDATES = "updates"
_LEFT_OUT = "left_out/"


class UpdateCounts:
    """Number of updates of each parameter of a group, counted on every rank, even for parameters that the rank does not own.

    Steps are counted when they begin, and updates of an owned segment when they are made, which may be in a later step.

    Args:
        owned: segments of this rank. Each update must cover one of them exactly.
    """

    def __init__(self, group: FlatGroup, owned: Sequence[Segment]) -> None:
        self._names = frozenset(group.parameters)
        self._parameter = {segment.start: segment.parameter for segment in owned if segment.size}
        self._done = dict.fromkeys(self._parameter, 0)
        self._steps = 0
        self._left_out: Counter[str] = Counter()

    def begin_step(self, left_out: Collection[str]) -> None:
        """Count a step that updates all parameters of the group except `left_out`."""
        self._steps += 1
        self._left_out.update(left_out)

    def count(self, segment: Segment) -> int:
        """Count an update of an owned segment, and return the number of the segment's updates so far."""
        self._done[segment.start] += 1
        return self._done[segment.start]

    def counters(self) -> dict[str, int]:
        """Return the counts by name, equal on every rank. Call it after all updates of the steps so far."""
        return {_UPDATES: self._steps} | {f"{_LEFT_OUT}{name}": steps for name, steps in sorted(self._left_out.items())}

    def load_counters(self, counters: Mapping[str, int]) -> None:
        """Restore counts that `counters` returned, possibly for another group. A missing name counts as 0."""
        self._steps = counters.get(_UPDATES, 0)
        steps = {name: counters.get(f"{_LEFT_OUT}{name}", 0) for name in self._names}
        self._left_out = Counter({name: number for name, number in steps.items() if number})
        for start, name in self._parameter.items():
            self._done[start] = self._steps - steps[name]
