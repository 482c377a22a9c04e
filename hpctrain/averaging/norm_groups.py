"""Groups of norms: which parameters' norms travel in one message, so that a layer's update waits for few others.

A group is a run of neighbouring slices, with all their parameters. It follows by rule from the slices, as their sizes do, and not
from measured times: an allreduce of other lengths may add in another order, and would change last bits. Pure data, the same on
every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from hpctrain.averaging.collective_schedule import ALL_SLICES, CollectiveSchedule, OperationKind
from hpctrain.averaging.slices import Slice
from hpctrain.nn.parameter import GroupLayout

# A message more costs latency and processor time as any other does. One for an eighth of the elements lets seven eighths be
# gathered before the last one is complete; one for two slices, of two operations each, makes a quarter more messages at most.
_MOST_GROUPS = 8
_LEAST_SLICES = 2


def norm_groups(layout: GroupLayout, slices: Sequence[Slice]) -> tuple[int, ...]:
    """The first slice of each group, ascending.

    Groups are filled from the last slice to the first, as backward completes them, with an eighth of all elements and two slices
    each; only the front-most may stay smaller. No parameter is in two of them, and each group's parameters are neighbours.
    """
    place = {segment.parameter: position for position, segment in enumerate(layout.segments)}
    places = [[place[name] for name in (*piece.parameters, *piece.replicated)] for piece in slices]
    last_before = list(accumulate((max(positions) for positions in places), max))
    first_from = list(accumulate((min(positions) for positions in reversed(places)), min))[::-1]
    least = -(-sum(piece.size for piece in slices) // _MOST_GROUPS)
    starts, size, count = [], 0, 0
    for k in reversed(range(len(slices))):
        size, count = size + slices[k].size, count + 1
        may_begin = k == 0 or (last_before[k - 1] < first_from[k] and size >= least and count >= _LEAST_SLICES)
        if may_begin:
            starts.append(k)
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
