"""Optimisers: one pass over the segments that a rank owns.

An optimiser is bound to a flat group and to the segments that this rank updates (all of them, or a shard): its state holds just
those. It never communicates; what must be summed over ranks (squared norms, for LARS and clipping) is asked of the averager.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import ClassVar

import numpy as np

from hpctrain.backend.arithmetic import Array
from hpctrain.nn.parameter import FlatGroup, Segment


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
