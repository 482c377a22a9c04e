"""Curves of braille dots, small enough for a terminal; of plain signs where it has no others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

Points = Sequence[tuple[float, float]]

_EMPTY = 0x2800
# Bits of the dots of a cell, by row from above and by column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_MARK, _PLAIN = "o", "."


def text_curve(
    dots: Points, marks: Points, width: int, height: int, label: Callable[[float], str], *, plain: bool = False
) -> list[str]:
    """Lines of a curve, the largest and the smallest value before the first and the last of them.

    Args:
        dots: (x, y) of the curve. marks: of points that stand out, as "o". width: columns, labels included. height: lines.
        label: of a value. plain: ASCII alone.
    """
    points = [(x, y) for x, y in (*dots, *marks) if math.isfinite(y)]
    if not points:
        return [" " * width] * height
    low, high = min(y for _, y in points), max(y for _, y in points)
    labels = [label(high), *[""] * (height - 2), label(low)]
    margin = max(map(len, labels))
    columns = max(1, width - margin - 1)
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    cells = [[_EMPTY] * columns for _ in range(height)]

    def place(x: float, y: float, across: int, down: int) -> tuple[int, int]:
        right = 0.0 if last == first else (x - first) / (last - first)
        below = 0.5 if high == low else (high - y) / (high - low)
        return round(right * (across - 1)), round(below * (down - 1))

    path = [place(x, y, 2 * columns, 4 * height) for x, y in dots if math.isfinite(y)]
    for column, row in (*path[:1], *_joined(path)):
        cells[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
    signs = [[_sign(cell, plain=plain) for cell in line] for line in cells]
    for x, y in marks:
        if math.isfinite(y):
            column, row = place(x, y, columns, height)
            signs[row][column] = _MARK
    return [f"{name.rjust(margin)} {''.join(line)}" for name, line in zip(labels, signs, strict=True)]


def _joined(path: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The dots of the straight lines from each place to the next one."""
    for (column, row), (next_column, next_row) in pairwise(path):
        length = max(abs(next_column - column), abs(next_row - row), 1)
        for k in range(1, length + 1):
            yield column + round(k * (next_column - column) / length), row + round(k * (next_row - row) / length)


def _sign(cell: int, *, plain: bool) -> str:
    if cell == _EMPTY:
        return " "
    return _PLAIN if plain else chr(cell)
