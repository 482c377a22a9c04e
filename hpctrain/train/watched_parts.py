"""Arrays that several ranks hold alike, cut into parts of even size: a check looks at one of them, in turn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpctrain.backend.arithmetic import Arithmetic, Array, Fetch
from hpctrain.backend.host_arithmetic import HostArithmetic
from hpctrain.boxes import even_intervals

_HOST = HostArithmetic()


@dataclass(frozen=True)
class WatchedPiece:
    """Elements of an array that must be equal on several ranks.

    Attributes:
        name: of the whole array, in sentences. values: 1-D, of whole 32-bit words.
        parameter: its name, where that must be complete before they are read. arithmetic: of where they lie.
    """

    name: str
    values: Array
    parameter: str | None = None
    arithmetic: Arithmetic = _HOST


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


class PartChecksums:
    """The checksums of a part's pieces, wherever they lie. Made at set-up; its memory is there from then on.

    Attributes:
        part: as given. names: of its pieces.
    """

    def __init__(self, part: Part) -> None:
        self.part, self.names = part, [piece.name for piece in part]
        places: dict[int, list[int]] = {}
        for number, piece in enumerate(part):
            places.setdefault(id(piece.arithmetic), []).append(number)
        self._tables = [
            (numbers, part[numbers[0]].arithmetic.watched([part[number].values for number in numbers]).checksums())
            for numbers in places.values()
        ]

    def fetch(self) -> PartDigests:
        """Take the checksums of what the pieces hold at this point of the work; does not wait."""
        return PartDigests(len(self.part), [(numbers, table.fetch()) for numbers, table in self._tables])


class PartDigests:
    """Implements `Fetch`: the checksums (CRC-32) of a part's pieces on their way; uint32 (pieces,)."""

    def __init__(self, count: int, fetches: Sequence[tuple[Sequence[int], Fetch]]) -> None:
        self._count, self._fetches = count, fetches

    def result(self) -> np.ndarray:
        """Wait for them, and give them in the order of the pieces."""
        digests = np.zeros(self._count, np.uint32)
        for numbers, fetch in self._fetches:
            digests[numbers] = fetch.result()
        return digests
