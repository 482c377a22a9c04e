"""Passes over the magnitudes of an array, block by block: how many reach thresholds, and where they are.

A magnitude is taken as an integer, the bits of a floating-point number without its sign: integers of equal order, for which
denormal numbers are no special case, and above which lie infinities and NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_BLOCK = 32_768  # elements: their magnitudes and masks stay in a cache of the core
_COMMON = 0.02  # of a sample: partition takes many times as long where so many are equal
_UNSIGNED: dict[str, np.dtype] = {"float32": np.dtype(np.uint32), "float64": np.dtype(np.uint64)}


@dataclass(frozen=True)
class Band:
    """A choice of elements: all whose magnitude is at least `above`, and a window of the others that reach `below`.

    first, stop: the window, counted among these others in the order of their positions.
    """

    above: int
    below: int
    first: int = 0
    stop: int = 0


class Selection:
    """Passes over arrays of one dtype, and the scratch memory for them, which compressors that take turns may share.

    Args:
        dtype: "float32" or "float64".

    Attributes:
        unsigned: the dtype of magnitudes. infinity: the magnitude of an infinity. top: a number above all magnitudes.
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
        """Have memory for magnitudes to be sorted, and for candidates and their positions. Only grows; not during a step."""
        if sorted_size > self._sorted.size:
            self._sorted = np.empty(sorted_size, self.unsigned)
        if candidates > self._positions.size:
            self._candidates = np.empty(candidates, self.unsigned)
            self._positions = np.empty(candidates, np.intp)

    def counts(self, bits: np.ndarray, thresholds: Sequence[int]) -> list[int]:
        """For each threshold, the number of elements of `bits` (unsigned, of any sign) whose magnitude is at least that."""
        totals = [0] * len(thresholds)
        for start in range(0, bits.size, _BLOCK):
            magnitudes = self._magnitudes(bits[start : start + _BLOCK])
            mask = self._mask[: magnitudes.size]
            for number, threshold in enumerate(thresholds):
                np.greater_equal(magnitudes, threshold, out=mask)
                totals[number] += int(np.count_nonzero(mask))
        return totals

    def sampled(self, bits: np.ndarray, stride: int, rank: int) -> int:
        """The magnitude of which `rank` elements of a sample, every `stride`-th of `bits`, are at least as large."""
        size = bits.size // stride
        sample = self._sorted[:size]
        np.bitwise_and(bits[: size * stride : stride], self.top - 1, out=sample)
        return self._ranked(sample, min(rank, size))

    def common(self, bits: np.ndarray, stride: int, rank: int) -> int | None:
        """As `sampled`, where many of the sample have that magnitude; else None."""
        least = self.sampled(bits, stride, rank)
        sample = self._sorted[: bits.size // stride]
        return least if np.count_nonzero(sample == least) > _COMMON * sample.size else None

    def threshold(self, bits: np.ndarray, rank: int) -> int:
        """The magnitude of the element that is `rank`-th in descending order, by partition of all of them."""
        magnitudes = self._sorted[: bits.size]
        np.bitwise_and(bits, self.top - 1, out=magnitudes)
        return self._ranked(magnitudes, rank)

    def positions(self, bits: np.ndarray, band: Band, out: np.ndarray) -> int | None:
        """Write the ascending positions of the chosen elements into `out` (intp): how many; None if it is too small."""
        size = seen = 0  # positions written; elements of the band passed
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
        """(magnitudes, positions) of all elements that reach `least`, in memory of this object; None if it is too small."""
        size = self.positions(bits, Band(least, least), self._positions)
        if size is None:
            return None
        positions, magnitudes = self._positions[:size], self._candidates[:size]
        np.take(bits, positions, out=magnitudes, mode="clip")
        np.bitwise_and(magnitudes, self.top - 1, out=magnitudes)
        return magnitudes, positions

    def _magnitudes(self, bits: np.ndarray) -> np.ndarray:
        """The magnitudes of a block, in scratch memory."""
        magnitudes = self._block[: bits.size]
        np.bitwise_and(bits, self.top - 1, out=magnitudes)
        return magnitudes

    def _mark(self, magnitudes: np.ndarray, band: Band, seen: int) -> int:
        """Mark the chosen elements of a block in the mask. Returns how many lie in the band, after `seen` before them."""
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
        """The element that is `rank`-th in descending order; reorders them."""
        place = magnitudes.size - rank
        magnitudes.partition(place)
        return int(magnitudes[place])
