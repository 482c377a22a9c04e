"""Interval arithmetic on traces: whose time an instant is, and how long sets of intervals cover each other.

A set of intervals is a pair of int64 arrays (start, stop); `union` makes it sorted and disjoint, and the measures ask for that.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

Intervals: TypeAlias = tuple[np.ndarray, np.ndarray]


def union(start: np.ndarray, stop: np.ndarray) -> Intervals:
    """The same instants as sorted, disjoint intervals."""
    order = np.argsort(start, kind="stable")
    start, stop = start[order], stop[order]
    if not len(start):
        return start, stop
    reach = np.maximum.accumulate(stop)
    first = np.concatenate([[True], start[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return start[first], reach[last]


def length(intervals: Intervals) -> int:
    """Total length."""
    return int((intervals[1] - intervals[0]).sum())


def common(a: Intervals, b: Intervals) -> int:
    """Length of what two disjoint sets have in common."""
    return int((_covered(b, a[1]) - _covered(b, a[0])).sum()) if len(a[0]) and len(b[0]) else 0


def clip(a: Intervals, window: Intervals) -> Intervals:
    """The part of the disjoint set `a` that lies inside the disjoint set `window`."""
    starts, stops = [], []
    first = np.searchsorted(window[1], a[0], side="right")
    beyond = np.searchsorted(window[0], a[1], side="left")
    for k in range(len(a[0])):
        for w in range(first[k], beyond[k]):
            starts.append(max(a[0][k], window[0][w]))
            stops.append(min(a[1][k], window[1][w]))
    return np.array(starts, np.int64), np.array(stops, np.int64)


def own_time(start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Segments (start, stop, index) of nested intervals, sorted: each instant belongs to the innermost one that covers it.

    Intervals nest as calls do: an inner one ends no later than the one that it started in (clipped where clocks round).
    """
    order = np.lexsort((-stop, start))
    segments: list[tuple[int, int, int]] = []
    stack: list[tuple[int, int]] = []  # (stop, index)
    now = 0

    def emit(until: int) -> None:
        nonlocal now
        if stack and until > now:
            segments.append((now, until, stack[-1][1]))
        now = max(now, until)

    for begin, end, index in zip(start[order].tolist(), stop[order].tolist(), order.tolist(), strict=True):
        while stack and stack[-1][0] <= begin:
            emit(stack[-1][0])
            stack.pop()
        emit(begin)
        stack.append((min(end, stack[-1][0]) if stack else end, index))
    while stack:
        emit(stack[-1][0])
        stack.pop()
    table = np.array(segments, np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def _covered(intervals: Intervals, at: np.ndarray) -> np.ndarray:
    """Length of the part of a disjoint set that lies before each of the instants `at`."""
    start, stop = intervals
    before = np.concatenate([[0], np.cumsum(stop - start)])
    k = np.searchsorted(start, at, side="right")
    inside = np.where(k > 0, np.minimum(at - start[np.maximum(k - 1, 0)], (stop - start)[np.maximum(k - 1, 0)]), 0)
    return before[np.maximum(k - 1, 0)] + inside
