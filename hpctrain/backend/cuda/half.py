"""bfloat16 on the host, as uint16: the upper half of a float32."""

from __future__ import annotations

import numpy as np


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """float32 or float64 values rounded to bfloat16, to nearest even (float64 by way of float32); NaN becomes 0x7FFF."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where((bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000), np.uint16(0x7FFF), rounded)


def bfloat16_values(bits: np.ndarray) -> np.ndarray:
    """The float32 values of bfloat16 bits (uint16): exact."""
    return (np.ascontiguousarray(bits, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
