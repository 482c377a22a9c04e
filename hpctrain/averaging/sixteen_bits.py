"""Numbers in 16 bits: their codes, the rounding of gradients and parameters in messages, and the bytes that rounding saves.

`Cast16` sends arrays in 16 bits per element, which is half of the bytes of float32 and a quarter of those of float64. Numbers are
rounded to nearest even by integer arithmetic, because NumPy has no bfloat16.

`Rounding` defines, as pure data, whether gradients and parameters travel unchanged or rounded.

`RoundedParameters` keeps rounding errors. If parameters travel rounded, every rank computes with the rounded values, and owners
keep the errors. The optimiser updates exact values: an owner adds the error to its part before an update, and removes it again
when it rounds the values to send. Both operations are exact, because the difference between a number and its nearest 16-bit
number is representable in the parameters' dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from hpctrain.averaging.slicing import Slice
from hpctrain.comm.base import Communicator, Handle
from hpctrain.comm.order import Finished
from hpctrain.comm.sums import Caster, Compressor, MessageBuffers, Wire
from hpctrain.core.errors import OptionError
from hpctrain.core.intervals import even
from hpctrain.nn.parameter import FlatGroup, Segment
from hpctrain.optim.base import Norms
from hpctrain.optim.guarded import WriteGuard


class Bfloat16Codes:
    """Codes of blocks of at most `size` numbers: the upper halves of float32.

    Magnitudes of at least 2**128 (1 - 2**-9) become infinite.
    """

    def __init__(self, size: int) -> None:
        self._rounded, self._mask = np.empty(size, np.uint32), np.empty(size, np.bool_)

    def encode(self, values: np.ndarray, codes: np.ndarray) -> None:
        """Write the codes (uint16) of `values` (float32), rounded to nearest even. Infinities stay; NaN becomes 0x7FFF."""
        bits, rounded, mask = values.view(np.uint32), self._rounded[: values.size], self._mask[: values.size]
        np.right_shift(bits, 16, out=rounded)
        np.bitwise_and(rounded, 1, out=rounded)
        np.add(rounded, 0x7FFF, out=rounded)
        np.add(rounded, bits, out=rounded)
        np.right_shift(rounded, 16, out=rounded)
        np.copyto(codes, rounded, casting="unsafe")
        np.isnan(values, out=mask)
        if mask.any():
            codes[mask] = 0x7FFF

    def decode(self, codes: np.ndarray, values: np.ndarray) -> None:
        """Write the values (float32) that the codes represent. The conversion is exact."""
        bits = values.view(np.uint32)
        np.copyto(bits, codes)
        np.left_shift(bits, 16, out=bits)


#: bytes of a rounded number
SIXTEEN_BITS = 2


class OddRounding:
    """Rounding of float64 to float32 such that a second rounding, to fewer digits, has the result of a single rounding.

    An inexact result is rounded to the neighbour whose last bit is odd (Boldo and Melquiond, IEEE Trans. Comput. 2008), so that
    it never lies halfway between two numbers with fewer digits.

    Args:
        size: maximum number of elements.
    """

    def __init__(self, size: int) -> None:
        self._back, self._magnitude = np.empty(size, np.float64), np.empty(size, np.float64)
        self._mask = np.empty(size, np.bool_)

    def narrow(self, values: np.ndarray, narrowed: np.ndarray) -> None:
        """Write float64 `values` as float32 to `narrowed`. Infinities and NaN are preserved."""
        back, magnitude = self._back[: values.size], self._magnitude[: values.size]
        mask, bits = self._mask[: values.size], narrowed.view(np.uint32)
        np.copyto(narrowed, values, casting="same_kind")
        np.abs(narrowed, out=back)
        np.abs(values, out=magnitude)
        np.greater(back, magnitude, out=mask)
        np.subtract(bits, mask, out=bits)  # towards zero
        np.not_equal(back, magnitude, out=mask)
        np.bitwise_or(bits, mask, out=bits)


_BLOCK = 16_384  # elements; their scratch memory fits into a cache of the core


class Cast16(Compressor):
    """Compressor that rounds every element once, to nearest even, to bfloat16, 2 bytes each.

    bfloat16 has the range of float32 and 8 binary digits; numbers that round to 2**128 become infinite. NaN and infinities stay
    non-finite.

    Args:
        dtype: "float32" or "float64".
    """

    def __init__(self, size: int, dtype: str) -> None:
        super().__init__(size, dtype)
        self.message_size = SIXTEEN_BITS * size
        block = min(size, _BLOCK)
        self._codes, self._single = Bfloat16Codes(block), np.empty(block, np.float32)
        self._rounding = OddRounding(block) if self.dtype == np.float64 else None

    def compress(self, values: np.ndarray, message: np.ndarray) -> None:
        with np.errstate(all="ignore"):  # underflow and infinities are valid results
            for block, codes in self._blocks(values, message):
                self._codes.encode(self._narrowed(block), codes)

    def decompress(self, message: np.ndarray, values: np.ndarray) -> None:
        for block, codes in self._blocks(values, message):
            block[...] = self._decoded(codes)

    def add_to(self, message: np.ndarray, values: np.ndarray) -> None:
        for block, codes in self._blocks(values, message):
            np.add(block, self._decoded(codes), out=block)

    def subtract_from(self, message: np.ndarray, values: np.ndarray) -> None:
        """Replace `values` by their rounding errors, exact in the dtype; NaN if the message is not finite."""
        with np.errstate(invalid="ignore"):
            for block, codes in self._blocks(values, message):
                np.subtract(block, self._decoded(codes), out=block)

    def _blocks(self, values: np.ndarray, message: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (elements, their codes) block by block."""
        codes = message.view(np.uint16)
        for start in range(0, self.size, _BLOCK):
            yield values[start : start + _BLOCK], codes[start : start + _BLOCK]

    def _narrowed(self, block: np.ndarray) -> np.ndarray:
        """Return a block as float32, which rounds to the same 16 bits as the block itself."""
        if self._rounding is None:
            return block
        narrowed = self._single[: block.size]
        self._rounding.narrow(block, narrowed)
        return narrowed

    def _decoded(self, codes: np.ndarray) -> np.ndarray:
        """Return the values of codes, in scratch memory."""
        values = self._single[: codes.size]
        self._codes.decode(codes, values)
        return values


@dataclass(frozen=True)
class Rounding:
    """Rounding of the numbers in a schedule's messages.

    Attributes:
        gradients: number format in reduce-scatters and allreduces.
        parameters: number format in allgathers of parameters.
        per_node: number of ranks of a node among which gradients are summed in full precision before they are rounded to cross
            nodes; 1: all messages are rounded.
        cuts_allreduces: whether large allreduces travel in several operations, cut by `parts_of`; a part of stored schedules.
    """

    gradients: Wire = "float32"
    parameters: Wire = "float32"
    per_node: int = 1
    cuts_allreduces: bool = False

    def sent_share(self, item_bytes: int) -> float:
        """Return the bytes of a gradient on the wire divided by its bytes in memory, `item_bytes` per element."""
        return 1.0 if self.gradients == "float32" else SIXTEEN_BITS / item_bytes

    def saved_by_reduction(self, counts: Sequence[int], item_bytes: int) -> np.ndarray:
        """Return, by rank, the bytes (int64) that rounding saves in a reduce-scatter of parts of `counts` elements."""
        saved = [_saved_bytes(count, item_bytes, self.gradients) for count in counts]
        nodes = len(saved) // self.per_node  # ranks with the same local number on all nodes are neighbours
        return np.concatenate([_sums_without_own(saved[begin : begin + nodes]) for begin in range(0, len(saved), nodes)])

    def saved_by_allreduce(self, size: int, ranks: int, item_bytes: int) -> np.ndarray:
        """Return, by rank, the bytes that rounding saves in an allreduce of `size` elements.

        The sums are also gathered in 16 bits.
        """
        return 2 * self.saved_by_reduction(even(size, ranks), item_bytes)

    def saved_by_gather(self, counts: Sequence[int], item_bytes: int) -> np.ndarray:
        """Return, by rank, the bytes that rounding saves in an allgather of parameters."""
        return _sums_without_own([_saved_bytes(count, item_bytes, self.parameters) for count in counts])


def _sums_without_own(by_rank: Sequence[int]) -> np.ndarray:
    """Return, for each rank, the sum of all other ranks' numbers."""
    numbers = np.array(by_rank, np.int64)
    return np.sum(numbers) - numbers


def _saved_bytes(elements: int, item_bytes: int, wire: Wire) -> int:
    """Return the bytes that rounding saves in a message of `elements` numbers."""
    return elements * item_bytes - wire_bytes(elements, item_bytes, wire)


def wire_bytes(elements: int, item_bytes: int, wire: Wire) -> int:
    """Return the size of a message of `elements` numbers, which have `item_bytes` each in memory."""
    return elements * (item_bytes if wire == "float32" else SIXTEEN_BITS)


def caster(wire: Wire) -> Caster | None:
    """Return a factory of message compressors; None if numbers travel unchanged."""
    return None if wire == "float32" else Cast16


def check_wire(**values: Wire) -> None:
    """Check options for number formats.

    Raises:
        OptionError: a value is unknown; the message names the first one.
    """
    for name, value in values.items():
        if value not in get_args(Wire):
            raise OptionError(
                f"{name} is {value!r}, but must be one of {', '.join(get_args(Wire))}; the default is float32.", name
            )


def words_of_rounding(rounding: Rounding | None) -> str:
    """Return the text about rounding that is appended to the request of a stored schedule; empty if nothing is rounded."""
    if rounding is None:
        return ""
    parameters = "" if rounding.parameters == "float32" else f", wire_parameters {rounding.parameters}"
    return f", wire {rounding.gradients}{parameters}"


#: name of the state with rounding errors; an exact parameter is the network's parameter plus its rounding error
PARAMETER_ERROR = "parameter_error"


class RoundedParameters:
    """Rounding errors of the parameters that this rank owns, and allgathers of rounded parts. All arrays are on the host.

    Args:
        own: segments of this rank's part, by slice, in order.
        caster: factory of the compressors that round messages.
        rank: index of this rank among the owners.
        ranks: number of ranks that own the parts.
        watched: whether to detect changes between two writes.

    Attributes:
        guards: guard of the parameters and errors of this rank's part, by slice, which only `restore` and `gather` write; empty
            if they are not watched.
    """

    def __init__(
        self,
        group: FlatGroup,
        slices: Sequence[Slice],
        own: Sequence[Sequence[Segment]],
        rank: int,
        ranks: int,
        caster: Caster,
        *,
        watched: bool = False,
    ) -> None:
        self._group, self._slices, self._rank, self._ranks = group, slices, rank, ranks
        self._buffers = MessageBuffers(caster)
        self._parts = [piece.part(rank, ranks) for piece in slices]
        self._errors = [np.zeros(end - begin, group.dtype) for begin, end in self._parts]
        self._segment_errors = {
            segment.start: self._errors[k][segment.start - self._parts[k][0] : segment.stop - self._parts[k][0]]
            for k, segments in enumerate(own)
            for segment in segments
        }
        self.guards = [WriteGuard(self._guarded(segments), group.arithmetic) for segments in own if watched]
        self._exact = np.empty(max(map(len, self._errors), default=0), group.dtype)

    def restore(self, k: int) -> None:
        """Restore the exact values in this rank's part of a slice."""
        if self.guards:
            self.guards[k].compare()
        begin, end = self._parts[k]
        self._group.arithmetic.add(self._group.data[begin:end], self._errors[k])

    def gather(self, k: int, comm: Communicator) -> Handle:
        """Round this rank's part of a slice, keep the errors, and gather the rounded parts of all ranks. Collective."""
        piece, mine = self._slices[k], self._rank
        data = self._group.data[piece.start : piece.stop]
        parts = self._buffers.parts(piece.counts(self._ranks), data.dtype)
        messages = self._buffers.take(parts.total_bytes)
        begin, end = parts.elements[mine]
        parts.write(mine, data, messages)
        self._group.arithmetic.copy(self._errors[k], data[begin:end])
        parts.read(mine, messages, data)
        with np.errstate(invalid="ignore"):  # non-finite values are reported elsewhere
            self._group.arithmetic.subtract(self._errors[k], data[begin:end])
        if self.guards:
            self.guards[k].remember()

        def finish() -> None:
            for rank in range(self._ranks):
                if rank != mine:
                    parts.read(rank, messages, data)
            self._buffers.give_back(messages)

        return Finished(comm.iallgather(None, messages, parts.sizes), finish)

    def _guarded(self, segments: Sequence[Segment]) -> dict[str, np.ndarray]:
        """Return the parameters of owned segments and their rounding errors, by name."""
        arrays = {f"parameter {one.parameter}": self._group.data[one.start : one.stop] for one in segments}
        return arrays | {f"the rounding error of {one.parameter}": self._segment_errors[one.start] for one in segments}

    def add_squares(self, norms: Norms, k: int, segments: Sequence[Segment]) -> None:
        """Add the squares of this rank's part of a slice to the norms, like `Norms.add_partial` but for the exact values."""
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
        """Return {"parameter_error": view} of an owned or empty segment; {} for a segment that every rank updates."""
        if not segment.size:
            return {PARAMETER_ERROR: self._exact[:0]}
        view = self._segment_errors.get(segment.start)
        return {} if view is None else {PARAMETER_ERROR: view[: segment.size]}
