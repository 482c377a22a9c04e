"""Sums whose parts travel in 16 bits: each goes to the rank that owns it, which adds them up in full precision.

A reduce-scatter becomes an all-to-all of rounded parts and a local sum, an allreduce that and an allgather of rounded sums: half
of the bytes of float32, and no sum of 16-bit numbers, which few MPIs have and which would round after every addition. Parts are
added in rank order, from 0 on, in the dtype of the buffer. A rank's own part is rounded as those of others are, so a sum is the
same whichever rank owns it, and does not depend on how a buffer is cut. (With one scale for each message, float16 rounds very
small numbers beside much larger ones of their part more coarsely.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np

from hpctrain.core.intervals import even
from hpctrain.comm.base import Communicator, GradientSums, Handle
from hpctrain.comm.spare_buffers import SpareBuffers
from hpctrain.comm.order import Finished, Stages
from hpctrain.comm.groups import SumsInLevels, TwoLevel
from hpctrain.compress.base import Compressor

#: how numbers travel; "float32": as they are computed, whatever their dtype
Wire = Literal["float32", "bfloat16", "float16"]
_BYTES = np.empty(0, np.uint8)
#: (elements, dtype) -> the compressor of such arrays
Caster = Callable[[int, str], Compressor]


def sums_over(comm: Communicator, caster: Caster | None, *, allreduces: bool) -> GradientSums:
    """The sums of gradients over `comm`: in 16 bits, in two levels across nodes only. Collective; set-up.

    Args:
        caster: rounds what travels; None: nothing is rounded. allreduces: it is asked for allreduces, too.
    """
    if caster is None or comm.size == 1:
        return comm
    if not isinstance(comm, TwoLevel):
        return _flat_sums(comm, caster) if allreduces else SixteenBitSums(comm, caster)
    in_levels = comm.with_sums_across(lambda across: SixteenBitSums(across, caster))
    return SumsInLevels(in_levels, lambda across: _flat_sums(across, caster)) if allreduces else in_levels


def _flat_sums(comm: Communicator, caster: Caster) -> SixteenBitSums:
    """Sums over `comm` that have allreduces. Collective; set-up."""
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
    """Parts and buffers of messages, made once for each size: the same few serve step after step."""

    def __init__(self, caster: Caster) -> None:
        self._caster = caster
        self._casts: dict[tuple[int, str], Compressor] = {}
        self._parts: dict[tuple[tuple[int, ...], str], MessageParts] = {}
        self._spare = SpareBuffers()

    def parts(self, counts: Sequence[int], dtype: np.dtype) -> MessageParts:
        """The messages of a buffer of `dtype` whose parts have `counts` elements."""
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
        """A uint8 buffer, until it is given back."""
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
        self._allreduces = Stages()

    def ireduce_scatter(self, send: np.ndarray, recv: np.ndarray, counts: Sequence[int]) -> Handle:
        """As a communicator's, but `send` may be used again when this returns."""
        parts = self._buffers.parts(counts, send.dtype)
        messages, received = self._buffers.take(parts.total_bytes), self._received(parts)
        handle = self._send_parts(parts, send, messages, received)

        def finish() -> None:
            self._add(parts, received, recv)
            self._buffers.give_back(messages, received)

        return Finished(handle, finish)

    def iallreduce(self, buffer: np.ndarray) -> Handle:
        """As a communicator's; each sum is rounded once more, by its owner, so every rank gets the same bits."""
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

        return self._allreduces.add(handle, gather, finish)

    def _received(self, parts: MessageParts) -> np.ndarray:
        """A buffer for this rank's part from everyone."""
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
