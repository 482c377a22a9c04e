"""Hashes of arrays that several ranks hold in parts: a sum of one number for each element, so no cut of the array changes it.

The number of an element is a mix of its bits and of its position in the whole array: x := position * 2^32 + bits, then twice a
product with an odd constant modulo 2^64, each followed by x := x xor x >> 32. That maps different x to different numbers, so one
element that changed always shows. Where several changed, the hash stays what it was with a probability of 2^-64, as far as the
mix behaves like random numbers; nobody can be kept from making two arrays of one hash on purpose. Bellare and Micciancio, "A new
paradigm for collision-free hashing", EUROCRYPT 1997 (AdHash); the mix is of the kind of MurmurHash3's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.core.intervals import Box, Interval

#: hash values are modulo this
MODULUS = 1 << 64
#: words that are mixed at once; two buffers and the positions are 384 KiB, which stay in a second-level cache (measured)
CHUNK = 1 << 14

_WORD = np.dtype(np.uint32)
_HALF = np.uint64(32)
_FIRST_FACTOR, _SECOND_FACTOR = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)


@dataclass(frozen=True)
class PartPosition:
    """The positions of a part's elements in the whole array, both counted in C order; the part is split in one dim at most.

    Element i of the part is element i + i // run * gap + first of the whole.

    Attributes:
        run: elements of the part that are neighbours in the whole. gap: elements of others between two runs. first: before all.
    """

    run: int
    gap: int
    first: int

    @classmethod
    def of(cls, shape: Sequence[int], box: Box) -> PartPosition:
        """The positions of a box in an array of that shape, cut in one dim at most."""
        split = [dim for dim, (interval, size) in enumerate(zip(box, shape, strict=True)) if interval != (0, size)]
        assert len(split) <= 1, f"the box {box} is cut in several dims of {tuple(shape)}"
        if not split:
            return cls(max(1, math.prod(shape)), 0, 0)
        return cls._cut(shape, split[0], box[split[0]])

    @classmethod
    def _cut(cls, shape: Sequence[int], dim: int, interval: Interval) -> PartPosition:
        inner = math.prod(shape[dim + 1 :])
        held = (interval[1] - interval[0]) * inner
        return cls(max(1, held), shape[dim] * inner - held, interval[0] * inner)


class ElementHash:
    """Sums of elements' numbers, by buffers that are made once. Not for several threads at once."""

    def __init__(self) -> None:
        self._mixed, self._spare = (np.empty(CHUNK, np.uint64) for _ in range(2))
        #: places in a chunk, where a mix has the position
        self._places = np.arange(CHUNK, dtype=np.uint64) << _HALF

    def sum_of(self, values: np.ndarray, start: int, position: PartPosition) -> int:
        """The sum of the numbers of some elements, modulo 2^64; sums over parts of an array add up to that of the array.

        Args:
            values: 1-D and contiguous, on the host, of a dtype of 4 or 8 bytes; it is read only. An element of 8 bytes is two
                words of 4 in the order of the machine.
            start: place in the part of the first of them. position: of the part in the whole array.
        """
        words, per_element = values.view(_WORD), values.itemsize // _WORD.itemsize
        run, gap = position.run * per_element, position.gap * per_element
        begin, first = start * per_element, position.first * per_element
        total = 0
        for low in range(0, words.size, CHUNK):
            chunk = words[low : low + CHUNK]
            mixed = self._positions(chunk.size, begin + low, first, run, gap)
            spare = self._spare[: chunk.size]
            spare[...] = chunk
            np.add(mixed, spare, out=mixed)
            total += self._mixed_sum(mixed, spare)
        return total % MODULUS

    def _positions(self, size: int, begin: int, first: int, run: int, gap: int) -> np.ndarray:
        """Positions times 2^32, modulo 2^64, of the words of a part from its word `begin` on."""
        mixed = self._mixed[:size]
        np.add(self._places[:size], np.uint64((begin + first) % (1 << 32) << 32), out=mixed)
        if gap and (begin + size - 1) // run:  # else all of them are in the first run
            before = (np.arange(begin, begin + size, dtype=np.uint64) // np.uint64(run)) * np.uint64(gap)
            np.add(mixed, before << _HALF, out=mixed)
        return mixed

    def _mixed_sum(self, mixed: np.ndarray, spare: np.ndarray) -> int:
        for factor in (_FIRST_FACTOR, _SECOND_FACTOR):
            np.multiply(mixed, factor, out=mixed)
            np.right_shift(mixed, _HALF, out=spare)
            np.bitwise_xor(mixed, spare, out=mixed)
        return int(mixed.sum())


def digest(total: int, shape: Sequence[int], dtype: str) -> str:
    """The hash of a whole array from the sum over its elements: 16 hexadecimal digits, of its shape and dtype, too."""
    header = hashlib.blake2b(f"{dtype} {tuple(shape)}".encode(), digest_size=8)
    return f"{(total + int.from_bytes(header.digest(), 'little')) % MODULUS:016x}"


def hash_of(values: np.ndarray) -> str:
    """The hash of an array of the host that is whole, such as a tensor of a checkpoint."""
    flat = np.ascontiguousarray(values).reshape(-1)
    position = PartPosition.of(values.shape, tuple((0, size) for size in values.shape))
    return digest(ElementHash().sum_of(flat, 0, position), values.shape, str(values.dtype))


def hash_of_all(digests: Mapping[str, str]) -> str:
    """One hash of all tensors, from each one's by its key, whatever their order: 16 hexadecimal digits."""
    lines = "".join(f"{key} {digests[key]}\n" for key in sorted(digests))
    return hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()
