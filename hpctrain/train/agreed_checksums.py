"""Compares the checksums within several groups of ranks by a few numbers in one sum over all ranks.

n numbers h are equal exactly if n times the sum of h^2 equals the square of the sum of h (Cauchy-Schwarz). A 32-bit checksum is
sent as two halves of 16 bits and their squares. Their float64 sums over fewer than 2^21 ranks are exact in any order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_PER_GROUP = 4  # both halves and their squares
_HALF_BITS = 16
_HALF = (1 << _HALF_BITS) - 1


class AgreedChecksums:
    """Makes the numbers of one rank, and interprets their sums over all ranks.

    Args:
        alike: by kind, groups of positions that must have the same checksum; each position is in one group of a kind.
        position: of this rank.

    Attributes:
        size: how many numbers there are.
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
            checksums: of each kind, below 2^32. found: whether this rank has found damage by itself.
        """
        numbers = np.zeros(self.size, np.float64)
        for place, checksum in zip(self._places, checksums, strict=True):
            low, high = checksum & _HALF, checksum >> _HALF_BITS
            numbers[_PER_GROUP * place : _PER_GROUP * (place + 1)] = low, high, low * low, high * high
        numbers[-1] = float(found)
        return numbers

    def are_well(self, sums: np.ndarray) -> bool:
        """Return whether the checksums within each group are equal and no rank has found damage.

        Args:
            sums: the sum of `numbers` over all ranks.
        """
        values: list[int] = [round(value) for value in sums.tolist()]
        for place, count in enumerate(self._counts):
            low, high, low_square, high_square = values[_PER_GROUP * place : _PER_GROUP * (place + 1)]
            if count * low_square != low * low or count * high_square != high * high:
                return False
        return values[-1] == 0
