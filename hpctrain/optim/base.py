"""Optimisers: one pass over the segments that a rank owns.

An optimiser is bound to a flat group and to the segments that this rank updates (all of them, or a shard): its state holds
just
those. It never communicates; what must be summed over ranks (squared norms, for LARS and clipping) is asked of the averager.

The module also holds what several optimisers share: the places of owned segments in the state (`Packing`), the number of
updates of each parameter (`UpdateCounts`), gradient clipping by the global norm, and weight decay.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import pairwise
from typing import ClassVar, Literal, get_args

import numpy as np

from hpctrain.backend.arithmetic import Array, UpdateRun
from hpctrain.core.errors import OptionError
from hpctrain.nn.parameter import FlatGroup, Segment, whole


class NormsNeeded(StrEnum):
    """The norms that updates are made with, and so what each of them waits for."""

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
        """Begin to add up the norms of the parameters at these places."""
        self.squares[places] = 0.0

    def message(self, places: slice) -> np.ndarray:
        """The sums over elements of this rank, of the parameters at these places, whose sum over the ranks is wanted. A view."""
        return self.squares[places]

    def complete(self, places: slice) -> None:
        """The message of these places holds sums over all ranks now."""

    def global_gradient(self) -> float:
        """|g| over all parameters."""
        return float(np.sqrt(self.squares[:, 1].sum()))


class Optimizer(ABC):
    """Updates `group.data` from `group.grad`.

    Options common to all are weight_decay, decay_exclude ("norm_and_bias" or "none") and clip_norm (None: off).
    """

    #: it computes by the arithmetic of its group alone, wherever the arrays lie, and not by NumPy, which knows those of the host
    any_arrays: ClassVar[bool] = False
    #: the update of one layer needs that layer's norms (LARS, LAMB)
    layer_norms: ClassVar[bool] = False
    clip_norm: float | None = None
    #: share of the previous update's direction that is kept; 0 by an optimiser that has none
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
        """True where `update` must be given `norms` (LARS, LAMB or clipping)."""
        return self.norms_needed is not NormsNeeded.NONE

    @abstractmethod
    def bind(self, group: FlatGroup, owned: Sequence[Segment]) -> None:
        """Allocate the state of the owned segments, zeroed."""

    def begin_step(self, left_out: Collection[str] = ()) -> None:  # noqa: B027  most count nothing
        """A step begins that updates all parameters of the group but `left_out`; updates of earlier ones may still come."""

    def prepare_norms(self, segments: Sequence[Segment]) -> None:  # noqa: B027  most take those of the gradient
        """Where norms are needed: replace the gradients of `segments`, which are complete, by that of which they are taken.

        Once per update, which then gets the same segments. Nothing writes to the parameters here.
        """

    @abstractmethod
    def update(self, segments: Sequence[Segment], lr: float, norms: Norms | None) -> None:
        """Update the data of `segments` (each one of the bound ones) from their gradients, which may be overwritten."""

    @abstractmethod
    def state(self, segment: Segment) -> dict[str, Array]:
        """Views of the state of one owned segment, 1-D, by name ("momentum"): what a checkpoint writes and restores."""

    def counters(self) -> dict[str, int]:
        """Numbers by name, the same on every rank of the group, that later updates follow from. Between steps."""
        return {}

    def load_counters(self, counters: Mapping[str, int]) -> None:  # noqa: B027
        """Take what `counters` gave, among names of others; those that are missing are as in a new run."""


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


#: added to |g|, so that a gradient of zeros is not divided by
EPSILON = 1e-6


def check_clip_norm(clip_norm: float | None) -> None:
    """Nothing, where the value is legal.

    Raises:
        OptionError: it is not.
    """
    if clip_norm is not None and not clip_norm > 0.0:
        sentence = f"clip_norm {clip_norm} must be positive; leave it out (null) to switch clipping off."
        raise OptionError(sentence, "clip_norm")


def clip_scale(clip_norm: float | None, norms: Norms | None) -> float:
    """min(1, clip_norm / (|g| + 1e-6)), |g| over all parameters of `norms`; 1 where clipping is off.

    A gradient that is not finite stays so: |g| = nan gives 1 and |g| = inf gives 0, and 0 * inf is nan.
    """
    if clip_norm is None:
        return 1.0
    assert norms is not None, "clipping needs norms"
    return min(1.0, clip_norm / (norms.global_gradient() + EPSILON))


DecayExclude = Literal["norm_and_bias", "none"]


def check_decay(weight_decay: float, decay_exclude: str) -> None:
    """Nothing, where both values are legal.

    Raises:
        OptionError: one of them is not.
    """
    if not (weight_decay >= 0.0 and math.isfinite(weight_decay)):
        sentence = f"weight_decay {weight_decay} must be a finite number of at least 0; the usual value is 1e-4."
        raise OptionError(sentence, "weight_decay")
    if decay_exclude not in get_args(DecayExclude):
        sentence = f"decay_exclude {decay_exclude!r} is unknown; it is one of {', '.join(get_args(DecayExclude))}."
        raise OptionError(sentence, "decay_exclude")


def is_excluded(segment: Segment, decay_exclude: str) -> bool:
    """True for a norm's parameters and biases, where `decay_exclude` leaves them out."""
    return decay_exclude == "norm_and_bias" and not segment.decay
