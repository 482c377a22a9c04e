"""Medians of interleaved measurements with bootstrap intervals: a benchmark's figures are those of pairs from the same round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES = 10_000
_LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A median and the percentile-bootstrap interval of 95 % around it."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def interval(values: Sequence[float], *, seed: int = 0) -> Interval:
    """The median of `values` and its interval; the rounds are resampled with replacement, with a fixed seed.

    Raises:
        ValueError: no values, or some that are not finite.
    """
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or not array.size or not np.isfinite(array).all():
        raise ValueError(f"A median needs at least one value, all of them finite and in one row; these are {values}.")
    drawn = np.random.default_rng(seed).integers(0, array.size, (_RESAMPLES, array.size))
    medians = np.median(array[drawn], axis=1)
    low, high = np.quantile(medians, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return Interval(float(np.median(array)), float(low), float(high))


def paired(function: Callable[..., float], *columns: Sequence[float], seed: int = 0) -> Interval:
    """The median over rounds of `function(one value of each column)`, all of one round, and its interval.

    Raises:
        ValueError: columns of different lengths, or as `interval`.
    """
    return interval([function(*row) for row in zip(*columns, strict=True)], seed=seed)


def ratio(numerators: Sequence[float], denominators: Sequence[float], *, seed: int = 0) -> Interval:
    """The median of the ratios of pairs, and its interval.

    Raises:
        ValueError: as `paired`.
    """
    return paired(lambda above, below: above / below, numerators, denominators, seed=seed)
