"""Arrays in 16 bits an element: half of the bytes of float32, a quarter of those of float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import numpy as np

from hpctrain.compress.base import Compressor
from hpctrain.compress.codes16 import Bfloat16Codes, Codes, Float16Codes, OddRounding

Bits16 = Literal["bfloat16", "float16"]
_BLOCK = 16_384  # elements: their scratch memory stays in a cache of the core
_LARGEST = 14  # exponent of the largest float16 in a message: rounded up it is finite still
_MOST = {"float32": 126, "float64": 1022}  # the largest exponent of a scale that has a normal number for an inverse


class Cast16(Compressor):
    """All elements, rounded once, to nearest even, to bfloat16 or float16: 2 bytes each; NaN and infinities stay not finite.

    bfloat16 has the range of float32 and 8 binary digits; what rounds to 2**128 becomes infinite. float16 has 11 digits, and one
    power of two as a scale for all of a message, in its first 2 bytes (int16): that of the largest element. Elements below
    2**-28 of it have fewer digits, those below 2**-39 become zero.

    Args:
        size: elements of an array. dtype: "float32" or "float64". bits: "bfloat16" or "float16".
    """

    def __init__(self, size: int, dtype: str, bits: Bits16) -> None:
        super().__init__(size, dtype)
        self._header = 2 if bits == "float16" else 0
        self.message_size = self._header + 2 * size
        block = min(size, _BLOCK)
        self._codes: Codes = Float16Codes(block) if bits == "float16" else Bfloat16Codes(block)
        self._single = np.empty(block, np.float32)
        self._full = np.empty(block, self.dtype)
        self._rounding = OddRounding(block) if self.dtype == np.float64 else None

    def compress(self, values: np.ndarray, message: np.ndarray) -> None:
        scale = 1.0
        with np.errstate(all="ignore"):  # underflow to zero and infinite numbers are results
            if self._header:
                exponent = self._exponent(values)
                message[:2].view(np.int16)[0], scale = exponent, 2.0**exponent
            for block, codes in self._blocks(values, message):
                self._codes.encode(self._narrowed(block, scale), codes)

    def decompress(self, message: np.ndarray, values: np.ndarray) -> None:
        for block, codes in self._blocks(values, message):
            block[...] = self._decoded(message, codes)

    def add_to(self, message: np.ndarray, values: np.ndarray) -> None:
        for block, codes in self._blocks(values, message):
            np.add(block, self._decoded(message, codes), out=block)

    def subtract_from(self, message: np.ndarray, values: np.ndarray) -> None:
        """Leave the rounding errors, which are numbers of the dtype; NaN where the message is not finite."""
        with np.errstate(invalid="ignore"):
            for block, codes in self._blocks(values, message):
                np.subtract(block, self._decoded(message, codes), out=block)

    def _blocks(self, values: np.ndarray, message: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(elements, their codes) block by block."""
        codes = message[self._header :].view(np.uint16)
        for start in range(0, self.size, _BLOCK):
            yield values[start : start + _BLOCK], codes[start : start + _BLOCK]

    def _exponent(self, values: np.ndarray) -> int:
        """The exponent of the scale of a message; 0 where there is nothing to be scaled, or no finite largest element."""
        largest = max(float(values.max()), -float(values.min())) if self.size else 0.0
        if largest == 0 or not math.isfinite(largest):
            return 0
        return min(_LARGEST + 1 - math.frexp(largest)[1], _MOST[self.dtype.name])

    def _narrowed(self, block: np.ndarray, scale: float) -> np.ndarray:
        """A block times the scale as float32 that rounds to 16 bits as the block itself does."""
        if scale != 1:
            block = np.multiply(block, self.dtype.type(scale), out=self._full[: block.size])
        if self._rounding is None:
            return block
        narrowed = self._single[: block.size]
        self._rounding.narrow(block, narrowed)
        return narrowed

    def _decoded(self, message: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """The values of codes, without the scale."""
        values = self._single[: codes.size]
        self._codes.decode(codes, values)
        if not self._header:
            return values
        scale = self.dtype.type(2.0 ** -int(message[:2].view(np.int16)[0]))
        scaled = self._full[: codes.size]
        np.multiply(values, scale, out=scaled, dtype=self.dtype)
        return scaled
