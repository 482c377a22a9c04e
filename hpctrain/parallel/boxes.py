"""TileOfRank of tensors: which elements a rank holds, as index arithmetic without arrays.

A box is one interval (start, stop) per dim, in the coordinates of the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpctrain.backend.kernels.specs import Shape

Interval = tuple[int, int]
Box = tuple[Interval, ...]


def balanced(size: int, parts: int) -> tuple[Interval, ...]:
    """`size` things in `parts` neighbouring intervals whose lengths differ by at most 1, longer ones first; some may be empty."""
    small, longer = divmod(size, parts)
    starts = [part * small + min(part, longer) for part in range(parts + 1)]
    return tuple((starts[part], starts[part + 1]) for part in range(parts))


def consecutive(counts: Sequence[int]) -> tuple[Interval, ...]:
    """Neighbouring intervals of the given lengths, from 0 on."""
    starts = [sum(counts[:part]) for part in range(len(counts) + 1)]
    return tuple((starts[part], starts[part + 1]) for part in range(len(counts)))


def whole(shape: Shape) -> Box:
    """All elements of a tensor."""
    return tuple((0, size) for size in shape)


def shape_of(box: Box) -> Shape:
    """Length of a box in every dim; 0 where it is empty."""
    return tuple(max(0, stop - start) for start, stop in box)


def size_of(box: Box) -> int:
    """Elements of a box."""
    return math.prod(shape_of(box))


def intersect(a: Box, b: Box) -> Box | None:
    """The elements of both boxes; None where there are none."""
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def replace_dim(box: Box, dim: int, interval: Interval) -> Box:
    """The same box with another interval in one dim."""
    dim %= len(box)
    return (*box[:dim], interval, *box[dim + 1 :])


def relative(box: Box, origin: Box) -> tuple[slice, ...]:
    """Where `box` lies in an array that holds `origin`."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, origin, strict=True))
