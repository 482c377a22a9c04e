"""Moving a tensor from one layout to another along the ROW axis: what goes where, as data, and the engine that moves it.

One primitive serves all: halos, gathers, scatters and redistributions are all-to-alls of box intersections. The adjoint of a
move sends every element's gradient back to its owner, where the parts are added in rank order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.boxes import intersect, relative, shape_of, size_of
from hpctrain.comm.progress import Ticket
from hpctrain.parallel.layout import Layout
from hpctrain.parallel.split_group import SplitGroup

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Piece:
    """Elements that go to or come from `peer`: where they lie in the local array, and in the flat message buffer."""

    peer: int
    slices: Slices
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Transfer:
    """One rank's part of a move from `source` to `target`.

    sends: pieces of the local source. receives: pieces of the local target. local: the same elements in both, None where there
    are none. gaps: some element of the local target comes from nobody (it is zero). spare: some element of the local source is
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


def transfer(source: Layout, target: Layout, rank: int) -> Transfer:
    """What rank `rank` sends, receives and copies. `source` is a partition."""
    assert source.is_partition
    assert source.shape == target.shape
    mine, wanted = source.boxes[rank], target.boxes[rank]
    sends: list[Piece] = []
    receives: list[Piece] = []
    for peer in range(len(source.boxes)):
        if peer == rank:
            continue
        _append(sends, peer, intersect(mine, target.boxes[peer]), mine)
        _append(receives, peer, intersect(source.boxes[peer], wanted), wanted)
    common = intersect(mine, wanted)
    local = None if common is None else (relative(common, mine), relative(common, wanted))
    kept = 0 if common is None else size_of(common)
    got = sum(piece.stop - piece.start for piece in receives)
    return Transfer(tuple(sends), tuple(receives), local, kept + got < size_of(wanted), kept < size_of(mine))


def _append(pieces: list[Piece], peer: int, box: tuple[tuple[int, int], ...] | None, origin: tuple[tuple[int, int], ...]) -> None:
    if box is None:
        return
    start = pieces[-1].stop if pieces else 0
    pieces.append(Piece(peer, relative(box, origin), shape_of(box), start, start + size_of(box)))


def moved(source: Layout, target: Layout) -> tuple[int, ...]:
    """Elements that each rank hands to the communicator in one move; its adjoint hands over what the move received."""
    ranks = range(len(source.boxes))
    return tuple(sum(_shared(source, target, rank, peer) for peer in ranks if peer != rank) for rank in ranks)


def moved_back(source: Layout, target: Layout) -> tuple[int, ...]:
    """Elements that each rank hands over in the adjoint: those that the move brought it."""
    ranks = range(len(source.boxes))
    return tuple(sum(_shared(source, target, peer, rank) for peer in ranks if peer != rank) for rank in ranks)


def _shared(source: Layout, target: Layout, owner: int, reader: int) -> int:
    box = intersect(source.boxes[owner], target.boxes[reader])
    return 0 if box is None else size_of(box)


class TransferRunner:
    """Runs one rank's transfer, forward or as its adjoint. Collective over the ROW axis; one at a time per axis.

    Args:
        transfer: this rank's part. axis: the group. dtype: of both tensors. what: for messages and traces.
        own_memory: its messages do not lie in the axis's shared buffer, so others may start before this one ends.
    """

    def __init__(self, transfer: Transfer, axis: SplitGroup, dtype: str, what: str, *, own_memory: bool = False) -> None:
        self.transfer, self._axis, self._what = transfer, axis, what
        sizes = (transfer.send_size, transfer.receive_size)
        size_bytes = sum(sizes) * np.dtype(dtype).itemsize
        memory = (np.zeros(size_bytes, np.uint8) if own_memory else axis.reserve(size_bytes)).view(dtype)
        self.source_side = memory[: sizes[0]]
        self.target_side = memory[sizes[0] : sum(sizes)]
        self._source_counts = _counts(transfer.sends, axis.size)
        self._target_counts = _counts(transfer.receives, axis.size)

    def start(self, x: np.ndarray) -> Ticket:
        """Send this rank's pieces of the source x."""
        _pack(x, self.transfer.sends, self.source_side)
        return self._axis.alltoall(self.source_side, self.target_side, self._source_counts, self._target_counts, self._what)

    def finish(self, ticket: Ticket, x: np.ndarray, y: np.ndarray, kept: np.ndarray | None = None) -> None:
        """Fill the target y; the copy of what is here already hides some of the wait. kept: gets what came from others."""
        self._copy_local(x, y)
        self._axis.wait(ticket)
        _unpack(self.target_side, self.transfer.receives, y)
        if kept is not None:
            kept[...] = self.target_side

    def recompute(self, x: np.ndarray, y: np.ndarray, kept: np.ndarray) -> None:
        """Fill y again from x and what `finish` kept. Not collective."""
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
        return self._axis.alltoall(
            self.target_side, self.source_side, self._target_counts, self._source_counts, f"gradient of {self._what}"
        )

    def finish_adjoint(self, ticket: Ticket, dy: np.ndarray, dx: np.ndarray, *, accumulate: bool) -> None:
        """Write, or add to, the gradient of the source: this rank's own part first, then the others' in rank order."""
        local = self.transfer.local
        if self.transfer.spare and not accumulate:
            dx[...] = 0
        if local is not None:
            if accumulate:
                dx[local[0]] += dy[local[1]]
            else:
                dx[local[0]] = dy[local[1]]
        self._axis.wait(ticket)
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
