"""Numbers in 16 bits: their codes, the rounding of gradients and parameters in messages, and the bytes that rounding saves.

`Cast16` sends arrays in 16 bits per element, which is half of the bytes of float32 and a quarter of those of float64. Numbers are
rounded to nearest even by integer arithmetic, because NumPy has no bfloat16 and its rounding to float16 takes twenty times as
long for subnormal results.

`Rounding` defines whether gradients and parameters travel unchanged or rounded. Pure data.

`RoundedParameters`: if parameters travel rounded, every rank computes with the rounded values, and owners keep the rounding
errors. The optimiser updates exact values: an owner adds the error to its part before an update, and removes it again when it
rounds the values to send. Both operations are exact, because the difference between a number and its nearest 16-bit number is
representable in the parameters' dtype.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, get_args

import numpy as np

from hpctrain.averaging.slicing import Slice, parts_of
from hpctrain.comm.base import Communicator, Handle
from hpctrain.comm.order import Finished
from hpctrain.comm.sums import Caster, Compressor, MessageBuffers, Wire
from hpctrain.core.errors import OptionError
from hpctrain.core.intervals import even
from hpctrain.nn.parameter import FlatGroup, Segment
from hpctrain.optim.base import Norms
from hpctrain.optim.guarded import WriteGuard

_EXPONENT_BITS = 0x7F800000  # exponent of a float32
_SMALLEST_NORMAL = 113 << 23  # 2**-14, the smallest normal float16, as a float32
_UNIT = 13 << 23  # 2**13 as an exponent offset: a float32 with the larger exponent ends at the number's tenth fraction bit
_LEAST_INFINITE = int(np.float32(65520).view(np.uint32))  # rounds to more than the largest float16
_FLOAT16_VALUES = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)  # the value of each float16


class Codes(ABC):
    """Base of 16-bit codes for blocks of at most `size` numbers."""

    def __init__(self, size: int) -> None:
        self._first = np.empty(size, np.uint32)
        self._second = np.empty(size, np.uint32)

    @abstractmethod
    def encode(self, values: np.ndarray, codes: np.ndarray) -> None:
        """Write the codes (uint16) of `values` (float32), rounded to nearest even. Infinities and NaN are preserved."""

    @abstractmethod
    def decode(self, codes: np.ndarray, values: np.ndarray) -> None:
        """Write the values (float32) that the codes represent. The conversion is exact."""


class Bfloat16Codes(Codes):
    """Codes for bfloat16, the upper halves of float32. Magnitudes of at least 2**128 (1 - 2**-9) become infinite."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._mask = np.empty(size, np.bool_)

    def encode(self, values: np.ndarray, codes: np.ndarray) -> None:
        bits, rounded, mask = values.view(np.uint32), self._first[: values.size], self._mask[: values.size]
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
        bits = values.view(np.uint32)
        np.copyto(bits, codes)
        np.left_shift(bits, 16, out=bits)


class Float16Codes(Codes):
    """Codes for IEEE float16. Magnitudes of at least 65520 become infinite.

    A number is rounded by adding a power of two whose unit in the last place is that of the rounded number.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._unit = np.empty(size, np.uint32)
        self._places = np.empty(size, np.intp)  # codes in the dtype that NumPy indexes with

    def encode(self, values: np.ndarray, codes: np.ndarray) -> None:
        bits, code, exponent = values.view(np.uint32), self._first[: values.size], self._second[: values.size]
        unit = self._unit[: values.size]
        np.bitwise_and(bits, 0x7FFFFFFF, out=code)
        if code.size and code.max() >= _LEAST_INFINITE:
            np.copyto(codes.view(np.float16), values, casting="same_kind")
            return
        np.bitwise_and(code, _EXPONENT_BITS, out=exponent)
        np.maximum(exponent, _SMALLEST_NORMAL, out=exponent)
        np.add(exponent, _UNIT, out=unit)
        np.add(code.view(np.float32), unit.view(np.float32), out=code.view(np.float32))
        np.subtract(code, unit, out=code)  # the digits, as an integer
        np.right_shift(exponent, 13, out=exponent)
        np.add(code, exponent, out=code)
        np.subtract(code, _SMALLEST_NORMAL >> 13, out=code)
        np.right_shift(bits, 16, out=exponent)
        np.bitwise_and(exponent, 0x8000, out=exponent)
        np.bitwise_or(code, exponent, out=code)
        np.copyto(codes, code, casting="unsafe")

    def decode(self, codes: np.ndarray, values: np.ndarray) -> None:
        places = self._places[: codes.size]
        np.copyto(places, codes)
        np.take(_FLOAT16_VALUES, places, out=values, mode="clip")


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


Bits16 = Literal["bfloat16", "float16"]
_BLOCK = 16_384  # elements; their scratch memory fits into a cache of the core
_LARGEST_EXPONENT = 14  # exponent of the largest float16 in a message; finite even if rounded up
_LARGEST_SCALE_EXPONENT = {
    "float32": 126,
    "float64": 1022,
}  # largest exponent of a scale whose inverse is a normal number


class Cast16(Compressor):
    """Compressor that rounds every element once, to nearest even, to bfloat16 or float16, 2 bytes each.

    NaN and infinities stay non-finite. bfloat16 has the range of float32 and 8 binary digits; numbers that round to 2**128 become
    infinite. float16 has 11 binary digits. A float16 message begins with 2 bytes (int16) for the exponent of its scale, a power
    of two that is derived from the largest element. Elements below 2**-28 of the largest have fewer digits; those below 2**-39
    become zero.

    Args:
        dtype: "float32" or "float64".
        bits: "bfloat16" or "float16".
    """

    def __init__(self, size: int, dtype: str, bits: Bits16) -> None:
        super().__init__(size, dtype)
        self._header = 2 if bits == "float16" else 0
        self.message_size = self._header + 2 * size
        block = min(size, _BLOCK)
        self._codes: Codes = Float16Codes(block) if bits == "float16" else Bfloat16Codes(block)
        self._single = np.empty(block, np.float32)
        self._full = np.empty(block, self.dtype)
        self._rounding = OddRounding(block) if self.dtype == np.float64 else None

    def compress(self, values: np.ndarray, message: np.ndarray) -> None:
        scale = 1.0
        with np.errstate(all="ignore"):  # underflow and infinities are valid results
            if self._header:
                exponent = self._exponent(values)
                message[:2].view(np.int16)[0], scale = exponent, 2.0**exponent
            for block, codes in self._blocks(values, message):
                self._codes.encode(self._narrowed(block, scale), codes)

    def decompress(self, message: np.ndarray, values: np.ndarray) -> None:
        for block, codes in self._blocks(values, message):
            block[...] = self._decoded(message, codes)

    def add_to(self, message: np.ndarray, values: np.ndarray) -> None:
        for block, codes in self._blocks(values, message):
            np.add(block, self._decoded(message, codes), out=block)

    def subtract_from(self, message: np.ndarray, values: np.ndarray) -> None:
        """Replace `values` by their rounding errors, exact in the dtype; NaN if the message is not finite."""
        with np.errstate(invalid="ignore"):
            for block, codes in self._blocks(values, message):
                np.subtract(block, self._decoded(message, codes), out=block)

    def _blocks(self, values: np.ndarray, message: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (elements, their codes) block by block."""
        codes = message[self._header :].view(np.uint16)
        for start in range(0, self.size, _BLOCK):
            yield values[start : start + _BLOCK], codes[start : start + _BLOCK]

    def _exponent(self, values: np.ndarray) -> int:
        """Return the exponent of a message's scale; 0 if all elements are zero or the largest is not finite."""
        largest = max(float(values.max()), -float(values.min())) if self.size else 0.0
        if largest == 0 or not math.isfinite(largest):
            return 0
        return min(_LARGEST_EXPONENT + 1 - math.frexp(largest)[1], _LARGEST_SCALE_EXPONENT[self.dtype.name])

    def _narrowed(self, block: np.ndarray, scale: float) -> np.ndarray:
        """Return a block times the scale as float32, which rounds to the same 16 bits as the scaled block itself."""
        if scale != 1:
            block = np.multiply(block, self.dtype.type(scale), out=self._full[: block.size])
        if self._rounding is None:
            return block
        narrowed = self._single[: block.size]
        self._rounding.narrow(block, narrowed)
        return narrowed

    def _decoded(self, message: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """Return the values of codes, with the scale removed."""
        values = self._single[: codes.size]
        self._codes.decode(codes, values)
        if not self._header:
            return values
        scale = self.dtype.type(2.0 ** -int(message[:2].view(np.int16)[0]))
        scaled = self._full[: codes.size]
        np.multiply(values, scale, out=scaled, dtype=self.dtype)
        return scaled


#: bytes of a rounded number
SIXTEEN_BITS = 2


@dataclass(frozen=True)
class Rounding:
    """Rounding of the numbers in a schedule's messages.

    Attributes:
        gradients: number format in reduce-scatters and allreduces.
        parameters: number format in allgathers of parameters.
        per_node: number of ranks of a node among which gradients are summed in full precision before they are rounded to cross
            nodes; 1: all messages are rounded.
        cuts_allreduces: whether large allreduces travel in several operations, cut by `parts_of`.
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
        saved = np.zeros(ranks, np.int64)
        for begin, end in parts_of(size, item_bytes, ranks) if self.cuts_allreduces else [(0, size)]:
            saved += 2 * self.saved_by_reduction(even(end - begin, ranks), item_bytes)
        return saved

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
    if wire == "float32" or not elements:
        return elements * item_bytes
    return SIXTEEN_BITS * elements + _header_bytes(wire)


@cache
def _header_bytes(wire: Bits16) -> int:
    """Return the size in bytes of a message's header."""
    return Cast16(0, "float32", wire).message_size


def caster(wire: Wire) -> Caster | None:
    """Return a factory of message compressors; None if numbers travel unchanged."""
    return None if wire == "float32" else partial(Cast16, bits=wire)


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
