"""Receptive fields: which input rows a window reads to make given output rows, and what padding is left to do locally.

Gholami et al. 2018, section 2.3: output rows [o0, o1) of a window of extent k, stride s and padding p read input rows
[o0 s - p, (o1 - 1) s - p + k). Exact for any kernel, stride, padding, dilation and ceil mode, for uneven and empty shares.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.backend.specs import Pair, Window
from hpctrain.core.intervals import Interval


@dataclass(frozen=True)
class ReceptiveField:
    """Along one dim: input elements [start, stop), then `before` and `after` elements of padding around them.

    Nothing is read where start == stop. Where a window lies wholly in the padding, one element outside of the input is read
    instead (a zero), as an empty input would have no output. ceil: the last window may reach beyond `after`, as in the whole.
    """

    start: int
    stop: int
    before: int
    after: int
    ceil: bool = False


def receptive_field(size: int, output: Interval, *, extent: int, stride: int, padding: Interval) -> ReceptiveField:
    """The elements of an input of `size` that the output elements `output` read.

    Args:
        extent: from the first to the last tap, dilation included. padding: before and after the whole input.
    """
    begin, end = output
    if begin == end:
        return ReceptiveField(0, 0, 0, 0)
    first = begin * stride - padding[0]
    last = (end - 1) * stride - padding[0] + extent
    start, stop = max(first, 0), min(last, size)
    if start >= stop:
        return ReceptiveField(first, first + 1, 0, last - first - 1)
    if last > size + padding[1]:  # ceil mode: only the very last window does
        return ReceptiveField(start, size, start - first, padding[1], ceil=True)
    return ReceptiveField(start, stop, start - first, last - stop)


def window_receptive_field(
    window: Window, size: Pair, outputs: tuple[Interval, Interval]
) -> tuple[ReceptiveField, ReceptiveField]:
    """`receptive_field` of rows and columns for an image of `size` (H, W) and an output tile of (rows, columns)."""
    vertical, horizontal = (
        receptive_field(
            size[dim],
            outputs[dim],
            extent=window.extent[dim],
            stride=window.stride[dim],
            padding=window.padding[2 * dim : 2 * dim + 2],  # type: ignore[arg-type]
        )
        for dim in (0, 1)
    )
    return vertical, horizontal


def local_window(window: Window, vertical: ReceptiveField, horizontal: ReceptiveField) -> Window:
    """The same window on what a rank has read, with the padding that is left."""
    padding = (vertical.before, vertical.after, horizontal.before, horizontal.after)
    return Window(window.kernel, window.stride, padding, window.dilation)
