"""The transport that hpctrain needs: buffer operations among an ordered group of ranks.

A communicator never sees a parameter, and posts nothing by itself. Collectives on one communicator match by posting order, so
every rank posts the same ones in the same order. Buffers are C-contiguous arrays of float32, float64, int32, int64, uint8 or
uint16, and must stay untouched between posting and completion; 16-bit floats travel as their bits, and are never summed on their
way. Names that end in `_object` pickle and are for start-up and shut-down only; they wait through the same deadline as everything
else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

Array = Any


@runtime_checkable
class Handle(Protocol):
    """A posted operation."""

    def test(self) -> bool:
        """Drive progress; True once complete (and from then on). Never blocks."""
        ...


@runtime_checkable
class LateHandle(Handle, Protocol):
    """A started operation that is posted some time later.

    Attributes:
        operation: what was posted, with its size; "" before.
    """

    operation: str


class GradientSums(Protocol):
    """Sums over ranks, which may round what travels, or add in a fixed order. A communicator's own are exact to the dtype.

    Where a rank has several terms of a sum, sums in a fixed order take a tuple of arrays in place of one.
    """

    def iallreduce(self, buffer: Array) -> Handle:
        """Sum over the ranks, in place; every rank gets the same bits. Collective."""
        ...

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Handle:
        """Rank r receives the sum of all ranks' r-th piece of `send` (pieces of `counts` elements). Collective."""
        ...


@runtime_checkable
class Communicator(Protocol):
    """An ordered group of ranks. Implementations: MPI (mpi.py), one process (single.py), threads (virtual/)."""

    rank: int
    size: int
    name: str  # for messages: "world", "split", "data", ...
    world_ranks: tuple[int, ...]  # of its ranks, in order

    def iallreduce(self, buffer: Array) -> Handle:
        """Sum over the ranks, in place. Collective."""
        ...

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Handle:
        """Rank r receives the sum of all ranks' r-th piece of `send` (pieces of `counts` elements). Collective."""
        ...

    def iallgather(self, send: Array | None, recv: Array, counts: Sequence[int]) -> Handle:
        """Every rank receives all pieces in rank order; `send` None: this rank's piece is already in place. Collective."""
        ...

    def ialltoall(self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Handle:
        """Piece r of `send` goes to rank r, piece r of `recv` comes from rank r. Collective."""
        ...

    def ibroadcast(self, buffer: Array, root: int) -> Handle:
        """`root`'s buffer to all. Collective."""
        ...

    def ibarrier(self) -> Handle:
        """Complete once every rank has posted it. Collective."""
        ...

    def isend(self, buffer: Array, dest: int, tag: int) -> Handle: ...

    def irecv(self, buffer: Array, source: int, tag: int) -> Handle: ...

    def split(self, color: int | None, key: int, name: str) -> Communicator | None:
        """Ranks of one color, ordered by key; None for color None. Collective; set-up only (few communicators exist)."""
        ...

    def split_shared_memory(self, name: str) -> Communicator:
        """The ranks on this rank's node, in rank order. Collective; set-up only."""
        ...

    def allgather_object(self, value: Any) -> list[Any]:
        """Every rank's picklable value, in rank order. Collective; waits."""
        ...

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """`root`'s picklable value. Collective; waits."""
        ...

    def abort(self, code: int) -> None:
        """End the whole job at once."""
        ...
