"""Regions of images: rows and columns, so that a rank reads and augments no more than it needs."""

from __future__ import annotations

Interval = tuple[int, int]
Region = tuple[Interval, Interval]  # rows, columns
Box = tuple[Interval, ...]  # samples, rows, columns, channels


def whole(height: int, width: int) -> Region:
    """All of an image."""
    return (0, height), (0, width)


def shape_of(region: Region) -> tuple[int, int]:
    """(height, width); 0 where it is empty."""
    rows, columns = (max(0, stop - start) for start, stop in region)
    return rows, columns


def is_empty(region: Region) -> bool:
    """True where there is no pixel in it."""
    return 0 in shape_of(region)


def clip(region: Region, height: int, width: int) -> Region:
    """What of it lies in an image of (height, width)."""
    return _clip(region[0], height), _clip(region[1], width)


def _clip(interval: Interval, size: int) -> Interval:
    start = min(max(interval[0], 0), size)
    return start, max(start, min(interval[1], size))


def moved(region: Region, down: int, right: int) -> Region:
    """The same size elsewhere."""
    (top, bottom), (left, end) = region
    return (top + down, bottom + down), (left + right, end + right)


def inside(region: Region, origin: Region) -> tuple[slice, slice]:
    """Where it lies in an array that holds `origin`."""
    rows, columns = (slice(start - first, stop - first) for (start, stop), (first, _) in zip(region, origin, strict=True))
    return rows, columns


def hull(regions: list[Region]) -> Region:
    """The smallest region that holds all of them; empty ones do not count."""
    full = [region for region in regions if not is_empty(region)]
    if not full:
        return (0, 0), (0, 0)
    rows, columns = ((min(r[dim][0] for r in full), max(r[dim][1] for r in full)) for dim in (0, 1))
    return rows, columns
