"""Arrays that several ranks hold alike, in parts of even size that are checked in turn; and guards of such arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpctrain.backend.arithmetic import Arithmetic, Array, Fetch, WatchedArrays
from hpctrain.backend.host_arithmetic import HostArithmetic
from hpctrain.core.intervals import even_intervals

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
        self._tables = [(numbers, arrays.checksums()) for numbers, arrays in _by_place(part)]

    def fetch(self) -> PartDigests:
        """Take the checksums of what the pieces hold at this point of the work; does not wait."""
        return PartDigests(len(self.part), [(numbers, table.fetch()) for numbers, table in self._tables])


class PartDigests:
    """Implements `Fetch`: the checksums (CRC-32) of a part's pieces on their way; uint32 (pieces,)."""

    def __init__(self, count: int, fetches: Sequence[tuple[Sequence[int], Fetch]]) -> None:
        self._count, self._fetches = count, fetches

    def result(self) -> np.ndarray:
        """Wait for the checksums, and return them in the order of the pieces."""
        digests = np.zeros(self._count, np.uint32)
        for numbers, fetch in self._fetches:
            digests[numbers] = fetch.result()
        return digests


class PartGuard:
    """Detects changes of a part's pieces between two writes. Made at set-up.

    Attributes:
        found: names of the pieces that had changed when a change was first seen; empty if none has.
        remembered: whether the right values are known.
    """

    def __init__(self, part: Part) -> None:
        self._part = tuple(piece for piece in part if piece.values.size)
        self._guards = [(numbers, arrays.guard()) for numbers, arrays in _by_place(self._part)]
        self._on_host = all(piece.arithmetic.on_host for piece in self._part)
        self._asked: list[tuple[Sequence[int], Fetch]] = []
        self.remembered = False
        self.found: tuple[str, ...] = ()

    def remember(self) -> None:
        """Remember the current values as right, just after they were written."""
        for _, guard in self._guards:
            guard.remember()
        self.remembered = True

    def write(self, write: Callable[[], None]) -> None:
        """Compare the pieces, call `write`, which writes to them, and remember them."""
        self.compare()
        write()
        self.remember()

    def compare(self) -> None:
        """Compare the pieces with the remembered values; remember them if there are none."""
        if not self.remembered:
            self.remember()
            return
        for _, guard in self._guards:
            guard.compare()
        if self._on_host:  # the result needs no wait
            self.look()
            self.tell()

    def look(self) -> None:
        """Request the findings of all comparisons so far; `tell` waits for them, if pieces are not on the host."""
        self._asked = [(numbers, guard.fetch_changed()) for numbers, guard in self._guards]

    def tell(self) -> None:
        """Update `found` to the latest `look`."""
        changed = sorted(numbers[place] for numbers, fetch in self._asked for place in np.flatnonzero(fetch.result()).tolist())
        self.found = self.found or tuple(self._part[number].name for number in changed)
        self._asked = []

    def verify(self) -> None:
        """Compare now, and wait for the findings."""
        self.compare()
        self.look()
        self.tell()

    def forget(self) -> None:
        """Forget the remembered values, after something else has written. The next comparison remembers new ones."""
        self.remembered = False


def _by_place(part: Part) -> list[tuple[list[int], WatchedArrays]]:
    """Return the numbers and the watched arrays of the pieces on each arithmetic."""
    places: dict[int, list[int]] = {}
    for number, piece in enumerate(part):
        places.setdefault(id(piece.arithmetic), []).append(number)
    return [
        (numbers, part[numbers[0]].arithmetic.watched([part[number].values for number in numbers])) for numbers in places.values()
    ]
