"""Whether numbers are finite, at the price of one pass."""

from __future__ import annotations

import math

import numpy as np


def all_finite(values: np.ndarray) -> bool:
    """Whether no element of a contiguous array is NaN or infinite.

    Costs one product of the array with itself. That may overflow where all elements are finite; only then is each one looked at.
    """
    flat = values.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        return math.isfinite(float(np.dot(flat, flat))) or bool(np.isfinite(flat).all())
