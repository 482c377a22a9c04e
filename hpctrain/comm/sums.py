"""Sums of gradients over ranks that an MPI's own reductions do not make: in 16 bits, in a fixed order, or by kernels.

All three send each part to the rank that owns it, which adds up what it receives: a reduce-scatter becomes an all-to-all of
parts and a local sum, an allreduce that and an allgather of the sums. The bytes are those of a ring.

- `SixteenBitSums`: parts are rounded to 16 bits and added up in full precision, in rank order from 0 on, in the dtype of the
  buffer: half of the bytes of float32, and no sum of 16-bit numbers, which few MPIs have and which would round after every
  addition. A rank's own part is rounded as those of others are, so a sum is the same whichever rank owns it, and does not
  depend on how a buffer is cut. (With one scale for each message, float16 rounds very small numbers next to much larger ones of
  their part more coarsely.) `Compressor` is the interface of what turns arrays into messages.
- `TreeSums`: the order of additions is that of a tree over shards (`summation_tree`), which the number of ranks does not
  change. A rank with several terms sends all of them: another order of additions would be needed to send one.
- `PartSums`: parts travel as they are and kernels of a device add them up, for transports that move arrays of a device and do
  not sum them. Parts are added in rank order, from 0 on, so the bits do not depend on what arrives first, and all ranks have
  the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.comm.base import Array, Communicator, GradientSums, Handle, piece
from hpctrain.comm.groups import SumsInLevels, TwoLevel
from hpctrain.comm.order import Finished, InOrder, SpareBuffers
from hpctrain.core.intervals import ShardsOfRank, even


class Compressor(ABC):
    """An interface that turns arrays of one size and dtype into messages and back.

    An array that holds something that is not finite has a message that does too, so that its receivers learn of it.

    Args:
        size: elements of an array. dtype: "float32" or "float64".

    Attributes:
        message_size: uint8 elements of a message, the same for every array, so that receivers know it.
    """

    message_size: int

    def __init__(self, size: int, dtype: str) -> None:
        self.size = size
        self.dtype = np.dtype(dtype)

    def begin_step(self, step: int) -> None:  # noqa: B027  most choose nothing by chance
        """Let all that is chosen by chance in the next messages follow from `step`, so that a resumed run repeats them."""

    @abstractmethod
    def compress(self, values: np.ndarray, message: np.ndarray) -> None:
        """Write the message of `values`, which stay as they are, into `message` (message_size,) uint8."""

    @abstractmethod
    def decompress(self, message: np.ndarray, values: np.ndarray) -> None:
        """Write all of `values`: those in the message, zeros elsewhere."""

    @abstractmethod
    def add_to(self, message: np.ndarray, values: np.ndarray) -> None:
        """Add the values of the message to `values`, element by element."""

    @abstractmethod
    def subtract_from(self, message: np.ndarray, values: np.ndarray) -> None:
        """Subtract from `values` what the message made of them contains: exactly, the rest plus the message is `values`."""


#: how numbers travel; "float32": as they are computed, whatever their dtype
Wire = Literal["float32", "bfloat16", "float16"]
_BYTES = np.empty(0, np.uint8)
#: (elements, dtype) -> the compressor of such arrays
Caster = Callable[[int, str], Compressor]


def sums_over(comm: Communicator, caster: Caster | None, *, allreduces: bool) -> GradientSums:
    """Return the sums of gradients over `comm`: in 16 bits, in two levels across nodes only. Collective; set-up.

    Args:
        caster: rounds what travels; None: nothing is rounded. allreduces: allreduces are needed, too.
    """
    if caster is None or comm.size == 1:
        return comm
    if not isinstance(comm, TwoLevel):
        return _flat_sums(comm, caster) if allreduces else SixteenBitSums(comm, caster)
    in_levels = comm.with_sums_across(lambda across: SixteenBitSums(across, caster))
    return SumsInLevels(in_levels, lambda across: _flat_sums(across, caster)) if allreduces else in_levels


def _flat_sums(comm: Communicator, caster: Caster) -> SixteenBitSums:
    """Return sums over `comm` that have allreduces. Collective; set-up."""
    return SixteenBitSums(comm, caster, comm.split(0, comm.rank, f"{comm.name} sums"))


@dataclass(frozen=True)
class MessageParts:
    """The messages of a buffer's parts, one after the other.

    Attributes:
        casts: by rank. elements: [start, stop) of each part. bytes: [start, stop) of its message; none for an empty part.
    """

    casts: tuple[Compressor, ...]
    elements: tuple[tuple[int, int], ...]
    bytes: tuple[tuple[int, int], ...]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each message."""
        return [stop - start for start, stop in self.bytes]

    @property
    def total_bytes(self) -> int:
        return self.bytes[-1][1]

    def write(self, part: int, values: np.ndarray, messages: np.ndarray) -> None:
        """Round one part of `values` into its place in `messages`."""
        (start, stop), (begin, end) = self.elements[part], self.bytes[part]
        if stop > start:
            self.casts[part].compress(values[start:stop], messages[begin:end])

    def read(self, part: int, messages: np.ndarray, values: np.ndarray) -> None:
        """Write one part of `values` from its message."""
        (start, stop), (begin, end) = self.elements[part], self.bytes[part]
        if stop > start:
            self.casts[part].decompress(messages[begin:end], values[start:stop])


class MessageBuffers:
    """Parts and buffers of messages, made once for each size and used step after step."""

    def __init__(self, caster: Caster) -> None:
        self._caster = caster
        self._casts: dict[tuple[int, str], Compressor] = {}
        self._parts: dict[tuple[tuple[int, ...], str], MessageParts] = {}
        self._spare = SpareBuffers()

    def parts(self, counts: Sequence[int], dtype: np.dtype) -> MessageParts:
        """Return the messages of a buffer of `dtype` whose parts have `counts` elements."""
        key = tuple(counts), dtype.name
        if key not in self._parts:
            casts = tuple(self._cast(count, dtype.name) for count in counts)
            sizes = [cast.message_size if count else 0 for cast, count in zip(casts, counts, strict=True)]
            elements, places = (tuple(pairwise(accumulate(lengths, initial=0))) for lengths in (counts, sizes))
            self._parts[key] = MessageParts(casts, elements, places)
        return self._parts[key]

    def _cast(self, count: int, dtype: str) -> Compressor:
        if (count, dtype) not in self._casts:
            self._casts[count, dtype] = self._caster(count, dtype)
        return self._casts[count, dtype]

    def take(self, size: int) -> np.ndarray:
        """Return a uint8 buffer, the caller's until it is given back."""
        taken: np.ndarray = self._spare.take(size, _BYTES)
        return taken

    def give_back(self, *buffers: np.ndarray) -> None:
        """Let the next ones have these buffers."""
        self._spare.give_back(*buffers)


class SixteenBitSums:
    """Sums of 1-D arrays of float32 or float64 over the ranks of a communicator, in 16-bit messages.

    Args:
        comm: carries the parts; other operations may be posted on it in between. caster: rounds what travels.
        gathers: the same ranks in the same order, for the second stage of allreduces alone; None: there are none.
    """

    def __init__(self, comm: Communicator, caster: Caster, gathers: Communicator | None = None) -> None:
        self._comm, self._gathers = comm, gathers
        self._buffers = MessageBuffers(caster)
        self._allreduces = InOrder()

    def ireduce_scatter(self, send: np.ndarray, recv: np.ndarray, counts: Sequence[int]) -> Handle:
        """Sum as a communicator does, but `send` may be used again on return."""
        parts = self._buffers.parts(counts, send.dtype)
        messages, received = self._buffers.take(parts.total_bytes), self._received(parts)
        handle = self._send_parts(parts, send, messages, received)

        def finish() -> None:
            self._add(parts, received, recv)
            self._buffers.give_back(messages, received)

        return Finished(handle, finish)

    def iallreduce(self, buffer: np.ndarray) -> Handle:
        """Sum as a communicator does; each sum is rounded once more, by its owner, so every rank gets the same bits."""
        gathers, rank = self._gathers, self._comm.rank
        assert gathers is not None, "these sums were made for reduce-scatters only"
        parts = self._buffers.parts(even(buffer.size, self._comm.size), buffer.dtype)
        messages, received = self._buffers.take(parts.total_bytes), self._received(parts)
        handle = self._send_parts(parts, buffer, messages, received)

        def gather() -> Handle:
            start, stop = parts.elements[rank]
            self._add(parts, received, buffer[start:stop])
            self._buffers.give_back(received)
            parts.write(rank, buffer, messages)
            return gathers.iallgather(None, messages, parts.sizes)

        def finish() -> None:
            for part in range(len(parts.casts)):
                parts.read(part, messages, buffer)
            self._buffers.give_back(messages)

        return self._allreduces.second_stage(handle, gather, finish)

    def _received(self, parts: MessageParts) -> np.ndarray:
        """Return a buffer for this rank's part from everyone."""
        return self._buffers.take(parts.sizes[self._comm.rank] * self._comm.size)

    def _send_parts(self, parts: MessageParts, values: np.ndarray, messages: np.ndarray, received: np.ndarray) -> Handle:
        for part in range(len(parts.casts)):
            parts.write(part, values, messages)
        sizes = parts.sizes
        return self._comm.ialltoall(messages, received, sizes, [sizes[self._comm.rank]] * self._comm.size)

    def _add(self, parts: MessageParts, received: np.ndarray, total: np.ndarray) -> None:
        """Sum the parts of all ranks, in rank order, into `total`."""
        if not total.size:
            return
        cast, size = parts.casts[self._comm.rank], parts.sizes[self._comm.rank]
        cast.decompress(received[:size], total)
        with np.errstate(all="ignore"):  # a transport does not warn of overflow
            for begin in range(size, received.size, size):
                cast.add_to(received[begin : begin + size], total)


#: this rank's terms of a sum, in order: one array, or a tuple of arrays of one size
Terms = np.ndarray | tuple[np.ndarray, ...]


class TreeSums:
    """Sums of 1-D arrays of float32 or float64 over the ranks of a communicator, in the order of a tree.

    Args:
        comm: carries the parts; other operations may be posted on it in between. shards: those of its ranks.
        gathers: the same ranks in the same order, for the second stage of allreduces alone; None: there are none.
    """

    def __init__(self, comm: Communicator, shards: ShardsOfRank, gathers: Communicator | None = None) -> None:
        assert (comm.rank, comm.size) == (shards.rank, shards.ranks)
        self._comm, self._gathers = comm, gathers
        self._terms_of = shards.sums_of_ranks
        self._additions = shards.additions_of_ranks
        self._spare = SpareBuffers()
        self._allreduces = InOrder()

    def ireduce_scatter(self, send: Terms, recv: np.ndarray, counts: Sequence[int]) -> Handle:
        """Sum as a communicator does; `send` has this rank's terms. Several terms may be used again on return."""
        message, received = self._message(send, counts), self._received(counts, recv)
        handle = self._post(message, received, counts)

        def finish() -> None:
            self._add(received, recv)
            self._give_back(send, message, received)

        return Finished(handle, finish)

    def iallreduce(self, buffer: Terms) -> Handle:
        """Sum as a communicator does; the sum is put into the last of this rank's terms."""
        gathers, rank = self._gathers, self._comm.rank
        assert gathers is not None, "these sums were made for reduce-scatters only"
        target = buffer[-1] if isinstance(buffer, tuple) else buffer
        counts = even(target.size, self._comm.size)
        message, received = self._message(buffer, counts), self._received(counts, target)
        handle = self._post(message, received, counts)
        start = sum(counts[:rank])

        def gather() -> Handle:
            self._add(received, target[start : start + counts[rank]])
            self._give_back(buffer, message, received)
            return gathers.iallgather(None, target, counts)

        return self._allreduces.second_stage(handle, gather)

    def _message(self, terms: Terms, counts: Sequence[int]) -> np.ndarray:
        """Return, for each rank, its part of all terms, one after the other; a single term is not copied."""
        if not isinstance(terms, tuple):
            return terms
        message: np.ndarray = self._spare.take(len(terms) * terms[0].size, terms[0])
        place = 0
        for start, stop in pairwise(accumulate(counts, initial=0)):
            for term in terms:
                message[place : place + stop - start] = term[start:stop]
                place += stop - start
        return message

    def _received(self, counts: Sequence[int], like: np.ndarray) -> np.ndarray:
        """Return a buffer for this rank's part of all ranks' terms."""
        received: np.ndarray = self._spare.take(sum(self._terms_of) * counts[self._comm.rank], like)
        return received

    def _post(self, message: np.ndarray, received: np.ndarray, counts: Sequence[int]) -> Handle:
        own, terms = counts[self._comm.rank], self._terms_of
        sent = [count * terms[self._comm.rank] for count in counts]
        return self._comm.ialltoall(message, received, sent, [own * number for number in terms])

    def _add(self, received: np.ndarray, total: np.ndarray) -> None:
        """Sum the terms of all ranks into `total`; the last addition writes there."""
        if not total.size:
            return
        terms = received.reshape(-1, total.size)
        with np.errstate(all="ignore"):  # a transport does not warn of overflow
            for step in self._additions[:-1]:
                terms[step.left] += terms[step.right]
            last = self._additions[-1]
            np.add(terms[last.left], terms[last.right], out=total)

    def _give_back(self, terms: Terms, message: np.ndarray, received: np.ndarray) -> None:
        self._spare.give_back(received)
        if isinstance(terms, tuple):
            self._spare.give_back(message)


def tree_sums_over(comm: Communicator, shards: ShardsOfRank, *, allreduces: bool) -> TreeSums | None:
    """Return the sums over `comm` in the order of the tree; None if one rank has all shards. Collective; set-up.

    Args:
        allreduces: they are asked for allreduces, too, which need a communicator of their own.
    """
    if comm.size == 1:
        return None
    gathers = comm.split(0, comm.rank, f"{comm.name} sums") if allreduces else None
    return TreeSums(comm, shards, gathers)


class PartSums:
    """Implements `GradientSums` for 1-D arrays of a device.

    A sum on its way has a buffer of the parts that arrive, made when that many are first on their way at once, and kept.

    Args:
        comm: moves arrays of the device; other operations may be posted on it in between. gathers: the same ranks in the same
            order, for the second stage of allreduces alone. arithmetic: of the device.
    """

    def __init__(self, comm: Communicator, gathers: Communicator, arithmetic: Arithmetic) -> None:
        self._comm, self._gathers, self._arithmetic = comm, gathers, arithmetic
        self._allreduces = InOrder()
        self._spare = SpareBuffers(lambda size, like: arithmetic.zeros(size, like.dtype))

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Handle:
        received = self._received(send, counts)
        handle = self._send_parts(send, received, counts)
        return Finished(handle, lambda: self._add(received, recv))

    def iallreduce(self, buffer: Array) -> Handle:
        counts = even(buffer.size, self._comm.size)
        received = self._received(buffer, counts)
        handle = self._send_parts(buffer, received, counts)

        def gather() -> Handle:
            self._add(received, piece(buffer, counts, self._comm.rank))
            return self._gathers.iallgather(None, buffer, counts)

        return self._allreduces.second_stage(handle, gather)

    def _received(self, like: Array, counts: Sequence[int]) -> Array:
        """Return a buffer for this rank's part from everyone."""
        return self._spare.take(counts[self._comm.rank] * self._comm.size, like)

    def _send_parts(self, send: Array, received: Array, counts: Sequence[int]) -> Handle:
        return self._comm.ialltoall(send, received, counts, [counts[self._comm.rank]] * self._comm.size)

    def _add(self, received: Array, total: Array) -> None:
        """Enqueue total := the sum of all ranks' parts, and make the buffer available to later operations, after that."""
        if total.size:
            parts = [received[begin : begin + total.size] for begin in range(0, received.size, total.size)]
            self._arithmetic.copy(total, parts[0])
            for part in parts[1:]:
                self._arithmetic.add(total, part)
        self._spare.give_back(received)
