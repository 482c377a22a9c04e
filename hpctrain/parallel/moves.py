"""Moves of tensors between layouts inside a split group: the group, the pieces as data, their runner, and the operators.

Halos, gathers, scatters and redistributions are all the same primitive, an all-to-all of box intersections (`Transfer`). The
adjoint of a move sends the gradients of each element back to its owner, which adds its own gradient first, then those of other
ranks in rank order.

Partitioning inserts moves and sums of partial tensors into a graph. Their operators compute with the arithmetic service on plain
memory, on the host or on a device. The adjoint of a sum sends copies of the gradient. Between a start and its end the host waits
for other ranks, so programs with these operators are not captured as graphs of a device.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hpctrain.backend.arithmetic import Arithmetic, Array
from hpctrain.backend.host_arithmetic import HostArithmetic
from hpctrain.backend.operators import (
    Accumulating,
    AnyArrays,
    Buffers,
    CallsHost,
    DeferredStart,
    Operator,
    RecomputedOutput,
    StepContext,
)
from hpctrain.backend.rounded import BFLOAT16
from hpctrain.backend.specs import Shape, TensorSpec, item_bytes
from hpctrain.comm.base import Communicator, SingleCommunicator
from hpctrain.comm.progress import ProgressEngine, Ticket
from hpctrain.comm.transports import StagedCommunicator
from hpctrain.core.intervals import Box, intersect, shape_of, size_of, whole, within
from hpctrain.parallel.layout import Layout, LayoutKind


class SplitGroup:
    """The Pr ranks that share samples and split layers, with a communicator for their exchanges only.

    Exchanges run one after another, so they share one buffer: its content is valid until the next exchange starts. On a device
    the buffer has one mirror on the host, which the exchanges also share.

    Args:
        comm: communicator reserved for these exchanges.
        arithmetic: arithmetic of the exchanged arrays; default: the host's.

    Attributes:
        rank: rank r in the group.
        size: number of ranks Pr.
        waited_seconds: total time spent waiting for exchanges (exposed communication).
    """

    def __init__(self, comm: Communicator, progress: ProgressEngine, arithmetic: Arithmetic | None = None) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._arithmetic = HostArithmetic() if arithmetic is None else arithmetic
        self._mirrors = self._arithmetic.mirrors()
        self._comm = comm if self._mirrors is None else StagedCommunicator(comm, self._mirrors)
        self._progress = progress
        self._queue = progress.queue(self._comm)
        self._buffer = self.memory(0)
        self.waited_seconds = 0.0

    def memory(self, size_bytes: int) -> Array:
        """Return memory for the messages of one operator, uint8 zeros."""
        return self._arithmetic.zeros(size_bytes, "uint8")

    def reserve(self, size_bytes: int) -> Array:
        """Return the first `size_bytes` bytes of the shared buffer, uint8.

        Call it for each exchange, because the buffer is replaced when it grows.
        """
        if self._buffer.size < size_bytes:
            old, self._buffer = self._buffer, self.memory(size_bytes)
            if self._mirrors is not None:
                self._mirrors.cover(self._buffer, instead_of=old if old.size else None)
        return self._buffer[:size_bytes]

    @property
    def buffer_bytes(self) -> int:
        """Size of the shared buffer in bytes."""
        return int(self._buffer.size)

    def alltoall(self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int], purpose: str) -> Ticket:
        """Start to send piece r of `send` to rank r and to receive piece r of `recv` from it; return the ticket. Collective.

        The counts are those of elements, by rank. The bits of bfloat16 are sent as uint16, since MPI has no such type.
        """
        if self._arithmetic.on_host and send.dtype == BFLOAT16:
            send, recv = send.view("uint16"), recv.view("uint16")
        return self._queue.post(lambda: self._comm.ialltoall(send, recv, send_counts, recv_counts), purpose)

    def wait(self, ticket: Ticket) -> None:
        """Wait until the exchange is complete."""
        begin = self._progress.waited_seconds
        self._progress.wait(ticket)
        self.waited_seconds += self._progress.waited_seconds - begin


def unused_group() -> SplitGroup:
    """Return a group for graphs that are planned but never run."""
    return SplitGroup(SingleCommunicator("split"), ProgressEngine(rank=0, deadline_seconds=1.0, abort=lambda code: None))


@dataclass(frozen=True)
class Piece:
    """Elements that are sent to or received from one rank.

    Attributes:
        peer: the other rank.
        box: box of the elements in the local array.
        shape: shape of the box.
        start, stop: place in the message buffer, in elements.
    """

    peer: int
    box: Box
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Transfer:
    """One rank's share of a move from `source` to `target`.

    Attributes:
        sends: pieces of the local source.
        receives: pieces of the local target.
        local: boxes, in source and target, of the elements that stay on this rank; None if there are none.
        gaps: whether some elements of the local target have no owner; they are zero.
        spare: whether some elements of the local source are not in the local target.
    """

    sends: tuple[Piece, ...]
    receives: tuple[Piece, ...]
    local: tuple[Box, Box] | None
    gaps: bool
    spare: bool

    @property
    def send_size(self) -> int:
        """Number of elements sent to other ranks."""
        return self.sends[-1].stop if self.sends else 0

    @property
    def receive_size(self) -> int:
        """Number of elements received from other ranks."""
        return self.receives[-1].stop if self.receives else 0

    def buffer_bytes(self, item_bytes: int) -> int:
        """Return the size of both message buffers in bytes."""
        return (self.send_size + self.receive_size) * item_bytes


@functools.lru_cache(maxsize=32)  # a move's operator, costs and adjoint use the same transfer in succession
def transfer(source: Layout, target: Layout, rank: int) -> Transfer:
    """Return the pieces that rank `rank` sends, receives and copies. `source` is a partition."""
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
    common_size = 0 if common is None else size_of(common)
    received = sum(piece.stop - piece.start for piece in receives)
    return Transfer(tuple(sends), tuple(receives), local, common_size + received < size_of(wanted), common_size < size_of(owned))


def _append(pieces: list[Piece], peer: int, box: Box | None, origin: Box) -> None:
    if box is None:
        return
    start = pieces[-1].stop if pieces else 0
    pieces.append(Piece(peer, within(box, origin), shape_of(box), start, start + size_of(box)))


def moved(source: Layout, target: Layout) -> tuple[int, ...]:
    """Return the number of elements that each rank sends in a move.

    The time is linear in the number of ranks and in the number of pairs of ranks that share elements.
    """
    if target.is_partition:  # every element has one reader, so a rank sends all elements except those that it keeps
        return tuple(size_of(owned) - staying for owned, staying in zip(source.boxes, _staying(source, target), strict=True))
    box = target.boxes[0]
    if all(other == box for other in target.boxes):  # a gather: each owned element is sent to all other ranks
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
    """Return the number of elements that each rank sends in the adjoint of a move. In the move, it received the same number."""
    tensor = whole(source.shape)  # elements beyond the tensor have no owner
    return tuple(
        _common_size(wanted, tensor) - staying for wanted, staying in zip(target.boxes, _staying(source, target), strict=True)
    )


def _staying(source: Layout, target: Layout) -> list[int]:
    """Return the number of elements that each rank has in both layouts. `source` is a partition."""
    assert source.is_partition
    return [_common_size(owned, wanted) for owned, wanted in zip(source.boxes, target.boxes, strict=True)]


def _common_size(a: Box, b: Box) -> int:
    box = intersect(a, b)
    return 0 if box is None else size_of(box)


class _Owners:
    """Index of a partition, split along `_DIMS[kind]` in rank order, that finds the ranks that may own elements of a box."""

    _DIMS: ClassVar[Mapping[LayoutKind, int]] = {LayoutKind.SAMPLES: 0, LayoutKind.TILES: 1, LayoutKind.CHANNELS: -1}

    def __init__(self, partition: Layout) -> None:
        self._dim = self._DIMS[partition.kind]
        self._starts = [box[self._dim][0] for box in partition.boxes]
        self._stops = [box[self._dim][1] for box in partition.boxes]

    def __call__(self, box: Box) -> range:
        start, stop = box[self._dim]
        return range(bisect_right(self._stops, start), bisect_left(self._starts, stop))


class TransferRunner:
    """Runner of one rank's transfer, forward or as its adjoint. Collective over the split group; one at a time per group.

    Args:
        transfer: this rank's share of the move.
        arithmetic, dtype: arithmetic and dtype of both tensors.
        purpose: name in messages and traces.
    """

    def __init__(self, transfer: Transfer, group: SplitGroup, arithmetic: Arithmetic, dtype: str, purpose: str) -> None:
        self.transfer, self._group, self._arithmetic, self._purpose = transfer, group, arithmetic, purpose
        self._dtype, self._bytes = dtype, transfer.buffer_bytes(item_bytes(dtype))
        self.source_side, self.target_side = self._sides()
        self._source_counts = _counts(transfer.sends, group.size)
        self._target_counts = _counts(transfer.receives, group.size)

    def _sides(self) -> tuple[Array, Array]:
        """Return the message buffers of the source side and of the target side.

        The group's shared buffer grows only while operators are made, never during an exchange.
        """
        memory = self._group.reserve(self._bytes).view(self._dtype)
        return memory[: self.transfer.send_size], memory[self.transfer.send_size :]

    def start(self, x: Array) -> Ticket:
        """Start sending this rank's pieces of the source x; return the ticket for `finish`."""
        self.source_side, self.target_side = self._sides()
        self._pack(x, self.transfer.sends, self.source_side)
        return self._group.alltoall(self.source_side, self.target_side, self._source_counts, self._target_counts, self._purpose)

    def finish(self, ticket: Ticket, x: Array, y: Array, saved: Array | None = None) -> None:
        """Fill the target y. Copying the local elements overlaps with the wait.

        Args:
            ticket: result of `start`.
            x, y: source and target.
            saved: receives a copy of the elements from other ranks; None: no copy.
        """
        self._copy_local(x, y)
        self._group.wait(ticket)
        self._unpack(self.target_side, self.transfer.receives, y)
        if saved is not None:
            self._arithmetic.copy(saved, self.target_side)

    def recompute(self, x: Array, y: Array, saved: Array | None) -> None:
        """Fill y again from x and the elements that `finish` saved (None if it received none). Not collective."""
        self._copy_local(x, y)
        if saved is not None:
            self._unpack(saved, self.transfer.receives, y)

    def _copy_local(self, x: Array, y: Array) -> None:
        if self.transfer.gaps:
            self._arithmetic.fill(y, 0.0)
        if self.transfer.local is not None:
            here, there = self.transfer.local
            self._arithmetic.copy_box(y, there, x, here)

    def start_adjoint(self, dy: Array) -> Ticket:
        """Start sending the gradients dy of received elements back to their owners; return the ticket for `finish_adjoint`."""
        self.source_side, self.target_side = self._sides()
        self._pack(dy, self.transfer.receives, self.target_side)
        return self._group.alltoall(
            self.target_side, self.source_side, self._target_counts, self._source_counts, f"gradient of {self._purpose}"
        )

    def finish_adjoint(self, ticket: Ticket, dy: Array, dx: Array, *, accumulate: bool) -> None:
        """Write the gradient of the source to dx, or add it: first this rank's term, then those of other ranks in rank order."""
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


# A move whose target is mostly this rank's source (a tile with its halo) keeps only the received elements for backward, and
# recomputes the target from them and the source. If more than this share is received, this saves too little memory.
_RECOMPUTE_SHARE = 0.5


class _CopiesOnly:
    """Base of specs that move and copy elements. They have no floating-point operations."""

    any_arrays: ClassVar[bool] = True

    def flops(self, *inputs: Any, **none: Any) -> int:
        return 0


@dataclass(frozen=True)
class RedistributeSpec(_CopiesOnly):
    """A move of this rank's tensor from the layout `source` to the layout `target`. Collective over the split group.

    Attributes:
        rank: rank in the split group.
        purpose: name in messages and traces.
    """

    source: Layout
    target: Layout
    rank: int
    purpose: str
    group: SplitGroup = field(compare=False, repr=False)

    def output(self, *inputs: Any, **none: Any) -> TensorSpec:
        (x,) = inputs
        assert x.shape == shape_of(self.source.boxes[self.rank]), (x.shape, self.source.boxes[self.rank])
        return TensorSpec(shape_of(self.target.boxes[self.rank]), x.dtype)

    def operator(self, inputs: tuple[TensorSpec, ...], *, training: bool) -> Operator:
        return RedistributeOperator(self, inputs[0], training=training)


class RedistributeOperator(AnyArrays, CallsHost, Accumulating, DeferredStart, RecomputedOutput, Operator):
    """Operator of a move. Forward packs, sends, copies the local elements meanwhile, and unpacks; backward is the adjoint.

    `begin_backward` sends gradients early, while the reader's weight gradients are computed. If the target is little more than
    the source (a halo), it is recomputed in backward instead of being kept.

    Attributes:
        share: pieces that this rank sends, receives and copies.
        message_bytes: size of its message buffers in bytes.
    """

    def __init__(self, spec: RedistributeSpec, x: TensorSpec, *, training: bool) -> None:
        self.spec: RedistributeSpec = spec
        self.inputs, self.output = (x,), spec.output(x)
        self.share = transfer(spec.source, spec.target, spec.rank)
        self.message_bytes = self.share.buffer_bytes(x.item_bytes)
        received = self.share.receive_size
        self.recomputes_output = training and received <= _RECOMPUTE_SHARE * x.size
        self.saved_bytes = received * x.item_bytes if self.recomputes_output else 0
        self._returned: Ticket | None = None

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        dtype = self.inputs[0].dtype
        self._runner = TransferRunner(self.share, self.spec.group, self.arithmetic, dtype, self.spec.purpose)
        self._saved = None if buffers.saved is None else buffers.saved.view(dtype)

    def forward(self, context: StepContext) -> None:
        x = self.buffers.inputs[0]
        self._runner.finish(self._runner.start(x), x, self.buffers.output, self._saved)

    def recompute_output(self) -> None:
        self._runner.recompute(self.buffers.inputs[0], self.buffers.output, self._saved)

    def begin_backward(self) -> None:
        dy = self.buffers.output_grad
        assert dy is not None
        self._returned = self._runner.start_adjoint(dy)

    def backward_input(self) -> None:
        if self._returned is None:
            self.begin_backward()
        ticket, self._returned = self._returned, None
        assert ticket is not None
        dy, dx = self.buffers.output_grad, self.buffers.input_grads[0]
        assert dy is not None
        assert dx is not None
        self._runner.finish_adjoint(ticket, dy, dx, accumulate=self.buffers.accumulate[0])


@dataclass(frozen=True)
class ReduceScatterSpec(_CopiesOnly):
    """A sum: every rank holds a summand of all elements, and rank r receives the sum of its box of the partition `target`.

    It is the adjoint of a move from `target` to `everything`, the layout of the summands. Collective over the split group.
    """

    target: Layout
    everything: Layout
    rank: int
    purpose: str
    group: SplitGroup = field(compare=False, repr=False)

    def output(self, *inputs: Any, **none: Any) -> TensorSpec:
        (x,) = inputs
        assert x.shape == self.target.shape, (x.shape, self.target.shape)
        return TensorSpec(shape_of(self.target.boxes[self.rank]), x.dtype)

    def operator(self, inputs: tuple[TensorSpec, ...], *, training: bool) -> Operator:
        return ReduceScatterOperator(self, inputs[0])


class ReduceScatterOperator(AnyArrays, CallsHost, Operator):
    """Operator of a sum. Forward sends each summand to its owner, which adds it; backward gathers the gradient.

    Attributes:
        share: this rank's share of the move that is the adjoint of the sum.
        message_bytes: size of its message buffers in bytes.
    """

    def __init__(self, spec: ReduceScatterSpec, x: TensorSpec) -> None:
        self.spec: ReduceScatterSpec = spec
        self.inputs, self.output = (x,), spec.output(x)
        self.share = transfer(spec.target, spec.everything, spec.rank)
        self.message_bytes = self.share.buffer_bytes(x.item_bytes)

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        self._runner = TransferRunner(self.share, self.spec.group, self.arithmetic, self.inputs[0].dtype, self.spec.purpose)

    def forward(self, context: StepContext) -> None:
        x = self.buffers.inputs[0]
        self._runner.finish_adjoint(self._runner.start_adjoint(x), x, self.buffers.output, accumulate=False)

    def backward_input(self) -> None:
        dy, dx = self.buffers.output_grad, self.buffers.input_grads[0]
        assert dy is not None
        assert dx is not None
        self._runner.finish(self._runner.start(dy), dy, dx)


@dataclass(frozen=True)
class PartialMeanSpec:
    """Partial mean: y (N, 1, 1, C) is the sum of this rank's tile x (N, h, w, C), divided by `elements`.

    `elements` is the number of pixels of the whole image.
    """

    elements: int
    any_arrays: ClassVar[bool] = True

    def output(self, *inputs: Any, **none: Any) -> TensorSpec:
        (x,) = inputs
        return TensorSpec((x.shape[0], 1, 1, x.shape[3]), x.dtype)

    def flops(self, *inputs: Any, **none: Any) -> int:
        shape: Shape = inputs[0].shape
        return shape[0] * shape[1] * shape[2] * shape[3]

    def operator(self, inputs: tuple[TensorSpec, ...], *, training: bool) -> Operator:
        return PartialMeanOperator(self, inputs[0])


class PartialMeanOperator(AnyArrays, Operator):
    """Operator of the partial mean, which is zero for an empty tile."""

    def __init__(self, spec: PartialMeanSpec, x: TensorSpec) -> None:
        self.inputs, self.output = (x,), spec.output(x)
        self.spec = spec
        self._scale = 1.0 / max(1, spec.elements)

    def forward(self, context: StepContext) -> None:
        self.arithmetic.sum_pixels(self.buffers.output, self.buffers.inputs[0], self._scale)

    def backward_input(self) -> None:
        dy, dx = self.buffers.output_grad, self.buffers.input_grads[0]
        assert dy is not None
        assert dx is not None
        self.arithmetic.spread_pixels(dx, dy, self._scale)


@dataclass(frozen=True)
class NothingSpec(_CopiesOnly):
    """The operation `spec` on a rank that holds none of its channels. Its output of `shape` is empty; input gradients are 0."""

    spec: Any
    shape: Shape

    def output(self, *inputs: Any, **none: Any) -> TensorSpec:
        return TensorSpec(self.shape, inputs[0].dtype)

    def operator(self, inputs: tuple[TensorSpec, ...], *, training: bool) -> Operator:
        return NothingOperator(self, inputs)


class NothingOperator(AnyArrays, Operator):
    """Operator of `NothingSpec`. Its output and parameters are empty; the backward pass sets the gradients of its inputs to 0."""

    def __init__(self, spec: NothingSpec, inputs: tuple[TensorSpec, ...]) -> None:
        self.inputs, self.output = inputs, spec.output(*inputs)
        self.spec = spec
        self.needs_inputs = (False,) * len(inputs)

    def forward(self, context: StepContext) -> None:
        return None

    def backward_input(self) -> None:
        for dx in self.buffers.input_grads:
            if dx is not None:
                self.arithmetic.fill(dx, 0.0)
