"""Arrays that several ranks hold alike, cut into parts of even size: a check looks at one of them, in turn."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpctrain.boxes import even_intervals


@dataclass(frozen=True)
class WatchedPiece:
    """Elements of an array that must be equal on several ranks.

    Attributes:
        name: of the whole array, in sentences. values: 1-D, on the host.
        parameter: its name, where that must be complete before they are read.
    """

    name: str
    values: np.ndarray
    parameter: str | None = None


Part = tuple[WatchedPiece, ...]


def cut(arrays: Sequence[WatchedPiece], *, most: int, least_bytes: int) -> tuple[Part, ...]:
    """At most `most` parts of even size, in order, of `least_bytes` or more where there is as much; at least one."""
    total_bytes = sum(piece.values.nbytes for piece in arrays)
    parts = max(1, min(most, total_bytes // max(1, least_bytes)))
    intervals = even_intervals(sum(piece.values.size for piece in arrays), parts)
    return tuple(tuple(_inside(arrays, begin, end)) for begin, end in intervals)


def _inside(arrays: Sequence[WatchedPiece], begin: int, end: int) -> Iterable[WatchedPiece]:
    """Pieces that make up elements [begin, end) of all arrays, one behind the other."""
    start = 0
    for piece in arrays:
        low, high = max(begin - start, 0), min(end - start, piece.values.size)
        if low < high:
            yield replace(piece, values=piece.values[low:high])
        start += piece.values.size


def digests(part: Part) -> np.ndarray:
    """The checksum (CRC-32) of each piece; uint32 (len(part),)."""
    return np.array([zlib.crc32(piece.values.data) for piece in part], np.uint32)
