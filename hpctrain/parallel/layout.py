"""Layouts of a tensor over the ranks of a split group, with one box per rank, and the receptive fields that determine boxes.

A tensor of the graph always lies in a partition (SAMPLES, TILES or CHANNELS): every element has one owner, which also owns its
gradient. An operation that needs elements of other ranks, such as a halo or the whole tensor, reads a separate box whose gradient
is a partial sum; see `hpctrain.parallel.moves`.

A receptive field contains the input rows that a window reads for given output rows, and the padding that remains to be applied
locally. Gholami et al. 2018, section 2.3: output rows [o0, o1) of a window of extent k, stride s and padding p read input rows
[o0 s - p, (o1 - 1) s - p + k). This is exact for any kernel, stride, padding, dilation and ceil mode, and for uneven and empty
shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from hpctrain.backend.specs import Pair, Shape, Window
from hpctrain.core.intervals import Box, Interval, consecutive, even_intervals, replace_dim, whole


class LayoutKind(StrEnum):
    """Kind of a layout: split by the split group's samples, by tiles of the images, or by channels (features).

    NEEDED is not a split: it describes the boxes that an operation reads. `hpctrain plan show` prints the values.
    """

    SAMPLES = "samples"
    TILES = "rows"
    CHANNELS = "channels"
    NEEDED = "needed"


@dataclass(frozen=True)
class Layout:
    """The elements of a tensor that each rank of the split group holds.

    Attributes:
        shape: shape of the tensor for all samples of the group.
        boxes: box of each rank.
    """

    kind: LayoutKind
    shape: Shape
    boxes: tuple[Box, ...]

    @property
    def is_partition(self) -> bool:
        """Whether every element has exactly one owner."""
        return self.kind is not LayoutKind.NEEDED

    def same_boxes(self, other: Layout) -> bool:
        """Return whether every rank holds the same elements in both layouts."""
        return self.boxes == other.boxes


def samples(shape: Shape, counts: Sequence[int]) -> Layout:
    """Return the layout in which rank r holds `counts[r]` whole samples. The ranks' samples are consecutive, in rank order."""
    assert sum(counts) == shape[0]
    box = whole(shape)
    return Layout(LayoutKind.SAMPLES, shape, tuple(replace_dim(box, 0, interval) for interval in consecutive(counts)))


def channels(shape: Shape, intervals: Sequence[Interval]) -> Layout:
    """Return the layout in which rank r holds channels (or features) `intervals[r]` of all samples."""
    box = whole(shape)
    return Layout(LayoutKind.CHANNELS, shape, tuple(replace_dim(box, -1, interval) for interval in intervals))


def tiles(shape: Shape, tiles: Pair) -> Layout:
    """Return the layout of images (N, H, W, C) in (vertical, horizontal) `tiles`.

    Rank r holds tile (r // horizontal, r % horizontal). The cuts depend only on the extent, so tensors of the same height are
    always cut alike.
    """
    vertical, horizontal = even_intervals(shape[1], tiles[0]), even_intervals(shape[2], tiles[1])
    box = whole(shape)
    boxes = (
        replace_dim(replace_dim(box, 1, vertical[rank // tiles[1]]), 2, horizontal[rank % tiles[1]])
        for rank in range(tiles[0] * tiles[1])
    )
    return Layout(LayoutKind.TILES, shape, tuple(boxes))


def everything(shape: Shape, ranks: int) -> Layout:
    """Return the layout in which every rank reads the whole tensor."""
    return Layout(LayoutKind.NEEDED, shape, (whole(shape),) * ranks)


def needed(shape: Shape, boxes: Sequence[Box]) -> Layout:
    """Return the layout in which rank r reads `boxes[r]`.

    The boxes may overlap, omit elements and extend beyond the tensor. Elements beyond the tensor are read as zeros.
    """
    return Layout(LayoutKind.NEEDED, shape, tuple(boxes))


@dataclass(frozen=True)
class ReceptiveField:
    """Input elements [start, stop) along one dimension, with `before` and `after` elements of padding around them.

    Nothing is read if start == stop. If all windows lie in the padding, one element outside of the input (a zero) is read
    instead, because an empty input would have no output. `ceil` means that the last window may extend beyond `after`, as in the
    whole image.
    """

    start: int
    stop: int
    before: int
    after: int
    ceil: bool = False


def receptive_field(size: int, output: Interval, *, extent: int, stride: int, padding: Interval) -> ReceptiveField:
    """Return the elements of an input of `size` that the output elements `output` read.

    Args:
        extent: distance from the first to the last tap plus one, with dilation.
        padding: padding before and after the whole input.
    """
    begin, end = output
    if begin == end:
        return ReceptiveField(0, 0, 0, 0)
    first = begin * stride - padding[0]
    last = (end - 1) * stride - padding[0] + extent
    start, stop = max(first, 0), min(last, size)
    if start >= stop:  # windows in the padding only
        return ReceptiveField(first, first + 1, 0, last - first - 1)
    if last > size + padding[1]:  # ceil mode, which affects the last window only
        return ReceptiveField(start, size, start - first, padding[1], ceil=True)
    return ReceptiveField(start, stop, start - first, last - stop)


def window_receptive_field(
    window: Window, size: Pair, outputs: tuple[Interval, Interval]
) -> tuple[ReceptiveField, ReceptiveField]:
    """Return the receptive fields of an output tile along rows and columns (see `receptive_field`).

    Args:
        window: window of the operation.
        size: (H, W) of the image.
        outputs: rows and columns of an output tile.
    """
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
    """Return the window with the padding that remains around the elements that a rank has read."""
    padding = (vertical.before, vertical.after, horizontal.before, horizontal.after)
    return Window(window.kernel, window.stride, padding, window.dilation)
