"""Dividing one buffer of bytes into aligned parts."""

from __future__ import annotations

from hpctrain.backend.alignment import aligned
from hpctrain.backend.operators import Array


class Regions:
    """Parts of a buffer that is allocated later: `add` gives each its place, `total_bytes` is what the buffer must hold.

    Args:
        begin: where the first part lies, a multiple of 64.
    """

    def __init__(self, begin: int = 0) -> None:
        self.total_bytes = begin

    def add(self, size_bytes: int) -> slice:
        """The place of the next part."""
        start = self.total_bytes
        self.total_bytes = start + aligned(size_bytes)
        return slice(start, start + size_bytes)


def part(buffer: Array | None, place: slice) -> Array:
    """The bytes at `place`; an empty place needs no buffer."""
    if buffer is None:
        assert place.start == place.stop
        return None
    return buffer[place]
