"""An arena that holds names instead of bytes: which value was written where last, and by whom."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable
from dataclasses import dataclass

from hpctrain.nn.compile.plan import Region

#: (step, position of the input); the loss is (-1, -1).
Contributions = frozenset[tuple[int, int]]

#: The name of what a stretch of memory holds.
Value = tuple[Hashable, ...]


class InvalidPlanError(AssertionError):
    """A plan that would compute wrong numbers: a defect of hpctrain or of an operator's declarations, nothing that a user did."""


def activation(tensor: int) -> Value:
    """A tensor, as its producer wrote it."""
    return ("activation", tensor)


def gradient(tensor: int, contributions: Contributions) -> Value:
    """A tensor's gradient, when so many readers of the tensor have added to it."""
    return ("gradient", tensor, contributions)


@dataclass
class _Stretch:
    """Bytes that one write has filled. values: the names of what they hold, several where there are views."""

    region: Region
    values: set[Value]
    writer: str


class SymbolicMemory:
    """Stretches that were written and not overwritten since, not even in part; they never overlap. Empty ones hold anything."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stretches: dict[int, _Stretch] = {}
        self._overwritten: dict[Value, str] = {}

    def write(self, region: Region, value: Value, writer: str) -> None:
        """`region` holds `value` from now on, and whatever overlaps it is lost."""
        if not region.size_bytes:
            return
        for start in self._overlapped(region):
            lost = self._stretches.pop(start)
            self._starts.remove(start)
            self._overwritten |= dict.fromkeys(lost.values, writer)
        self._starts.insert(bisect_left(self._starts, region.offset), region.offset)
        self._stretches[region.offset] = _Stretch(region, {value}, writer)
        self._overwritten.pop(value, None)

    def add_name(self, region: Region, value: Value) -> None:
        """Let the content of `region` be `value`, too."""
        if region.size_bytes:
            self._stretches[region.offset].values.add(value)

    def read(self, region: Region, value: Value, reader: str, name: str) -> None:
        """Raise unless `region` holds exactly `value`.

        Args:
            reader, name: who reads what, for the error.

        Raises:
            InvalidPlanError: `region` does not hold exactly `value`.
        """
        stretch = self._stretches.get(region.offset)
        if not region.size_bytes or (stretch is not None and stretch.region == region and value in stretch.values):
            return
        place = f"{reader} reads {name} at bytes [{region.offset}, {region.end})"
        if value in self._overwritten:
            raise InvalidPlanError(f"{place}, but {self._overwritten[value]} has overwritten it.")
        raise InvalidPlanError(f"{place}, but {self._writer_at(region)}.")

    def contributions(self, region: Region, tensor: int) -> Contributions | None:
        """The steps that have added to the gradient of `tensor` in `region`; None where that is not what it holds."""
        stretch = self._stretches.get(region.offset)
        for value in stretch.values if stretch is not None and stretch.region == region else ():
            if value[:2] == ("gradient", tensor) and isinstance(value[2], frozenset):
                return value[2]
        return None

    def _writer_at(self, region: Region) -> str:
        writers = [self._stretches[start].writer for start in self._overlapped(region)]
        return f"it is not complete there: {', then '.join(writers)} wrote last" if writers else "nobody has written it there"

    def _overlapped(self, region: Region) -> list[int]:
        """Where the stretches start that share a byte with `region`."""
        first = bisect_right(self._starts, region.offset) - 1
        if first < 0 or self._stretches[self._starts[first]].region.end <= region.offset:
            first += 1
        return self._starts[first : bisect_left(self._starts, region.end)]
