"""Sums of gradients over ranks that MPI's reductions do not provide: in 16 bits, in a fixed order, or by device kernels.

All three classes send each part to the rank that owns it, which sums the received parts. A reduce-scatter becomes an all-to-all
of parts and a local sum; an allreduce also has an allgather of the sums. The number of elements that are sent is that of a ring.

- `SixteenBitSums`: parts are rounded to 16 bits and summed in full precision, in rank order from 0 on, in the dtype of the
  buffer. This halves the bytes of float32. MPI need not sum 16-bit numbers, which few MPIs support and which would round after
  every addition. A rank's own part is rounded like all others, so a sum does not depend on which rank owns it, nor on how a
  buffer is cut. `Compressor` is the interface between arrays and messages.
- `TreeSums`: the order of additions is that of a tree over shards (`core/intervals.py`), which is independent of the number of
  ranks. A rank with several terms sends all of them, because summing them first would change the order.
- `PartSums`: parts travel unrounded and device kernels sum them, for transports that move device arrays without summing them.
  Parts are added in rank order from 0 on, so the bits do not depend on the order of arrival and are the same on all ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.comm.base import Array, Communicator, GradientSums, Handle, piece
from hpctrain.comm.groups import SumsInLevels, TwoLevel
from hpctrain.comm.order import Finished, InOrder, SpareBuffers
from hpctrain.core.intervals import ShardsOfRank, even


class Compressor(ABC):
    """Base of compressors, which turn arrays of one size and dtype into messages and back.

    The message of an array with non-finite elements also contains a non-finite element, so that receivers notice.

    Args:
        dtype: "float32" or "float64".

    Attributes:
        message_size: bytes of a message, the same for every array, so that receivers can allocate it.
    """

    message_size: int

    def __init__(self, size: int, dtype: str) -> None:
        self.size = size
        self.dtype = np.dtype(dtype)

    def begin_step(self, step: int) -> None:  # noqa: B027  most make no random choices
        """Set the step from which random choices in the next messages are derived, so that a resumed run repeats them."""

    @abstractmethod
    def compress(self, values: np.ndarray, message: np.ndarray) -> None:
        """Write the message of `values` to `message` (message_size,) uint8. `values` are not modified."""

    @abstractmethod
    def decompress(self, message: np.ndarray, values: np.ndarray) -> None:
        """Write all elements of `values`: those in the message, and zeros elsewhere."""

    @abstractmethod
    def add_to(self, message: np.ndarray, values: np.ndarray) -> None:
        """Add the values of the message to `values`, element by element."""

    @abstractmethod
    def subtract_from(self, message: np.ndarray, values: np.ndarray) -> None:
        """Subtract the elements of `message` from `values`, its source, exactly: new values plus message are the old values."""


#: number format of messages; "float32" stands for the dtype of the array, without rounding
Wire = Literal["float32", "bfloat16"]
_BYTES = np.empty(0, np.uint8)
#: function (elements, dtype) -> compressor
Caster = Callable[[int, str], Compressor]


def sums_over(comm: Communicator, caster: Caster | None, *, allreduces: bool) -> GradientSums:
    """Return sums of gradients over `comm` with compressed messages; `comm` itself without compression or with only one rank.

    With two levels, only messages across nodes are compressed. The call is collective. Make it only at set-up.

    Args:
        caster: factory of message compressors; None: no compression.
        allreduces: whether allreduces are needed, too.
    """
    if caster is None or comm.size == 1:
        return comm
    if not isinstance(comm, TwoLevel):
        return _flat_sums(comm, caster) if allreduces else SixteenBitSums(comm, caster)
    in_levels = comm.with_sums_across(lambda across: SixteenBitSums(across, caster))
    return SumsInLevels(in_levels, lambda across: _flat_sums(across, caster)) if allreduces else in_levels


def _flat_sums(comm: Communicator, caster: Caster) -> SixteenBitSums:
    """Return compressed sums over `comm` without levels, which also support allreduces. Collective; at set-up only."""
    return SixteenBitSums(comm, caster, comm.split(0, comm.rank, f"{comm.name} sums"))


@dataclass(frozen=True)
class MessageParts:
    """Layout of the messages of a buffer's parts, which lie one after another.

    Attributes:
        casts: compressors by rank.
        elements: [start, stop) of each part in the buffer.
        bytes: [start, stop) of each part's message; empty for an empty part.
    """

    casts: tuple[Compressor, ...]
    elements: tuple[tuple[int, int], ...]
    bytes: tuple[tuple[int, int], ...]

    @property
    def sizes(self) -> list[int]:
        """Size of each message in bytes."""
        return [stop - start for start, stop in self.bytes]

    @property
    def total_bytes(self) -> int:
        return self.bytes[-1][1]

    def write(self, part: int, values: np.ndarray, messages: np.ndarray) -> None:
        """Compress one part of `values`, and write its message to its place in `messages`."""
        (start, stop), (begin, end) = self.elements[part], self.bytes[part]
        if stop > start:
            self.casts[part].compress(values[start:stop], messages[begin:end])

    def read(self, part: int, messages: np.ndarray, values: np.ndarray) -> None:
        """Decompress one part's message to the part's place in `values`."""
        (start, stop), (begin, end) = self.elements[part], self.bytes[part]
        if stop > start:
            self.casts[part].decompress(messages[begin:end], values[start:stop])


class MessageBuffers:
    """Layouts and buffers of messages, created once per size and reused in later steps."""

    def __init__(self, caster: Caster) -> None:
        self._cast = cache(caster)
        self._parts: dict[tuple[tuple[int, ...], str], MessageParts] = {}
        self._spare = SpareBuffers()

    def parts(self, counts: Sequence[int], dtype: np.dtype) -> MessageParts:
        """Return the layout of the messages of a buffer of `dtype` whose parts have `counts` elements."""
        key = tuple(counts), dtype.name
        if key not in self._parts:
            casts = tuple(self._cast(count, dtype.name) for count in counts)
            sizes = [cast.message_size if count else 0 for cast, count in zip(casts, counts, strict=True)]
            elements, places = (tuple(pairwise(accumulate(lengths, initial=0))) for lengths in (counts, sizes))
            self._parts[key] = MessageParts(casts, elements, places)
        return self._parts[key]

    def take(self, size: int) -> np.ndarray:
        """Return a uint8 buffer of `size` bytes. The caller owns it until `give_back`."""
        taken: np.ndarray = self._spare.take(size, _BYTES)
        return taken

    def give_back(self, *buffers: np.ndarray) -> None:
        """Return buffers to the pool."""
        self._spare.give_back(*buffers)


#: this rank's terms of a sum, in order: one array, or a tuple of arrays of one size
Terms = Array | tuple[Array, ...]


class OwnerSums(ABC):
    """Base of `GradientSums` for 1-D arrays in which each part of a sum travels to its owner, which sums the received parts.

    Args:
        comm: communicator of the parts; callers may post other operations on it, too.
        gathers: communicator of the same ranks in the same order, only for the second stage of allreduces; None: no allreduces.
    """

    def __init__(self, comm: Communicator, gathers: Communicator | None) -> None:
        self.comm, self._gathers = comm, gathers
        self._allreduces = InOrder()

    @abstractmethod
    def send_parts(self, send: Terms, counts: Sequence[int], like: Array) -> tuple[Handle, Callable[[Array], None]]:
        """Post the exchange that sends each rank its part of `send`.

        Args:
            send: this rank's terms.
            counts: elements of each rank's part.
            like: array with the kind and dtype of the sum.

        Returns:
            The operation, and a function that writes the sum of all ranks' parts to this rank's part of the sum. It must be
            called once, after the operation is complete.
        """

    def gather(self, gathers: Communicator, total: Array, counts: Sequence[int]) -> Handle:
        """Post the allgather of a sum. This rank's part must be in place."""
        return gathers.iallgather(None, total, counts)

    def ireduce_scatter(self, send: Terms, recv: Array, counts: Sequence[int]) -> Handle:
        """Send each rank its part of the sum over the ranks. If `send` is a tuple, its arrays may be reused after the call."""
        handle, add_up = self.send_parts(send, counts, recv)
        return Finished(handle, lambda: add_up(recv))

    def iallreduce(self, buffer: Terms) -> Handle:
        """Sum over the ranks into the last of this rank's terms. Every rank receives the same bits."""
        gathers, total = self._gathers, buffer[-1] if isinstance(buffer, tuple) else buffer
        assert gathers is not None, "these sums support reduce-scatters only"
        counts = even(total.size, self.comm.size)
        handle, add_up = self.send_parts(buffer, counts, total)

        def gather() -> Handle:
            add_up(piece(total, counts, self.comm.rank))
            return self.gather(gathers, total, counts)

        return self._allreduces.second_stage(handle, gather)


class SixteenBitSums(OwnerSums):
    """Sums of float32 or float64 over the ranks of a communicator, in 16-bit messages.

    `send` may be reused when `ireduce_scatter` returns. The sums of an allreduce are rounded once more, by their owners.

    Args:
        caster: factory of message compressors.
    """

    def __init__(self, comm: Communicator, caster: Caster, gathers: Communicator | None = None) -> None:
        super().__init__(comm, gathers)
        self._buffers = MessageBuffers(caster)

    def send_parts(self, send: Array, counts: Sequence[int], like: Array) -> tuple[Handle, Callable[[Array], None]]:
        parts, rank = self._buffers.parts(counts, send.dtype), self.comm.rank
        cast, size = parts.casts[rank], parts.sizes[rank]
        messages, received = self._buffers.take(parts.total_bytes), self._buffers.take(size * self.comm.size)
        for part in range(len(parts.casts)):
            parts.write(part, send, messages)

        def add_up(total: np.ndarray) -> None:
            """Sum the parts of all ranks, in rank order."""
            if total.size:
                cast.decompress(received[:size], total)
                with np.errstate(all="ignore"):  # a transport does not warn of overflow
                    for begin in range(size, received.size, size):
                        cast.add_to(received[begin : begin + size], total)
            self._buffers.give_back(messages, received)

        return self.comm.ialltoall(messages, received, parts.sizes, [size] * self.comm.size), add_up

    def gather(self, gathers: Communicator, total: Array, counts: Sequence[int]) -> Handle:
        parts = self._buffers.parts(counts, total.dtype)
        messages = self._buffers.take(parts.total_bytes)
        parts.write(self.comm.rank, total, messages)

        def finish() -> None:
            for part in range(len(parts.casts)):
                parts.read(part, messages, total)
            self._buffers.give_back(messages)

        return Finished(gathers.iallgather(None, messages, parts.sizes), finish)


class TreeSums(OwnerSums):
    """Sums of float32 or float64 over the ranks of a communicator, in the order of a tree over shards.

    Args:
        shards: shards of the ranks of `comm`.
    """

    def __init__(self, comm: Communicator, shards: ShardsOfRank, gathers: Communicator | None = None) -> None:
        assert (comm.rank, comm.size) == (shards.rank, shards.ranks)
        super().__init__(comm, gathers)
        self._terms_of = shards.sums_of_ranks
        self._additions = shards.additions_of_ranks
        self._spare = SpareBuffers()

    def send_parts(self, send: Terms, counts: Sequence[int], like: Array) -> tuple[Handle, Callable[[Array], None]]:
        rank, terms_of = self.comm.rank, self._terms_of
        message, owned = self._message(send, counts), counts[rank]
        received = self._spare.take(sum(terms_of) * owned, like)

        def add_up(total: np.ndarray) -> None:
            """Sum the terms of all ranks. The last addition writes to `total`."""
            if total.size:
                terms = received.reshape(-1, total.size)
                with np.errstate(all="ignore"):  # a transport does not warn of overflow
                    for step in self._additions[:-1]:
                        terms[step.left] += terms[step.right]
                    last = self._additions[-1]
                    np.add(terms[last.left], terms[last.right], out=total)
            self._spare.give_back(received, *((message,) if isinstance(send, tuple) else ()))

        sent = [count * terms_of[rank] for count in counts]
        return self.comm.ialltoall(message, received, sent, [owned * number for number in terms_of]), add_up

    def _message(self, terms: Terms, counts: Sequence[int]) -> Array:
        """Return each rank's part of all terms, ordered by rank. A single term is not copied."""
        if not isinstance(terms, tuple):
            return terms
        message = self._spare.take(len(terms) * terms[0].size, terms[0])
        place = 0
        for start, stop in pairwise(accumulate(counts, initial=0)):
            for term in terms:
                message[place : place + stop - start] = term[start:stop]
                place += stop - start
        return message


def tree_sums_over(comm: Communicator, shards: ShardsOfRank, *, allreduces: bool) -> TreeSums | None:
    """Return the sums over `comm` in the order of the tree; None if one rank has all shards. Collective; at set-up.

    Args:
        allreduces: whether allreduces are needed, too, which require a separate communicator.
    """
    if comm.size == 1:
        return None
    gathers = comm.split(0, comm.rank, f"{comm.name} sums") if allreduces else None
    return TreeSums(comm, shards, gathers)


class PartSums(OwnerSums):
    """Sums of device arrays, computed by kernels.

    Each sum in flight has a buffer for received parts, from a pool that grows as needed.

    Args:
        comm: communicator that moves device arrays.
    """

    def __init__(self, comm: Communicator, gathers: Communicator, arithmetic: Arithmetic) -> None:
        super().__init__(comm, gathers)
        self._arithmetic = arithmetic
        self._spare = SpareBuffers(lambda size, like: arithmetic.zeros(size, like.dtype))

    def send_parts(self, send: Array, counts: Sequence[int], like: Array) -> tuple[Handle, Callable[[Array], None]]:
        owned, ranks = counts[self.comm.rank], self.comm.size
        received = self._spare.take(owned * ranks, send)

        def add_up(total: Array) -> None:
            """Enqueue the sum of all ranks' parts. Operations that are enqueued later may reuse the buffer."""
            if total.size:
                self._arithmetic.copy(total, received[:owned])
                for rank in range(1, ranks):
                    self._arithmetic.add(total, received[rank * owned : (rank + 1) * owned])
            self._spare.give_back(received)

        return self.comm.ialltoall(send, received, counts, [owned] * ranks), add_up
