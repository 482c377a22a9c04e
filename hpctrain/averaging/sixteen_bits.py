"""Numbers in 16 bits: their codes, how gradients and parameters travel in them, and the bytes that this saves.

`Cast16` sends arrays in 16 bits an element: half of the bytes of float32, a quarter of those of float64. Numbers are rounded to
nearest even by integer arithmetic: NumPy knows no bfloat16, and its own rounding to float16 takes twenty times as long where
results are denormal.

`Rounding` is how gradients and parameters travel: as they are, or rounded. Pure data.

`RoundedParameters`: where parameters travel rounded, every rank computes with the rounded ones, and owners keep what rounding
took away. The optimiser updates exact values: an owner adds the error to its part before an update, and takes it out again when
it rounds what it sends. Both are exact, as the difference of a number and its nearest 16-bit one is a number of the parameters'
own dtype.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, Protocol, get_args

import numpy as np

from hpctrain.averaging.slicing import Slice, parts_of
from hpctrain.comm.base import Communicator, Handle
from hpctrain.comm.order import Finished
from hpctrain.comm.sums import Caster, Compressor, MessageBuffers, Wire
from hpctrain.core.errors import OptionError
from hpctrain.core.intervals import even
from hpctrain.nn.parameter import FlatGroup, Segment
from hpctrain.optim.base import Norms

_EXPONENT_BITS = 0x7F800000  # of a float32
_SMALLEST_NORMAL = 113 << 23  # 2**-14, the smallest normal float16, as a float32
_UNIT = 13 << 23  # times 2**13 as a float32: from the exponent of a number to that whose last bit is the number's tenth
_LEAST_INFINITE = int(np.float32(65520).view(np.uint32))  # what rounds to more than the largest float16
_FLOAT16_VALUES = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)  # the value of each float16


class Codes(ABC):
    """Codes of blocks of at most `size` numbers."""

    def __init__(self, size: int) -> None:
        self._first = np.empty(size, np.uint32)
        self._second = np.empty(size, np.uint32)

    @abstractmethod
    def encode(self, values: np.ndarray, codes: np.ndarray) -> None:
        """Write the codes (uint16) of `values` (float32): the nearest; of two the even one. Infinities and NaN stay such."""

    @abstractmethod
    def decode(self, codes: np.ndarray, values: np.ndarray) -> None:
        """Write the values (float32) of codes: exact."""


class Bfloat16Codes(Codes):
    """The upper halves of float32. The largest numbers, from 2**128 (1 - 2**-9) on, become infinite."""

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
    """IEEE float16. Numbers from 65520 on become infinite.

    A number is rounded by adding to it a power of two whose last bit is the last one that the number may keep.
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
    """Round float64 to float32 such that a second rounding, to fewer digits, has the result of a single one.

    An inexact result is that of its two neighbours whose last bit is odd (Boldo and Melquiond, IEEE Trans. Comput. 2008), so
    that it never lies on the border between two shorter numbers.

    Args:
        size: elements at most.
    """

    def __init__(self, size: int) -> None:
        self._back, self._magnitude = np.empty(size, np.float64), np.empty(size, np.float64)
        self._mask = np.empty(size, np.bool_)

    def narrow(self, values: np.ndarray, narrowed: np.ndarray) -> None:
        """Write float64 `values` as float32; infinities and NaN stay such."""
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
_BLOCK = 16_384  # elements: their scratch memory stays in a cache of the core
_LARGEST_EXPONENT = 14  # exponent of the largest float16 in a message: rounded up it is finite still
_LARGEST_SCALE_EXPONENT = {
    "float32": 126,
    "float64": 1022,
}  # the largest exponent of a scale that has a normal number for an inverse


class Cast16(Compressor):
    """All elements, rounded once, to nearest even, to bfloat16 or float16: 2 bytes each; NaN and infinities stay not finite.

    bfloat16 has the range of float32 and 8 binary digits; what rounds to 2**128 becomes infinite. float16 has 11 digits, and one
    power of two as a scale for all of a message, in its first 2 bytes (int16): that of the largest element. Elements below
    2**-28 of it have fewer digits, those below 2**-39 become zero.

    Args:
        size: elements of an array. dtype: "float32" or "float64". bits: "bfloat16" or "float16".
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
        with np.errstate(all="ignore"):  # underflow to zero and infinite numbers are results
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
        """Return the exponent of a message's scale; 0 if there is nothing to scale, or no finite largest element."""
        largest = max(float(values.max()), -float(values.min())) if self.size else 0.0
        if largest == 0 or not math.isfinite(largest):
            return 0
        return min(_LARGEST_EXPONENT + 1 - math.frexp(largest)[1], _LARGEST_SCALE_EXPONENT[self.dtype.name])

    def _narrowed(self, block: np.ndarray, scale: float) -> np.ndarray:
        """Return a block times the scale, as float32 that rounds to 16 bits as the block itself does."""
        if scale != 1:
            block = np.multiply(block, self.dtype.type(scale), out=self._full[: block.size])
        if self._rounding is None:
            return block
        narrowed = self._single[: block.size]
        self._rounding.narrow(block, narrowed)
        return narrowed

    def _decoded(self, message: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """Return the values of codes, without the scale."""
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
    """How the numbers of a schedule's messages are rounded.

    Attributes:
        gradients, parameters: how they travel in reduce-scatters and allreduces, and in allgathers.
        per_node: ranks of a node that sum gradients in full precision before these cross nodes; 1: everything is rounded.
        cuts_allreduces: large ones travel in several operations, by `parts_of`.
    """

    gradients: Wire = "float32"
    parameters: Wire = "float32"
    per_node: int = 1
    cuts_allreduces: bool = False

    def sent_share(self, item_bytes: int) -> float:
        """Return the bytes of a gradient on its way over those in memory, where an element has `item_bytes`."""
        return 1.0 if self.gradients == "float32" else SIXTEEN_BITS / item_bytes

    def saved_by_reduction(self, counts: Sequence[int], item_bytes: int) -> np.ndarray:
        """Return the bytes less that each rank exchanges in a reduce-scatter of parts of `counts` elements; int64, by rank."""
        saved = [_saved_bytes(count, item_bytes, self.gradients) for count in counts]
        nodes = len(saved) // self.per_node  # ranks of one number on all nodes are neighbours
        return np.concatenate([_of_others(saved[begin : begin + nodes]) for begin in range(0, len(saved), nodes)])

    def saved_by_allreduce(self, size: int, ranks: int, item_bytes: int) -> np.ndarray:
        """Return the same of an allreduce of `size` elements, whose sums are gathered in 16 bits, too."""
        saved = np.zeros(ranks, np.int64)
        for begin, end in parts_of(size, item_bytes, ranks) if self.cuts_allreduces else [(0, size)]:
            saved += 2 * self.saved_by_reduction(even(end - begin, ranks), item_bytes)
        return saved

    def saved_by_gather(self, counts: Sequence[int], item_bytes: int) -> np.ndarray:
        """Return the same of an allgather of parameters."""
        return _of_others([_saved_bytes(count, item_bytes, self.parameters) for count in counts])


def _of_others(by_rank: Sequence[int]) -> np.ndarray:
    """Return, for each rank, the sum of all other ranks' numbers."""
    numbers = np.array(by_rank, np.int64)
    return np.sum(numbers) - numbers


def _saved_bytes(elements: int, item_bytes: int, wire: Wire) -> int:
    """Return the bytes by which a message of `elements` numbers is shorter."""
    return elements * item_bytes - wire_bytes(elements, item_bytes, wire)


def wire_bytes(elements: int, item_bytes: int, wire: Wire) -> int:
    """Return the bytes of a message of `elements` numbers, which have `item_bytes` each in memory."""
    if wire == "float32" or not elements:
        return elements * item_bytes
    return SIXTEEN_BITS * elements + _header_bytes(wire)


@cache
def _header_bytes(wire: Bits16) -> int:
    """Return the bytes of a message besides its numbers."""
    return Cast16(0, "float32", wire).message_size


def caster(wire: Wire) -> Caster | None:
    """Return the compressors of messages; None if numbers travel as they are."""
    return None if wire == "float32" else partial(Cast16, bits=wire)


def check_wire(**values: Wire) -> None:
    """Check options that say how numbers travel.

    Raises:
        OptionError: a value that is none of the known ones; the first one.
    """
    for name, value in values.items():
        if value not in get_args(Wire):
            raise OptionError(
                f"{name} is {value!r}, but it is one of {', '.join(get_args(Wire))}; the usual one is float32.", name
            )


def words_of_rounding(rounding: Rounding | None) -> str:
    """Return the words that rounding adds to a stored schedule's request; none if nothing is rounded."""
    if rounding is None:
        return ""
    parameters = "" if rounding.parameters == "float32" else f", wire_parameters {rounding.parameters}"
    return f", wire {rounding.gradients}{parameters}"


#: the name of the state: exact parameters are those of the network plus this
PARAMETER_ERROR = "parameter_error"


class WriteGuard(Protocol):
    """Detects changes of arrays between two writes to them."""

    def compare(self) -> None:
        """Compare the arrays with the remembered sums, just before they are written."""
        ...

    def remember(self) -> None:
        """Remember the arrays, just after they were written."""
        ...


class RoundedParameters:
    """Rounding errors of what this rank owns, and the allgathers of rounded parts. All arrays are on the host.

    Args:
        slices: of a schedule. own: by slice, the segments of this rank's part, in order. rank, ranks: those that own the parts.

    Attributes:
        guards: a guard of the arrays that `guarded` returns for each slice; empty if they are not watched.
    """

    def __init__(
        self, group: FlatGroup, slices: Sequence[Slice], own: Sequence[Sequence[Segment]], rank: int, ranks: int, caster: Caster
    ) -> None:
        self._group, self._slices, self._rank, self._ranks = group, slices, rank, ranks
        self._buffers = MessageBuffers(caster)
        self._parts = [piece.part(rank, ranks) for piece in slices]
        self._errors = [np.zeros(end - begin, group.dtype) for begin, end in self._parts]
        self._of_segment = {
            segment.start: self._errors[k][segment.start - self._parts[k][0] : segment.stop - self._parts[k][0]]
            for k, segments in enumerate(own)
            for segment in segments
        }
        self._own = own
        self.guards: Sequence[WriteGuard] = ()
        self._exact = np.empty(max(map(len, self._errors), default=0), group.dtype)

    def restore(self, k: int) -> None:
        """Put the exact values of a slice into this rank's part of it."""
        if self.guards:
            self.guards[k].compare()
        begin, end = self._parts[k]
        self._group.arithmetic.add(self._group.data[begin:end], self._errors[k])

    def gather(self, k: int, comm: Communicator) -> Handle:
        """Round this rank's part of a slice, keep the error, and gather the rounded parts of all. Collective."""
        piece, mine = self._slices[k], self._rank
        data = self._group.data[piece.start : piece.stop]
        parts = self._buffers.parts(piece.counts(self._ranks), data.dtype)
        messages = self._buffers.take(parts.total_bytes)
        begin, end = parts.elements[mine]
        parts.write(mine, data, messages)
        self._group.arithmetic.copy(self._errors[k], data[begin:end])
        parts.read(mine, messages, data)
        with np.errstate(invalid="ignore"):  # what is not finite is reported elsewhere
            self._group.arithmetic.subtract(self._errors[k], data[begin:end])
        if self.guards:
            self.guards[k].remember()

        def finish() -> None:
            for rank in range(self._ranks):
                if rank != mine:
                    parts.read(rank, messages, data)
            self._buffers.give_back(messages)

        return Finished(comm.iallgather(None, messages, parts.sizes), finish)

    def guarded(self) -> list[list[tuple[str, np.ndarray]]]:
        """Return, by slice, the names and arrays that only `restore` and `gather` write."""
        of_slices: list[list[tuple[str, np.ndarray]]] = []
        for segments in self._own:
            arrays = [(f"parameter {one.parameter}", self._group.data[one.start : one.stop]) for one in segments]
            errors = [(f"the rounding error of {one.parameter}", self.state(one)[PARAMETER_ERROR]) for one in segments]
            of_slices.append([*arrays, *errors])
        return of_slices

    def add_squares(self, norms: Norms, k: int, segments: Sequence[Segment]) -> None:
        """Add the squares of this rank's part of a slice, as `Norms.add_partial` does, but with its exact values."""
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
        """Return {"parameter_error": view} of an owned segment of a part, or of an empty one; {} for what every rank updates."""
        if not segment.size:
            return {PARAMETER_ERROR: self._exact[:0]}
        view = self._of_segment.get(segment.start)
        return {} if view is None else {PARAMETER_ERROR: view[: segment.size]}
