"""Parameters that travel in 16 bits: everybody computes with the rounded ones, and owners keep what rounding took away.

The optimiser updates exact values: an owner adds the error to its part before an update, and takes it out again when it rounds
what it sends. Both are exact, as the difference of a number and its nearest 16-bit one is a number of the parameters' own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hpctrain.averaging.slicing import Slice
from hpctrain.comm.base import Communicator, Handle
from hpctrain.comm.sums import Caster, MessageBuffers
from hpctrain.comm.order import Finished
from hpctrain.nn.parameter import FlatGroup, Segment
from hpctrain.optim.base import Norms

#: the name of the state: exact parameters are those of the network plus this
PARAMETER_ERROR = "parameter_error"


class WriteGuard(Protocol):
    """Detects changes of arrays between two writes to them."""

    def compare(self) -> None:
        """Compare the arrays with the remembered sums, just before they are written."""
        ...

    def remember(self) -> None:
        """Remember the arrays, just after they were written."""
        ...


class RoundedParameters:
    """The errors of what this rank owns, and the allgathers of rounded parts. All arrays are on the host.

    Args:
        slices: of a schedule. own: by slice, the segments of this rank's part, in order. rank, ranks: those that own the parts.

    Attributes:
        guards: a guard of the arrays that `guarded` returns for each slice; empty if they are not watched.
    """

    def __init__(
        self, group: FlatGroup, slices: Sequence[Slice], own: Sequence[Sequence[Segment]], rank: int, ranks: int, caster: Caster
    ) -> None:
        self._group, self._slices, self._rank, self._ranks = group, slices, rank, ranks
        self._buffers = MessageBuffers(caster)
        self._parts = [piece.part(rank, ranks) for piece in slices]
        self._errors = [np.zeros(end - begin, group.dtype) for begin, end in self._parts]
        self._of_segment = {
            segment.start: self._errors[k][segment.start - self._parts[k][0] : segment.stop - self._parts[k][0]]
            for k, segments in enumerate(own)
            for segment in segments
        }
        self._own = own
        self.guards: Sequence[WriteGuard] = ()
        self._exact = np.empty(max(map(len, self._errors), default=0), group.dtype)

    def restore(self, k: int) -> None:
        """Put the exact values of a slice into this rank's part of it."""
        if self.guards:
            self.guards[k].compare()
        begin, end = self._parts[k]
        self._group.arithmetic.add(self._group.data[begin:end], self._errors[k])

    def gather(self, k: int, comm: Communicator) -> Handle:
        """Round this rank's part of a slice, keep the error, and gather the rounded parts of all. Collective."""
        piece, mine = self._slices[k], self._rank
        data = self._group.data[piece.start : piece.stop]
        parts = self._buffers.parts(piece.counts(self._ranks), data.dtype)
        messages = self._buffers.take(parts.total_bytes)
        begin, end = parts.elements[mine]
        parts.write(mine, data, messages)
        self._group.arithmetic.copy(self._errors[k], data[begin:end])
        parts.read(mine, messages, data)
        with np.errstate(invalid="ignore"):  # what is not finite is reported elsewhere
            self._group.arithmetic.subtract(self._errors[k], data[begin:end])
        if self.guards:
            self.guards[k].remember()

        def finish() -> None:
            for rank in range(self._ranks):
                if rank != mine:
                    parts.read(rank, messages, data)
            self._buffers.give_back(messages)

        return Finished(comm.iallgather(None, messages, parts.sizes), finish)

    def guarded(self) -> list[list[tuple[str, np.ndarray]]]:
        """Return, by slice, the names and arrays that only `restore` and `gather` write."""
        of_slices: list[list[tuple[str, np.ndarray]]] = []
        for segments in self._own:
            arrays = [(f"parameter {one.parameter}", self._group.data[one.start : one.stop]) for one in segments]
            errors = [(f"the rounding error of {one.parameter}", self.state(one)[PARAMETER_ERROR]) for one in segments]
            of_slices.append([*arrays, *errors])
        return of_slices

    def add_squares(self, norms: Norms, k: int, segments: Sequence[Segment]) -> None:
        """As `Norms.add_partial` for this rank's part of a slice, but with its exact values."""
        begin, end = self._parts[k]
        exact = self._exact[: end - begin]
        self._group.arithmetic.copy(exact, self._group.data[begin:end])
        self._group.arithmetic.add(exact, self._errors[k])
        for segment in segments:
            weights, gradient = (
                exact[segment.start - begin : segment.stop - begin],
                self._group.grad[segment.start : segment.stop],
            )
            norms.squares[norms.index[segment.parameter]] += self._group.arithmetic.square_sums((weights, gradient))

    def state(self, segment: Segment) -> dict[str, np.ndarray]:
        """{"parameter_error": view} of an owned segment of a part, or of an empty one; empty for what every rank updates."""
        if not segment.size:
            return {PARAMETER_ERROR: self._exact[:0]}
        view = self._of_segment.get(segment.start)
        return {} if view is None else {PARAMETER_ERROR: view[: segment.size]}
