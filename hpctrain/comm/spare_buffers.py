"""Buffers of operations on their way: as many as there are at once, used again step after step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hpctrain.comm.base import Array


class SpareBuffers:
    """1-D buffers that nobody uses.

    Args:
        make: (elements, an array like them) -> a new buffer; by default one of NumPy's.
    """

    def __init__(self, make: Callable[[int, Array], Array] | None = None) -> None:
        self._make = _on_host if make is None else make
        self._spare: dict[tuple[int, Any], list[Array]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._spare.values()))

    def take(self, size: int, like: Array) -> Array:
        """A buffer of `size` elements, of the kind and dtype of `like`, whatever they hold; the caller's until given back."""
        spare = self._spare.setdefault((size, like.dtype), [])
        return spare.pop() if spare else self._make(size, like)

    def give_back(self, *buffers: Array) -> None:
        """Let the next ones have these."""
        for buffer in buffers:
            self._spare[buffer.size, buffer.dtype].append(buffer)


def _on_host(size: int, like: Array) -> Array:
    return np.empty_like(like, shape=(size,))
