"""Moving a tensor from one layout to another inside a split group: the pieces as data, and the runner that moves them.

One primitive serves all: halos, gathers, scatters and redistributions are all-to-alls of box intersections. The adjoint of a
move sends every element's gradient back to its owner, where the parts are added in rank order.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hpctrain.backend.arithmetic import Arithmetic, Array
from hpctrain.backend.dtypes import item_bytes
from hpctrain.core.intervals import Box, intersect, shape_of, size_of, whole, within
from hpctrain.comm.posting_queue import Ticket
from hpctrain.parallel.layout import Layout, LayoutKind
from hpctrain.parallel.split_group import SplitGroup


@dataclass(frozen=True)
class Piece:
    """Elements that go to or come from rank `peer`: their box in the local array, and their place in the flat message buffer."""

    peer: int
    box: Box
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Transfer:
    """One rank's share of a move from `source` to `target`.

    sends: pieces of the local source. receives: pieces of the local target. local: the same elements' boxes in both, None
    where there are none. gaps: some element of the local target has no owner (it is zero). spare: some element of the local
    source is not in the local target.
    """

    sends: tuple[Piece, ...]
    receives: tuple[Piece, ...]
    local: tuple[Box, Box] | None
    gaps: bool
    spare: bool

    @property
    def send_size(self) -> int:
        """Elements for other ranks."""
        return self.sends[-1].stop if self.sends else 0

    @property
    def receive_size(self) -> int:
        """Elements from other ranks."""
        return self.receives[-1].stop if self.receives else 0

    def buffer_bytes(self, item_bytes: int) -> int:
        """Bytes of the message buffers of both sides."""
        return (self.send_size + self.receive_size) * item_bytes


@functools.lru_cache(maxsize=32)  # a move's operator, its costs and its adjoint ask for the same one after the other
def transfer(source: Layout, target: Layout, rank: int) -> Transfer:
    """The pieces that rank `rank` sends, receives and copies. `source` is a partition."""
    assert source.is_partition
    assert source.shape == target.shape
    owned, wanted = source.boxes[rank], target.boxes[rank]
    sends: list[Piece] = []
    receives: list[Piece] = []
    for peer in range(len(source.boxes)):
        if peer == rank:
            continue
        _append(sends, peer, intersect(owned, target.boxes[peer]), owned)
        _append(receives, peer, intersect(source.boxes[peer], wanted), wanted)
    common = intersect(owned, wanted)
    local = None if common is None else (within(common, owned), within(common, wanted))
    kept = 0 if common is None else size_of(common)
    received = sum(piece.stop - piece.start for piece in receives)
    return Transfer(tuple(sends), tuple(receives), local, kept + received < size_of(wanted), kept < size_of(owned))


def _append(pieces: list[Piece], peer: int, box: Box | None, origin: Box) -> None:
    if box is None:
        return
    start = pieces[-1].stop if pieces else 0
    pieces.append(Piece(peer, within(box, origin), shape_of(box), start, start + size_of(box)))


def moved(source: Layout, target: Layout) -> tuple[int, ...]:
    """Elements that each rank hands to the communicator in one move; its adjoint hands over what the move received.

    In a time that grows as the ranks do, beside the neighbours that share something.
    """
    if target.is_partition:  # every element has one reader
        return tuple(size_of(owned) - kept for owned, kept in zip(source.boxes, _kept(source, target), strict=True))
    box = target.boxes[0]
    if all(other == box for other in target.boxes):
        others = len(target.boxes) - 1
        return tuple(others * _common_size(owned, box) for owned in source.boxes)
    sent = [0] * len(source.boxes)
    owners_of = _Owners(source)
    for reader, wanted in enumerate(target.boxes):
        for owner in owners_of(wanted):
            if owner != reader:
                sent[owner] += _common_size(source.boxes[owner], wanted)
    return tuple(sent)


def moved_back(source: Layout, target: Layout) -> tuple[int, ...]:
    """Elements that each rank hands over in the adjoint: those that it received in the move."""
    tensor = whole(source.shape)  # what lies beyond has no owner
    return tuple(_common_size(wanted, tensor) - kept for wanted, kept in zip(target.boxes, _kept(source, target), strict=True))


def _kept(source: Layout, target: Layout) -> list[int]:
    """Elements that each rank has in both. `source` is a partition."""
    assert source.is_partition
    return [_common_size(owned, wanted) for owned, wanted in zip(source.boxes, target.boxes, strict=True)]


def _common_size(a: Box, b: Box) -> int:
    box = intersect(a, b)
    return 0 if box is None else size_of(box)


class _Owners:
    """The ranks that may own some element of a box, of a partition that is split along `_DIMS[kind]` in rank order."""

    _DIMS: ClassVar[Mapping[LayoutKind, int]] = {LayoutKind.SAMPLES: 0, LayoutKind.TILES: 1, LayoutKind.CHANNELS: -1}

    def __init__(self, partition: Layout) -> None:
        self._dim = self._DIMS[partition.kind]
        self._starts = [box[self._dim][0] for box in partition.boxes]
        self._stops = [box[self._dim][1] for box in partition.boxes]

    def __call__(self, box: Box) -> range:
        start, stop = box[self._dim]
        return range(bisect_right(self._stops, start), bisect_left(self._starts, stop))


class TransferRunner:
    """Runs one rank's transfer, forward or as its adjoint. Collective over the split group; one at a time per group.

    Args:
        transfer: this rank's share. group: the ranks. arithmetic, dtype: of both tensors. purpose: for messages and traces.
        own_memory: its messages do not lie in the group's shared buffer, so others may start before this one ends.
    """

    def __init__(
        self,
        transfer: Transfer,
        group: SplitGroup,
        arithmetic: Arithmetic,
        dtype: str,
        purpose: str,
        *,
        own_memory: bool = False,
    ) -> None:
        self.transfer, self._group, self._arithmetic, self._purpose = transfer, group, arithmetic, purpose
        self._dtype, self._bytes = dtype, transfer.buffer_bytes(item_bytes(dtype))
        self._own = group.memory(self._bytes) if own_memory else None
        self.source_side, self.target_side = self._sides()
        self._source_counts = _counts(transfer.sends, group.size)
        self._target_counts = _counts(transfer.receives, group.size)

    def _sides(self) -> tuple[Array, Array]:
        """The group's buffer may be another one than before: it grows as operators are made, never while something travels."""
        memory = (self._group.reserve(self._bytes) if self._own is None else self._own).view(self._dtype)
        return memory[: self.transfer.send_size], memory[self.transfer.send_size :]

    def start(self, x: Array) -> Ticket:
        """Send this rank's pieces of the source x."""
        self.source_side, self.target_side = self._sides()
        self._pack(x, self.transfer.sends, self.source_side)
        return self._group.alltoall(self.source_side, self.target_side, self._source_counts, self._target_counts, self._purpose)

    def finish(self, ticket: Ticket, x: Array, y: Array, kept: Array | None = None) -> None:
        """Fill the target y; copying the local elements hides some of the wait. kept: gets the received ones."""
        self._copy_local(x, y)
        self._group.wait(ticket)
        self._unpack(self.target_side, self.transfer.receives, y)
        if kept is not None:
            self._arithmetic.copy(kept, self.target_side)

    def recompute(self, x: Array, y: Array, kept: Array | None) -> None:
        """Fill y again from x and the elements that `finish` kept, None where it received none. Not collective."""
        self._copy_local(x, y)
        if kept is not None:
            self._unpack(kept, self.transfer.receives, y)

    def _copy_local(self, x: Array, y: Array) -> None:
        if self.transfer.gaps:
            self._arithmetic.fill(y, 0.0)
        if self.transfer.local is not None:
            here, there = self.transfer.local
            self._arithmetic.copy_box(y, there, x, here)

    def start_adjoint(self, dy: Array) -> Ticket:
        """Send the gradients of received elements back to their owners."""
        self.source_side, self.target_side = self._sides()
        self._pack(dy, self.transfer.receives, self.target_side)
        return self._group.alltoall(
            self.target_side, self.source_side, self._target_counts, self._source_counts, f"gradient of {self._purpose}"
        )

    def finish_adjoint(self, ticket: Ticket, dy: Array, dx: Array, *, accumulate: bool) -> None:
        """Write, or add to, the gradient of the source: this rank's own elements, then the others' in rank order."""
        if self.transfer.spare and not accumulate:
            self._arithmetic.fill(dx, 0.0)
        if self.transfer.local is not None:
            here, there = self.transfer.local
            self._arithmetic.copy_box(dx, here, dy, there, accumulate=accumulate)
        self._group.wait(ticket)
        self._unpack(self.source_side, self.transfer.sends, dx, accumulate=True)

    def _pack(self, array: Array, pieces: Sequence[Piece], flat: Array) -> None:
        for piece in pieces:
            self._arithmetic.copy_box(_piece_of(flat, piece), whole(piece.shape), array, piece.box)

    def _unpack(self, flat: Array, pieces: Sequence[Piece], array: Array, *, accumulate: bool = False) -> None:
        for piece in pieces:
            self._arithmetic.copy_box(array, piece.box, _piece_of(flat, piece), whole(piece.shape), accumulate=accumulate)


def _piece_of(flat: Array, piece: Piece) -> Array:
    return flat[piece.start : piece.stop].reshape(piece.shape)


def _counts(pieces: Sequence[Piece], ranks: int) -> list[int]:
    counts = [0] * ranks
    for piece in pieces:
        counts[piece.peer] = piece.stop - piece.start
    return counts
