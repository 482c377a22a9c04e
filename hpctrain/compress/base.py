"""The seam between an array and a shorter message of it.

A compressor turns an array into a message and a message into an array; what a message leaves out is kept by `ErrorFeedback`.
Neither knows the other, nor how messages travel. Arrays are 1-D, contiguous, on the host, and of the size and dtype that a
compressor was made for; it owns all scratch memory that it needs, so that no call allocates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np


class Compressor(ABC):
    """Messages of arrays of one size and dtype.

    An array that holds something that is not finite has a message that does too, so that its receivers learn of it.

    Args:
        size: elements of an array. dtype: "float32" or "float64".

    Attributes:
        message_size: uint8 elements of a message, the same for every array, so that no receiver has to be told.
    """

    message_size: int

    def __init__(self, size: int, dtype: str) -> None:
        self.size = size
        self.dtype = np.dtype(dtype)

    def begin_step(self, step: int) -> None:  # noqa: B027  most choose nothing by chance
        """Let all that is chosen by chance in the next messages follow from `step`, so that a resumed run repeats them."""

    @abstractmethod
    def compress(self, values: np.ndarray, message: np.ndarray) -> None:
        """Write the message of `values`, which stay as they are, into `message` (message_size,) uint8."""

    @abstractmethod
    def decompress(self, message: np.ndarray, values: np.ndarray) -> None:
        """Write all of `values`: what the message says of them, zeros where it says nothing."""

    @abstractmethod
    def add_to(self, message: np.ndarray, values: np.ndarray) -> None:
        """Add what the message says to `values`, element by element."""

    @abstractmethod
    def subtract_from(self, message: np.ndarray, values: np.ndarray) -> None:
        """Leave in `values`, of which `message` was made, what it does not say: exactly, they were that plus what it says."""
