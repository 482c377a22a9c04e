"""Windows from the short forms that layers take: one number, a pair, or four edges."""

from __future__ import annotations

from hpctrain.backend.specs import Edges, Pair, Window
from hpctrain.core.errors import ShapeError

PairLike = int | Pair
EdgesLike = int | Pair | Edges


def pair(value: PairLike, what: str, smallest: int = 1) -> Pair:
    """(rows, columns) from one number or a pair.

    Raises:
        ShapeError: a value below `smallest`; `what` names it.
    """
    rows, columns = (value, value) if isinstance(value, int) else value
    if min(rows, columns) < smallest:
        nearest = (max(rows, smallest), max(columns, smallest))
        raise ShapeError(f"A {what} of {(rows, columns)} is below {smallest}; the nearest legal one is {nearest}.")
    return rows, columns


def edges(padding: EdgesLike) -> Edges:
    """(top, bottom, left, right) from one number, (rows, columns) as torch has it, or the four edges.

    Raises:
        ShapeError: a negative edge, or another number of values.
    """
    values = (padding, padding) if isinstance(padding, int) else tuple(padding)
    if len(values) == 2:
        values = (values[0], values[0], values[1], values[1])
    if len(values) != 4:
        raise ShapeError(
            f"A padding {values} of {len(values)} values is none of one number, (rows, columns) and (top, bottom, left, right)."
        )
    if min(values) < 0:
        nearest = tuple(max(0, value) for value in values)
        raise ShapeError(f"A padding of {values} has a negative edge; the nearest legal one is {nearest}.")
    return values


def window(kernel: PairLike, stride: PairLike, padding: EdgesLike, dilation: PairLike = 1) -> Window:
    """The window of a convolution or pool.

    Raises:
        ShapeError: a kernel, stride or dilation below 1, or a negative padding.
    """
    return Window(pair(kernel, "kernel"), pair(stride, "stride"), edges(padding), pair(dilation, "dilation"))
