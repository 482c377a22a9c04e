"""Groups of norms: which parameters' norms travel in one message, so that a layer's update waits for few others.

A group is a run of neighbouring slices, with all their parameters. It follows by rule from the slices, as their sizes do, and not
from measured times: an allreduce of other lengths may add in another order, and would change last bits. Pure data, the same on
every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from hpctrain.averaging.collective_schedule import ALL_SLICES, CollectiveSchedule, OperationKind
from hpctrain.averaging.slicing import Slice
from hpctrain.nn.parameter import GroupLayout

# A message more costs latency and processor time as any other does; one for an eighth of the elements and two slices, of two
# operations each, makes a quarter more messages at most. What comes last can only be gathered after backward: front groups halve.
_SHARE = 8
_LEAST_SLICES = 2


def norm_groups(layout: GroupLayout, slices: Sequence[Slice]) -> tuple[int, ...]:
    """The first slice of each group, ascending.

    Groups are filled from the last slice to the first, as backward completes them, with two slices each at least, and with an
    eighth of all elements or half of those that are left; only the front-most may stay smaller. No parameter is in two of
    them, and each group's parameters are neighbours.
    """
    place = {segment.parameter: position for position, segment in enumerate(layout.segments)}
    places = [[place[name] for name in (*piece.parameters, *piece.replicated)] for piece in slices]
    last_before = list(accumulate((max(positions) for positions in places), max))
    first_from = list(accumulate((min(positions) for positions in reversed(places)), min))[::-1]
    left = sum(piece.size for piece in slices)
    share = left / _SHARE
    starts, size, count = [], 0, 0
    for k in reversed(range(len(slices))):
        size, count = size + slices[k].size, count + 1
        large = size >= min(share, left / 2) and count >= _LEAST_SLICES
        if k == 0 or (large and last_before[k - 1] < first_from[k]):
            starts.append(k)
            left -= size
            size = count = 0
    return tuple(reversed(starts))


def slices_of_groups(starts: Sequence[int], count: int) -> Mapping[int, range]:
    """By first slice, the slices of each group. starts: ascending, or `ALL_SLICES` alone. count: of all slices."""
    if tuple(starts) == (ALL_SLICES,):
        return {ALL_SLICES: range(count)}
    assert all(0 <= low < high for low, high in pairwise((*starts, count))), "groups of norms are in order, and hold slices"
    return {low: range(low, high) for low, high in pairwise((*starts, count))}


def covered_slices(schedule: CollectiveSchedule) -> Mapping[int, range]:
    """By the slice of each operation of norms, the slices whose parameters' norms it completes."""
    starts = sorted(operation.slice for operation in schedule.operations if operation.kind is OperationKind.NORMS)
    covered = slices_of_groups(starts, len(schedule.slices)) if starts else {}
    names = [{name for k in group for name in schedule.slices[k].parameters} for group in covered.values()]
    assert sum(map(len, names)) == len(set().union(*names)), "a parameter's norm is completed once"
    return covered
