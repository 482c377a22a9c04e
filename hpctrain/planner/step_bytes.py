"""The bytes that a step exchanges, in integers, from the tasks and schedules that are simulated."""

from __future__ import annotations

from hpctrain.planner.group_schedules import exchanged_bytes as group_bytes
from hpctrain.planner.tasks import AveragedGroup, BeginExchange, GroupPlacement, Merge, StepProgram


def exchanged_bytes(program: StepProgram) -> int:
    """Bytes that all ranks hand over for others in a step: activations, batch statistics and the averaging of gradients.

    As `hpctrain plan show` counts them, and as the communicators of a run do; norms and the step's message are left out.
    """
    return split_bytes(program) + sum(_averaging_bytes(group, program) for group in program.groups.values())


def split_bytes(program: StepProgram) -> int:
    """Bytes of activations and batch statistics."""
    placements = {"all": program.all_ranks, "split": program.split, "data": program.data}
    total = 0
    for of_class in program.classes:
        exchanges = sum(task.exchange.sent_bytes for task in of_class.tasks if isinstance(task, BeginExchange))
        merges = sum(_merged_bytes(task, placements[task.ranks]) for task in of_class.tasks if isinstance(task, Merge))
        total += of_class.ranks * (exchanges + merges)
    return total


def _merged_bytes(merge: Merge, placement: GroupPlacement) -> int:
    return merge.bytes * (placement.ranks - 1)


def _averaging_bytes(group: AveragedGroup, program: StepProgram) -> int:
    ranks = sum(of_class.ranks for of_class in program.classes if of_class.name in group.members)
    order = None if group.levels is None else group.levels.order
    of_group = sum(group_bytes(group.schedule, group.elements, group.samples, order, group.item_bytes, group.rounding))
    return of_group * (ranks // group.placement.ranks)
