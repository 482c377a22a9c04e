"""The plainest bfloat16: what faster casts and sums of 16-bit messages are held to."""

from __future__ import annotations

import numpy as np

from hpctrain.comm.sums import Compressor

#: the largest relative error of one rounding to nearest, of numbers that are not tiny
UNIT = 2.0**-8


def rounded(values: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 of each value, ties to even, in the dtype of the values; these are float32 numbers."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    near = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32)
    special = ~np.isfinite(values)
    return np.where(special, values, near.view(np.float32).astype(values.dtype))


class PlainBfloat16(Compressor):
    """Two bytes for each element."""

    def __init__(self, size: int, dtype: str) -> None:
        super().__init__(size, dtype)
        self.message_size = 2 * size

    def compress(self, values: np.ndarray, message: np.ndarray) -> None:
        message.view(np.uint16)[...] = (rounded(values).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)

    def decompress(self, message: np.ndarray, values: np.ndarray) -> None:
        values[...] = (message.view(np.uint16).astype(np.uint32) << 16).view(np.float32)

    def subtract_from(self, message: np.ndarray, values: np.ndarray) -> None:
        values -= (message.view(np.uint16).astype(np.uint32) << 16).view(np.float32)

    def add_to(self, message: np.ndarray, values: np.ndarray) -> None:
        values += (message.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
