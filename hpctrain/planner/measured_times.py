"""The times that a run would measure to order its operations by, from a rank's tasks; and the link that it would measure."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.averaging.collective_schedule import OperationKind
from hpctrain.averaging.step_times import Times
from hpctrain.averaging.dependencies import EventKind
from hpctrain.comm.link import LinkModel
from hpctrain.comm.groups import Levels
from hpctrain.nn.parameter import GroupLayout
from hpctrain.planner.collective_costs import stages, unhindered_seconds
from hpctrain.planner.machine import Machine
from hpctrain.planner.tasks import Compute, EndBackward, GroupPlacement, Happens, NeedsParameters, Task

_SMALL_BYTES, _LARGE_BYTES = 1 << 10, 1 << 20  # of the buffers that `comm.link.calibrate` measures with


def times_of(tasks: Sequence[Task], group: str, layout: GroupLayout) -> Times:
    """Seconds of compute from a step's begin, as `averaging.step_clock` takes them: waits are left out.

    Args:
        group: the key of the averaging. layout: its parameters; what is not announced is so when backward ends.
    """
    now = 0.0
    names = {segment.parameter for segment in layout.segments if segment.size}
    ready: dict[str, float] = {}
    free: dict[str, float] = {}
    needed: dict[str, float] = {}
    for task in tasks:
        match task:
            case Compute():
                now += task.seconds
            case NeedsParameters() if task.group == group:
                for name in names.intersection(task.parameters):
                    needed.setdefault(name, now)  # in the first micro-batch
            case Happens() if task.group == group and task.event.kind is not EventKind.INPUTS:
                (ready if task.event.kind is EventKind.GRADIENT else free)[task.event.parameter] = now
            case EndBackward():
                break
    for times in (ready, free):
        for name in names:
            times.setdefault(name, now)
    return Times(ready, free, needed, now)


def link_model(machine: Machine, placement: GroupPlacement, levels: Levels | None) -> LinkModel:
    """The link as `comm.link` measures it: a reduce-scatter and an allgather of two sizes, and what an operation costs."""
    if placement.ranks == 1:
        return LinkModel(0.0, 0.0)
    (small, small_seconds), (large, large_seconds) = (
        _half_pair(machine, placement, levels, size) for size in (_SMALL_BYTES, _LARGE_BYTES)
    )
    others = placement.ranks - 1
    beta = max(0.0, large_seconds - small_seconds) / (others * (large - small))
    operation_seconds = (machine.between if placement.nodes > 1 else machine.within).operation_seconds
    return LinkModel(max(0.0, small_seconds / others - small * beta), beta, operation_seconds)


def _half_pair(machine: Machine, placement: GroupPlacement, levels: Levels | None, whole_bytes: int) -> tuple[int, float]:
    """(bytes of a rank's piece, half the time of a reduce-scatter and an allgather of about `whole_bytes`)."""
    piece = 4 * max(1, whole_bytes // 4 // placement.ranks)
    pair = (OperationKind.REDUCE_SCATTER, OperationKind.ALLGATHER)
    seconds = sum(unhindered_seconds(stages(machine, kind, piece * placement.ranks, placement, levels)) for kind in pair)
    return piece, seconds / 2
