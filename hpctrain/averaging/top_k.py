"""The k elements of largest magnitude as a message: MSTopK of Shi et al., arXiv 2010.10458, made exact.

The paper bisects for two thresholds by passes that only count, takes all that reach the upper one, and fills up from a window,
at a random place, of those between the two. Here a sample gives the first threshold, just low enough that the k largest
elements are among those that reach it: a single pass collects these candidates, and a partition of them ends it. Where the
sample deceives (ties, arrays that are nearly all zeros, magnitudes that repeat with its stride), passes that only count narrow
the thresholds down to the candidates, or to two adjacent numbers. So the window holds ties alone, and no larger element is ever
left out for a smaller one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hpctrain.backend.counter_random import key
from hpctrain.compress.base import Compressor
from hpctrain.compress.selection import Band, Selection

_DENSE = 0.1  # of elements kept: beyond, candidates would be most of them, so that all are partitioned
_SMALL = 65_536  # elements: so few are partitioned in less time than passes take
_SPARE = 4096  # candidates beside twice the kept
_STRIDE = 127  # prime, so that no channel or row of a power of two elements is all of the sample
_THRESHOLDS = 4  # counted in one pass, of which the first reading of memory is the dear part


def kept_at(size: int, density: float) -> int:
    """Elements that a message keeps of `size` at a density in (0, 1]: to the nearest integer, and never none of some."""
    return min(size, max(1, round(size * density)))


class TopK(Compressor):
    """The `kept` elements of largest magnitude: their values, then their positions, int32 and ascending.

    Of elements of equal magnitude, where not all are kept, those are that lie one after another from a place drawn from the
    seed and the step. Not finite elements count as the largest: if an array has any, its message has.

    Args:
        size: elements of an array, below 2**31. dtype: "float32" or "float64". kept: 1 to size; 0 where size is.
        seed: integers that tell messages apart that shall draw differently, such as (seed of the run, number of the slice).
        scratch: shared with others whose calls never overlap with this one's; None: of its own.

    Raises:
        ValueError: size or kept out of range.
    """

    def __init__(self, size: int, dtype: str, kept: int, *, seed: Sequence[int] = (0,), scratch: Selection | None = None) -> None:
        super().__init__(size, dtype)
        if not 0 <= size < 2**31:
            raise ValueError(f"An array has {size} elements, but positions are 32-bit integers: at most {2**31 - 1}.")
        self._seed, self._step = tuple(seed), 0
        self._selection = Selection(dtype) if scratch is None else scratch
        self._most_places = np.empty(max(kept, 0), np.intp)  # what NumPy indexes with, where it need not convert positions
        self._most_values = np.empty(max(kept, 0), self.dtype)
        self._places, self._kept_values = self._most_places, self._most_values
        self.kept, self._capacity, self._partitions_all = kept, 0, True
        self.keep(kept)

    def keep(self, kept: int) -> None:
        """Have messages of so many elements from now on: no more than at first, as memory is made for those.

        Raises:
            ValueError: kept out of range.
        """
        least, most = min(self.size, 1), min(self.size, self._most_places.size)
        if not least <= kept <= most:
            raise ValueError(f"kept is {kept}, but of {self.size} elements {least} to {max(least, most)} can be kept.")
        self.kept = kept
        self.message_size = kept * (self.dtype.itemsize + np.dtype(np.int32).itemsize)
        self._partitions_all = kept > _DENSE * self.size or self.size <= _SMALL
        self._capacity = 0 if self._partitions_all else 2 * kept + _SPARE
        self._places, self._kept_values = self._most_places[:kept], self._most_values[:kept]
        self._places[...] = np.arange(kept)
        self._selection.reserve(self.size if self._partitions_all else max(self._capacity, self.size // _STRIDE), self._capacity)

    def begin_step(self, step: int) -> None:
        self._step = step

    def values(self, message: np.ndarray) -> np.ndarray:
        """View of the kept elements (kept,) in a message."""
        return message[: self.kept * self.dtype.itemsize].view(self.dtype)

    def positions(self, message: np.ndarray) -> np.ndarray:
        """View of the positions (kept,) int32, ascending, in a message."""
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
        """Set what was sent to zero; what is not finite is then gone, too."""
        values[self._places_of(message)] = 0

    def _places_of(self, message: np.ndarray) -> np.ndarray:
        """The positions in a message, in memory of this object."""
        self._places[...] = self.positions(message)
        return self._places

    def _choose(self, bits: np.ndarray, positions: np.ndarray) -> None:
        """Write the positions of the elements to keep."""
        if self._partitions_all:
            if not self._choose_ties(bits, positions):
                self._choose_of(bits, positions)
            return
        least = self._selection.sampled(bits, _STRIDE, self._rank_in_sample())
        candidates = self._selection.candidates(bits, least)
        if candidates is None or candidates[1].size < self.kept:
            lower, upper, chosen, reached = self._narrowed(bits, least)
            if reached > self._capacity:
                self._fill(bits, Band(upper, lower), chosen, reached - chosen, positions)
                return
            candidates = self._selection.candidates(bits, lower)
        assert candidates is not None, "no more reach it than were counted"
        self._choose_of(candidates[0], positions)
        np.take(candidates[1], positions, out=positions, mode="clip")

    def _choose_ties(self, bits: np.ndarray, positions: np.ndarray) -> bool:
        """Write the positions of the elements to keep, if the smallest of them has the magnitude of many others."""
        rank = round(self.kept / _STRIDE)
        least = self._selection.common(bits, _STRIDE, rank) if self.size > _SMALL and rank else None
        if least is None:
            return False
        reached, chosen = self._selection.counts(bits, (least, least + 1))
        if not chosen < self.kept <= reached:
            return False
        self._fill(bits, Band(least + 1, least), chosen, reached - chosen, positions)
        return True

    def _rank_in_sample(self) -> int:
        """Elements of the sample that the first threshold lets through: more than kept of all, but for bad luck of 4 sigma."""
        expected = self.kept / _STRIDE
        return math.ceil(expected + 4 * math.sqrt(expected)) + 2

    def _choose_of(self, bits: np.ndarray, positions: np.ndarray) -> None:
        """Write the positions of the elements to keep, by partition of all of `bits`."""
        least = self._selection.threshold(bits, self.kept)
        reached, chosen = self._selection.counts(bits, (least, least + 1))
        self._fill(bits, Band(least + 1, least), chosen, reached - chosen, positions)

    def _fill(self, bits: np.ndarray, band: Band, chosen: int, ties: int, positions: np.ndarray) -> None:
        """Write the positions of `chosen` elements above a band, and of a window of those in it, `ties` in all."""
        wanted = self.kept - chosen
        first = 0
        if wanted < ties:
            low, high = key("top-k window", *self._seed, self._step)
            first = (low + (high << 32)) % (ties - wanted + 1)
        written = self._selection.positions(bits, Band(band.above, band.below, first, first + wanted), positions)
        assert written == self.kept, f"{written} elements are chosen, not {self.kept}"

    def _narrowed(self, bits: np.ndarray, guess: int) -> tuple[int, int, int, int]:
        """(lower, upper threshold, elements that reach upper: fewer than kept, that reach lower: no fewer), by counting.

        Either the lower one is reached by no more elements than there is room for, or the two are adjacent numbers.
        """
        lower, upper, chosen, reached = 0, self._selection.top, 0, self.size
        thresholds = [1, guess, guess + 1]  # zeros and other ties are seen at once
        while reached > self._capacity and upper - lower > 1:
            thresholds = sorted({threshold for threshold in thresholds if lower < threshold < upper})
            for threshold, count in zip(thresholds, self._selection.counts(bits, thresholds), strict=True):
                if count >= self.kept:
                    lower, reached = threshold, count
                elif threshold < upper:
                    upper, chosen = threshold, count
            gap = upper - lower
            thresholds = [lower + gap * number // (_THRESHOLDS + 1) for number in range(1, _THRESHOLDS + 1)]
            thresholds = thresholds if gap > _THRESHOLDS else list(range(lower + 1, upper))
        return lower, upper, chosen, reached
