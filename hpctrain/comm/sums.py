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


#: this rank's terms of a sum, in order: one array, or a tuple of arrays of one size
Terms = Array | tuple[Array, ...]


class OwnerSums(ABC):
    """Implements `GradientSums` for 1-D arrays: each part of a sum travels to its owner, which adds up what it receives.

    Args:
        comm: carries the parts; other operations may be posted on it in between.
        gathers: the same ranks in the same order, for the second stage of allreduces alone; None: there are none.
    """

    def __init__(self, comm: Communicator, gathers: Communicator | None) -> None:
        self.comm, self._gathers = comm, gathers
        self._allreduces = InOrder()

    @abstractmethod
    def send_parts(self, send: Terms, counts: Sequence[int], like: Array) -> tuple[Handle, Callable[[Array], None]]:
        """Send each rank its part of `send`, of `counts` elements.

        Args:
            like: an array of the kind and dtype of the sum.

        Returns:
            The operation, and a function that adds all ranks' parts up into this rank's part of the sum, once it is complete.
        """

    def gather(self, gathers: Communicator, total: Array, counts: Sequence[int]) -> Handle:
        """Post the allgather of a sum, of which this rank's part is in place."""
        return gathers.iallgather(None, total, counts)

    def ireduce_scatter(self, send: Terms, recv: Array, counts: Sequence[int]) -> Handle:
        """Sum as a communicator does; `send` has this rank's terms, of which several may be used again on return."""
        handle, add_up = self.send_parts(send, counts, recv)
        return Finished(handle, lambda: add_up(recv))

    def iallreduce(self, buffer: Terms) -> Handle:
        """Sum as a communicator does; the sum is put into the last of this rank's terms. Every rank gets the same bits."""
        gathers, total = self._gathers, buffer[-1] if isinstance(buffer, tuple) else buffer
        assert gathers is not None, "these sums were made for reduce-scatters only"
        counts = even(total.size, self.comm.size)
        handle, add_up = self.send_parts(buffer, counts, total)

        def gather() -> Handle:
            add_up(piece(total, counts, self.comm.rank))
            return self.gather(gathers, total, counts)

        return self._allreduces.second_stage(handle, gather)


class SixteenBitSums(OwnerSums):
    """Sums of float32 or float64 over the ranks of a communicator, in 16-bit messages; `send` may be used again on return.

    The sums of an allreduce are rounded once more, by their owners.

    Args:
        comm, gathers: as for the base. caster: rounds what travels.
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
    """Sums of float32 or float64 over the ranks of a communicator, in the order of a tree.

    Args:
        comm, gathers: as for the base. shards: those of the ranks of `comm`.
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
            """Sum the terms of all ranks; the last addition writes to `total`."""
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
        """Return, for each rank, its part of all terms, one after the other; a single term is not copied."""
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
    """Return the sums over `comm` in the order of the tree; None if one rank has all shards. Collective; set-up.

    Args:
        allreduces: they are asked for allreduces, too, which need a communicator of their own.
    """
    if comm.size == 1:
        return None
    gathers = comm.split(0, comm.rank, f"{comm.name} sums") if allreduces else None
    return TreeSums(comm, shards, gathers)


class PartSums(OwnerSums):
    """Sums of arrays of a device by its kernels.

    A sum on its way has a buffer of the parts that arrive, made when that many are first on their way at once, and kept.

    Args:
        comm, gathers: as for the base; `comm` moves arrays of the device. arithmetic: of the device.
    """

    def __init__(self, comm: Communicator, gathers: Communicator, arithmetic: Arithmetic) -> None:
        super().__init__(comm, gathers)
        self._arithmetic = arithmetic
        self._spare = SpareBuffers(lambda size, like: arithmetic.zeros(size, like.dtype))

    def send_parts(self, send: Array, counts: Sequence[int], like: Array) -> tuple[Handle, Callable[[Array], None]]:
        owned, ranks = counts[self.comm.rank], self.comm.size
        received = self._spare.take(owned * ranks, send)

        def add_up(total: Array) -> None:
            """Enqueue the sum of all ranks' parts; later operations may use the buffer after that."""
            if total.size:
                self._arithmetic.copy(total, received[:owned])
                for rank in range(1, ranks):
                    self._arithmetic.add(total, received[rank * owned : (rank + 1) * owned])
            self._spare.give_back(received)

        return self.comm.ialltoall(send, received, counts, [owned] * ranks), add_up
