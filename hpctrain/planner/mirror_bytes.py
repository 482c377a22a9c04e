"""Pinned memory for what travels between devices through the host, from schedules alone."""

from __future__ import annotations

from hpctrain.averaging.collective_schedule import OperationKind
from hpctrain.planner.group_schedules import GroupSchedule


def mirror_bytes(group: GroupSchedule, item_bytes: int) -> tuple[int, ...] | None:
    """Bytes of the mirrors of each rank of a group, in one level.

    Each array that travels has one: of an allreduce, the slice; where owners update, the slice's gradient, the sum of the owned
    part and the slice's parameters. None where the schedule does not tell: inputs and errors of layers or chosen elements travel.

    Args:
        item_bytes: of an element of gradients and parameters.
    """
    if group.ranks == 1:
        return (0,)
    schedule = group.schedule
    if schedule is None:
        return (group.elements * item_bytes,) * group.ranks
    if any(piece.sufficient_factors or piece.compression is not None for piece in schedule.slices):
        return None
    gathered = {operation.slice for operation in schedule.operations if operation.kind is OperationKind.ALLGATHER}
    totals = [0] * group.ranks
    for number, piece in enumerate(schedule.slices):
        owned = group.owned(piece) if number in gathered else (-piece.size,) * group.ranks
        totals = [total + 2 * piece.size + part for total, part in zip(totals, owned, strict=True)]
    return tuple(total * item_bytes for total in totals)
