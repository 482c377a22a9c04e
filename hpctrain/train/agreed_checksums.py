"""Checksums of several groups of ranks in a few numbers of a sum over all ranks, which tell whether each group's are equal.

n numbers h are equal exactly where n times the sum of h^2 is the square of the sum of h (Cauchy-Schwarz). A checksum of 32 bits
travels as two halves of 16 bits and their squares: in float64 sums over fewer than 2^21 ranks are exact in any order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_PER_GROUP = 4  # both halves and their squares
_HALF_BITS = 16
_HALF = (1 << _HALF_BITS) - 1


class AgreedChecksums:
    """The numbers of one rank, and what their sums over all ranks say.

    Args:
        alike: by kind, groups of positions that must have the same checksum; each position is in one group of a kind.
        position: of this rank.

    Attributes:
        size: of the numbers.
    """

    def __init__(self, alike: Sequence[Sequence[Sequence[int]]], position: int) -> None:
        self._counts = [len(positions) for groups in alike for positions in groups]
        starts = np.cumsum([0, *map(len, alike)])
        self._places = [
            int(start) + next(place for place, positions in enumerate(groups) if position in positions)
            for start, groups in zip(starts, alike, strict=False)
        ]
        self.size = 1 + _PER_GROUP * len(self._counts)

    def numbers(self, checksums: Sequence[int], *, found: bool) -> np.ndarray:
        """Return this rank's numbers, float64 (size,).

        Args:
            checksums: of each kind, below 2^32. found: this rank has found damage by itself.
        """
        numbers = np.zeros(self.size, np.float64)
        for place, checksum in zip(self._places, checksums, strict=True):
            low, high = checksum & _HALF, checksum >> _HALF_BITS
            numbers[_PER_GROUP * place : _PER_GROUP * (place + 1)] = low, high, low * low, high * high
        numbers[-1] = float(found)
        return numbers

    def are_well(self, sums: np.ndarray) -> bool:
        """Return whether the checksums of each group are equal, and no rank has found damage.

        Args:
            sums: of `numbers` over all ranks.
        """
        values: list[int] = [round(value) for value in sums.tolist()]
        for place, count in enumerate(self._counts):
            low, high, low_square, high_square = values[_PER_GROUP * place : _PER_GROUP * (place + 1)]
            if count * low_square != low * low or count * high_square != high * high:
                return False
        return values[-1] == 0
