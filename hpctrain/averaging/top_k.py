"""Compression of an array to its k elements of largest magnitude: MSTopK of Shi et al., arXiv 2010.10458, made exact.

The paper finds two thresholds by bisection, in passes that only count. It takes all elements that reach the upper threshold, and
fills up from a window, at a random place, of the elements between both. Here a sample provides the first threshold, just low
enough that the k largest elements reach it. A single pass collects these candidates, and a partition of the candidates selects
the elements. If the sample is misleading (ties, arrays that are nearly all zeros, magnitudes that repeat with its stride), passes
that only count narrow the thresholds down until few candidates remain, or until the thresholds are adjacent numbers. In the
latter case the window contains only ties, so no larger element is ever left out for a smaller one.

`Selection` makes the passes, block by block. A magnitude is an integer, the bits of a floating-point number without its sign.
These integers have the order of the magnitudes, need no special case for subnormals, and place infinities and NaN last.

Elements that a message leaves out stay in their array (`TopK.subtract_from`) until a later message sends them: residual + sent =
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.backend.counter_random import key
from hpctrain.comm.sums import Compressor

_BLOCK = 32_768  # elements; their magnitudes and masks fit into a cache of the core
_COMMON_SHARE = 0.02  # share of a sample; partition is many times slower if this share has equal magnitudes
_UNSIGNED: dict[str, np.dtype] = {"float32": np.dtype(np.uint32), "float64": np.dtype(np.uint64)}


@dataclass(frozen=True)
class Band:
    """Choice of elements: all whose magnitude is at least `above`, and a window of those with magnitudes from `below` to `above`.

    Attributes:
        above: minimum magnitude of elements that are chosen unconditionally.
        below: minimum magnitude of elements of the band.
        first: index of the window's first element among the elements of the band, which are ordered by position.
        stop: index after the window's last element.
    """

    above: int
    below: int
    first: int = 0
    stop: int = 0


class Selection:
    """Passes over arrays of one dtype, with scratch memory. Compressors may share a selection if their calls never overlap.

    Args:
        dtype: "float32" or "float64".

    Attributes:
        unsigned: dtype of magnitudes.
        infinity: magnitude of an infinity.
        top: number above all magnitudes.
    """

    def __init__(self, dtype: str) -> None:
        self.unsigned = _UNSIGNED[dtype]
        self.infinity = int(np.array(np.inf, dtype).view(self.unsigned))
        self.top = 1 << (8 * self.unsigned.itemsize - 1)
        self._block = np.empty(_BLOCK, self.unsigned)
        self._mask = np.empty(_BLOCK, np.bool_)
        self._others = np.empty(_BLOCK, np.bool_)
        self._sorted = np.empty(0, self.unsigned)
        self._candidates = np.empty(0, self.unsigned)
        self._positions = np.empty(0, np.intp)

    def reserve(self, sorted_size: int, candidates: int) -> None:
        """Allocate memory for sorting magnitudes and for candidates with their positions.

        The memory only grows. Do not call this method during a step.
        """
        if sorted_size > self._sorted.size:
            self._sorted = np.empty(sorted_size, self.unsigned)
        if candidates > self._positions.size:
            self._candidates = np.empty(candidates, self.unsigned)
            self._positions = np.empty(candidates, np.intp)

    def counts(self, bits: np.ndarray, thresholds: Sequence[int]) -> list[int]:
        """Return, for each threshold, the number of elements of `bits` (unsigned, sign ignored) whose magnitude reaches it."""
        totals = [0] * len(thresholds)
        for start in range(0, bits.size, _BLOCK):
            magnitudes = self._magnitudes(bits[start : start + _BLOCK])
            mask = self._mask[: magnitudes.size]
            for number, threshold in enumerate(thresholds):
                np.greater_equal(magnitudes, threshold, out=mask)
                totals[number] += int(np.count_nonzero(mask))
        return totals

    def sampled(self, bits: np.ndarray, stride: int, rank: int) -> int:
        """Return the `rank`-th largest magnitude in a sample, which consists of every `stride`-th element of `bits`."""
        size = bits.size // stride
        sample = self._sorted[:size]
        np.bitwise_and(bits[: size * stride : stride], self.top - 1, out=sample)
        return self._ranked(sample, min(rank, size))

    def common(self, bits: np.ndarray, stride: int, rank: int) -> int | None:
        """Return the result of `sampled` if many elements of the sample have exactly this magnitude; otherwise None."""
        least = self.sampled(bits, stride, rank)
        sample = self._sorted[: bits.size // stride]
        return least if np.count_nonzero(sample == least) > _COMMON_SHARE * sample.size else None

    def threshold(self, bits: np.ndarray, rank: int) -> int:
        """Return the magnitude of the `rank`-th largest element, by a partition of all elements."""
        magnitudes = self._sorted[: bits.size]
        np.bitwise_and(bits, self.top - 1, out=magnitudes)
        return self._ranked(magnitudes, rank)

    def positions(self, bits: np.ndarray, band: Band, out: np.ndarray) -> int | None:
        """Write the ascending positions of the chosen elements to `out` (intp).

        Returns:
            Number of chosen elements; None if `out` is too small.
        """
        size = seen = 0  # positions written; elements of the band so far
        for start in range(0, bits.size, _BLOCK):
            magnitudes = self._magnitudes(bits[start : start + _BLOCK])
            seen += self._mark(magnitudes, band, seen)
            chosen = np.flatnonzero(self._mask[: magnitudes.size])
            if size + chosen.size > out.size:
                return None
            np.add(chosen, start, out=out[size : size + chosen.size])
            size += chosen.size
        return size

    def candidates(self, bits: np.ndarray, least: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return (magnitudes, positions) of all elements that reach `least`; None if the scratch memory is too small for them.

        The arrays are views of the scratch memory.
        """
        size = self.positions(bits, Band(least, least), self._positions)
        if size is None:
            return None
        positions, magnitudes = self._positions[:size], self._candidates[:size]
        np.take(bits, positions, out=magnitudes, mode="clip")
        np.bitwise_and(magnitudes, self.top - 1, out=magnitudes)
        return magnitudes, positions

    def _magnitudes(self, bits: np.ndarray) -> np.ndarray:
        """Return the magnitudes of a block, in scratch memory."""
        magnitudes = self._block[: bits.size]
        np.bitwise_and(bits, self.top - 1, out=magnitudes)
        return magnitudes

    def _mark(self, magnitudes: np.ndarray, band: Band, seen: int) -> int:
        """Mark the chosen elements of a block in the mask.

        Args:
            seen: number of elements of the band in earlier blocks.

        Returns:
            Number of elements of the band in this block.
        """
        mask = self._mask[: magnitudes.size]
        np.greater_equal(magnitudes, band.above, out=mask)
        if band.below == band.above:
            return 0
        others = self._others[: magnitudes.size]
        np.greater_equal(magnitudes, band.below, out=others)
        np.not_equal(others, mask, out=others)
        size = int(np.count_nonzero(others))
        first, stop = max(band.first - seen, 0), min(band.stop - seen, size)
        if first < stop:
            if stop - first < size:
                positions = np.flatnonzero(others)
                others[: positions[first]] = False
                others[positions[stop - 1] + 1 :] = False
            np.logical_or(mask, others, out=mask)
        return size

    @staticmethod
    def _ranked(magnitudes: np.ndarray, rank: int) -> int:
        """Return the `rank`-th largest element. The elements are reordered in place."""
        place = magnitudes.size - rank
        magnitudes.partition(place)
        return int(magnitudes[place])


_DENSE_SHARE = 0.1  # kept share above which all elements are partitioned, because most would be candidates
_SMALL_SIZE = 65_536  # elements up to which a partition of all is faster than passes
_SPARE_CANDIDATES = 4096  # candidates in addition to twice the number of kept elements
_SAMPLE_STRIDE = 127  # prime, so that the sample is not a single channel or row of a power of two elements
_THRESHOLDS_OF_A_PASS = 4  # counted in one pass, because reading from memory is the expensive part


def kept_at(size: int, density: float) -> int:
    """Return the number of elements that a message keeps out of `size` at a density in (0, 1]; at least 1 if `size` is not 0."""
    return min(size, max(1, round(size * density)))


class TopK(Compressor):
    """Compressor that sends the `kept` elements of largest magnitude: their values, then their positions (int32, ascending).

    If only some elements of the smallest kept magnitude fit, they are consecutive among the elements of this magnitude, from a
    place drawn from the seed and the step. Non-finite elements count as the largest, so the message of an array with non-finite
    elements contains at least one of them.

    Args:
        size: number of elements of an array, below 2**31.
        dtype: "float32" or "float64".
        kept: number of kept elements, from 1 to size; 0 if size is 0.
        seed: integers that distinguish messages with separate draws, such as (seed of the run, index of the slice).
        scratch: scratch memory shared with compressors whose calls never overlap; None: separate memory.

    Raises:
        ValueError: size or kept is out of range.
    """

    def __init__(self, size: int, dtype: str, kept: int, *, seed: Sequence[int] = (0,), scratch: Selection | None = None) -> None:
        super().__init__(size, dtype)
        if not 0 <= size < 2**31:
            raise ValueError(
                f"An array has {size} elements, but must have from 0 to {2**31 - 1}, because positions are 32-bit integers."
            )
        self._seed, self._step = tuple(seed), 0
        self._selection = Selection(dtype) if scratch is None else scratch
        self._most_places = np.empty(max(kept, 0), np.intp)  # intp, so that NumPy need not convert positions for indexing
        self._most_values = np.empty(max(kept, 0), self.dtype)
        self._places, self._kept_values = self._most_places, self._most_values
        self.kept, self._capacity, self._partitions_all = kept, 0, True
        self.keep(kept)

    def keep(self, kept: int) -> None:
        """Set the number of kept elements; at most the initial number, for which memory was allocated.

        Raises:
            ValueError: kept is out of range.
        """
        least, most = min(self.size, 1), min(self.size, self._most_places.size)
        if not least <= kept <= most:
            raise ValueError(f"kept is {kept}, but must be from {least} to {max(least, most)} for {self.size} elements.")
        self.kept = kept
        self.message_size = kept * (self.dtype.itemsize + np.dtype(np.int32).itemsize)
        self._partitions_all = kept > _DENSE_SHARE * self.size or self.size <= _SMALL_SIZE
        self._capacity = 0 if self._partitions_all else 2 * kept + _SPARE_CANDIDATES
        self._places, self._kept_values = self._most_places[:kept], self._most_values[:kept]
        self._places[...] = np.arange(kept)
        self._selection.reserve(
            self.size if self._partitions_all else max(self._capacity, self.size // _SAMPLE_STRIDE), self._capacity
        )

    def begin_step(self, step: int) -> None:
        self._step = step

    def values(self, message: np.ndarray) -> np.ndarray:
        """Return a view of the kept elements (kept,) in a message."""
        return message[: self.kept * self.dtype.itemsize].view(self.dtype)

    def positions(self, message: np.ndarray) -> np.ndarray:
        """Return a view of the positions (kept,) int32, ascending, in a message."""
        return message[self.kept * self.dtype.itemsize : self.message_size].view(np.int32)

    def compress(self, values: np.ndarray, message: np.ndarray) -> None:
        if self.kept < self.size:
            self._choose(values.view(self._selection.unsigned), self._places)
        self.positions(message)[...] = self._places
        np.take(values, self._places, out=self.values(message), mode="clip")

    def decompress(self, message: np.ndarray, values: np.ndarray) -> None:
        values[...] = 0
        values[self._places_of(message)] = self.values(message)

    def add_to(self, message: np.ndarray, values: np.ndarray) -> None:
        places = self._places_of(message)
        np.take(values, places, out=self._kept_values, mode="clip")
        np.add(self._kept_values, self.values(message), out=self._kept_values)
        values[places] = self._kept_values

    def subtract_from(self, message: np.ndarray, values: np.ndarray) -> None:
        """Set the sent elements to zero, including non-finite ones."""
        values[self._places_of(message)] = 0

    def _places_of(self, message: np.ndarray) -> np.ndarray:
        """Return the positions in a message, copied to memory of this object."""
        self._places[...] = self.positions(message)
        return self._places

    def _choose(self, bits: np.ndarray, positions: np.ndarray) -> None:
        """Write the positions of the elements to keep."""
        if self._partitions_all:
            rank = round(self.kept / _SAMPLE_STRIDE)
            guess = self._selection.common(bits, _SAMPLE_STRIDE, rank) if self.size > _SMALL_SIZE and rank else None
            self._choose_from(bits, positions, guess)
            return
        # At least `kept` elements reach the threshold of this rank, unless the sample is off by more than 4 sigma.
        expected = self.kept / _SAMPLE_STRIDE
        rank = math.ceil(expected + 4 * math.sqrt(expected)) + 2
        least = self._selection.sampled(bits, _SAMPLE_STRIDE, rank)
        candidates = self._selection.candidates(bits, least)
        if candidates is None or candidates[1].size < self.kept:
            lower, upper, chosen, reached = self._narrowed(bits, least)
            if reached > self._capacity:
                self._fill(bits, Band(upper, lower), chosen, reached - chosen, positions)
                return
            candidates = self._selection.candidates(bits, lower)
        assert candidates is not None, "more elements reach the threshold than were counted"
        self._choose_from(candidates[0], positions)
        np.take(candidates[1], positions, out=positions, mode="clip")

    def _choose_from(self, bits: np.ndarray, positions: np.ndarray, guess: int | None = None) -> None:
        """Write the positions of the elements to keep. If `guess` is not the smallest of them, find it by a partition."""
        least = self._selection.threshold(bits, self.kept) if guess is None else guess
        reached, chosen = self._selection.counts(bits, (least, least + 1))
        if chosen < self.kept <= reached:
            self._fill(bits, Band(least + 1, least), chosen, reached - chosen, positions)
        else:
            self._choose_from(bits, positions)

    def _fill(self, bits: np.ndarray, band: Band, chosen: int, ties: int, positions: np.ndarray) -> None:
        """Write the positions of the elements to keep: the `chosen` ones above a band, and a window of the `ties` ones in it."""
        wanted = self.kept - chosen
        first = 0
        if wanted < ties:
            low, high = key("top-k window", *self._seed, self._step)
            first = (low + (high << 32)) % (ties - wanted + 1)
        written = self._selection.positions(bits, Band(band.above, band.below, first, first + wanted), positions)
        assert written == self.kept, f"{written} elements are chosen, not {self.kept}"

    def _narrowed(self, bits: np.ndarray, guess: int) -> tuple[int, int, int, int]:
        """Narrow the thresholds by counting, until few elements reach the lower one or the thresholds are adjacent numbers.

        Returns:
            (lower threshold, upper threshold, number of elements that reach the upper one, number that reach the lower one).
            Fewer than `kept` elements reach the upper threshold, and at least `kept` reach the lower one.
        """
        lower, upper, chosen, reached = 0, self._selection.top, 0, self.size
        thresholds = [1, guess, guess + 1]  # so that zeros and other ties are found in the first pass
        while reached > self._capacity and upper - lower > 1:
            thresholds = sorted({threshold for threshold in thresholds if lower < threshold < upper})
            for threshold, count in zip(thresholds, self._selection.counts(bits, thresholds), strict=True):
                if count >= self.kept:
                    lower, reached = threshold, count
                elif threshold < upper:
                    upper, chosen = threshold, count
            gap = upper - lower
            thresholds = [lower + gap * number // (_THRESHOLDS_OF_A_PASS + 1) for number in range(1, _THRESHOLDS_OF_A_PASS + 1)]
            thresholds = thresholds if gap > _THRESHOLDS_OF_A_PASS else list(range(lower + 1, upper))
        return lower, upper, chosen, reached
