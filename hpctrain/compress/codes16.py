"""Numbers in 16 bits: bfloat16 and float16 from float32, rounded to nearest even by integer arithmetic, and back.

NumPy knows no bfloat16, and its own rounding to float16 takes twenty times as long where results are denormal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

_EXPONENT = 0x7F800000  # of a float32
_SMALLEST = 113 << 23  # 2**-14, the smallest normal float16, as a float32
_UNIT = 13 << 23  # times 2**13 as a float32: from the exponent of a number to that whose last bit is the number's tenth
_INFINITE = int(np.float32(65520).view(np.uint32))  # what rounds to more than the largest float16
_ALL = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)  # the value of each float16


class Codes(ABC):
    """Codes of blocks of at most `size` numbers."""

    def __init__(self, size: int) -> None:
        self._first = np.empty(size, np.uint32)
        self._second = np.empty(size, np.uint32)

    @abstractmethod
    def encode(self, values: np.ndarray, codes: np.ndarray) -> None:
        """Write the codes (uint16) of `values` (float32): the nearest; of two the even one. Infinities and NaN stay such."""

    @abstractmethod
    def decode(self, codes: np.ndarray, values: np.ndarray) -> None:
        """Write the values (float32) of codes: exact."""


class Bfloat16Codes(Codes):
    """The upper halves of float32. The largest numbers, from 2**128 (1 - 2**-9) on, become infinite."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._mask = np.empty(size, np.bool_)

    def encode(self, values: np.ndarray, codes: np.ndarray) -> None:
        bits, rounded, mask = values.view(np.uint32), self._first[: values.size], self._mask[: values.size]
        np.right_shift(bits, 16, out=rounded)
        np.bitwise_and(rounded, 1, out=rounded)
        np.add(rounded, 0x7FFF, out=rounded)
        np.add(rounded, bits, out=rounded)
        np.right_shift(rounded, 16, out=rounded)
        np.copyto(codes, rounded, casting="unsafe")
        np.isnan(values, out=mask)
        if mask.any():
            codes[mask] = 0x7FFF

    def decode(self, codes: np.ndarray, values: np.ndarray) -> None:
        bits = values.view(np.uint32)
        np.copyto(bits, codes)
        np.left_shift(bits, 16, out=bits)


class Float16Codes(Codes):
    """IEEE float16. Numbers from 65520 on become infinite.

    A number is rounded by adding to it a power of two whose last bit is the last one that the number may keep.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._unit = np.empty(size, np.uint32)
        self._places = np.empty(size, np.intp)  # codes in the dtype that NumPy indexes with

    def encode(self, values: np.ndarray, codes: np.ndarray) -> None:
        bits, code, exponent = values.view(np.uint32), self._first[: values.size], self._second[: values.size]
        unit = self._unit[: values.size]
        np.bitwise_and(bits, 0x7FFFFFFF, out=code)
        if code.size and code.max() >= _INFINITE:
            np.copyto(codes.view(np.float16), values, casting="same_kind")
            return
        np.bitwise_and(code, _EXPONENT, out=exponent)
        np.maximum(exponent, _SMALLEST, out=exponent)
        np.add(exponent, _UNIT, out=unit)
        np.add(code.view(np.float32), unit.view(np.float32), out=code.view(np.float32))
        np.subtract(code, unit, out=code)  # the digits, as an integer
        np.right_shift(exponent, 13, out=exponent)
        np.add(code, exponent, out=code)
        np.subtract(code, _SMALLEST >> 13, out=code)
        np.right_shift(bits, 16, out=exponent)
        np.bitwise_and(exponent, 0x8000, out=exponent)
        np.bitwise_or(code, exponent, out=code)
        np.copyto(codes, code, casting="unsafe")

    def decode(self, codes: np.ndarray, values: np.ndarray) -> None:
        places = self._places[: codes.size]
        np.copyto(places, codes)
        np.take(_ALL, places, out=values, mode="clip")


class OddRounding:
    """float64 to float32 such that a second rounding, to fewer digits, gives what a single one would have given.

    An inexact result is that of its two neighbours whose last bit is odd (Boldo and Melquiond, IEEE Trans. Comput. 2008), so
    that it never lies on the border between two shorter numbers.

    Args:
        size: elements at most.
    """

    def __init__(self, size: int) -> None:
        self._back, self._magnitude = np.empty(size, np.float64), np.empty(size, np.float64)
        self._mask = np.empty(size, np.bool_)

    def narrow(self, values: np.ndarray, narrowed: np.ndarray) -> None:
        """Write float64 `values` as float32; infinities and NaN stay such."""
        back, magnitude = self._back[: values.size], self._magnitude[: values.size]
        mask, bits = self._mask[: values.size], narrowed.view(np.uint32)
        np.copyto(narrowed, values, casting="same_kind")
        np.abs(narrowed, out=back)
        np.abs(values, out=magnitude)
        np.greater(back, magnitude, out=mask)
        np.subtract(bits, mask, out=bits)  # towards zero
        np.not_equal(back, magnitude, out=mask)
        np.bitwise_or(bits, mask, out=bits)
