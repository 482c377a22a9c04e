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

import numpy as np

from hpctrain.boxes import Box, intersect, relative, shape_of, size_of, whole
from hpctrain.comm.progress import Ticket
from hpctrain.parallel.layout import Layout, LayoutKind
from hpctrain.parallel.split_group import SplitGroup

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Piece:
    """Elements that go to or come from rank `peer`: their place in the local array, and in the flat message buffer."""

    peer: int
    slices: Slices
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Transfer:
    """One rank's share of a move from `source` to `target`.

    sends: pieces of the local source. receives: pieces of the local target. local: the same elements in both, None where there
    are none. gaps: some element of the local target has no owner (it is zero). spare: some element of the local source is
    not in the local target.
    """

    sends: tuple[Piece, ...]
    receives: tuple[Piece, ...]
    local: tuple[Slices, Slices] | None
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
    local = None if common is None else (relative(common, owned), relative(common, wanted))
    kept = 0 if common is None else size_of(common)
    received = sum(piece.stop - piece.start for piece in receives)
    return Transfer(tuple(sends), tuple(receives), local, kept + received < size_of(wanted), kept < size_of(owned))


def _append(pieces: list[Piece], peer: int, box: tuple[tuple[int, int], ...] | None, origin: tuple[tuple[int, int], ...]) -> None:
    if box is None:
        return
    start = pieces[-1].stop if pieces else 0
    pieces.append(Piece(peer, relative(box, origin), shape_of(box), start, start + size_of(box)))


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
        transfer: this rank's share. group: the ranks. dtype: of both tensors. purpose: for messages and traces.
        own_memory: its messages do not lie in the group's shared buffer, so others may start before this one ends.
    """

    def __init__(self, transfer: Transfer, group: SplitGroup, dtype: str, purpose: str, *, own_memory: bool = False) -> None:
        self.transfer, self._group, self._purpose = transfer, group, purpose
        sizes = (transfer.send_size, transfer.receive_size)
        size_bytes = sum(sizes) * np.dtype(dtype).itemsize
        memory = (np.zeros(size_bytes, np.uint8) if own_memory else group.reserve(size_bytes)).view(dtype)
        self.source_side = memory[: sizes[0]]
        self.target_side = memory[sizes[0] : sum(sizes)]
        self._source_counts = _counts(transfer.sends, group.size)
        self._target_counts = _counts(transfer.receives, group.size)

    def start(self, x: np.ndarray) -> Ticket:
        """Send this rank's pieces of the source x."""
        _pack(x, self.transfer.sends, self.source_side)
        return self._group.alltoall(self.source_side, self.target_side, self._source_counts, self._target_counts, self._purpose)

    def finish(self, ticket: Ticket, x: np.ndarray, y: np.ndarray, kept: np.ndarray | None = None) -> None:
        """Fill the target y; copying the local elements hides some of the wait. kept: gets the received ones."""
        self._copy_local(x, y)
        self._group.wait(ticket)
        _unpack(self.target_side, self.transfer.receives, y)
        if kept is not None:
            kept[...] = self.target_side

    def recompute(self, x: np.ndarray, y: np.ndarray, kept: np.ndarray) -> None:
        """Fill y again from x and the elements that `finish` kept. Not collective."""
        self._copy_local(x, y)
        _unpack(kept, self.transfer.receives, y)

    def _copy_local(self, x: np.ndarray, y: np.ndarray) -> None:
        if self.transfer.gaps:
            y[...] = 0
        if self.transfer.local is not None:
            here, there = self.transfer.local
            y[there] = x[here]

    def start_adjoint(self, dy: np.ndarray) -> Ticket:
        """Send the gradients of received elements back to their owners."""
        _pack(dy, self.transfer.receives, self.target_side)
        return self._group.alltoall(
            self.target_side, self.source_side, self._target_counts, self._source_counts, f"gradient of {self._purpose}"
        )

    def finish_adjoint(self, ticket: Ticket, dy: np.ndarray, dx: np.ndarray, *, accumulate: bool) -> None:
        """Write, or add to, the gradient of the source: this rank's own elements, then the others' in rank order."""
        local = self.transfer.local
        if self.transfer.spare and not accumulate:
            dx[...] = 0
        if local is not None:
            if accumulate:
                dx[local[0]] += dy[local[1]]
            else:
                dx[local[0]] = dy[local[1]]
        self._group.wait(ticket)
        for piece in self.transfer.sends:
            dx[piece.slices] += self.source_side[piece.start : piece.stop].reshape(piece.shape)


def _counts(pieces: Sequence[Piece], ranks: int) -> list[int]:
    counts = [0] * ranks
    for piece in pieces:
        counts[piece.peer] = piece.stop - piece.start
    return counts


def _pack(array: np.ndarray, pieces: Sequence[Piece], flat: np.ndarray) -> None:
    for piece in pieces:
        flat[piece.start : piece.stop].reshape(piece.shape)[...] = array[piece.slices]


def _unpack(flat: np.ndarray, pieces: Sequence[Piece], array: np.ndarray) -> None:
    for piece in pieces:
        array[piece.slices] = flat[piece.start : piece.stop].reshape(piece.shape)
