"""Small programs and machines for the simulator, on which its answers are known."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.averaging.collective_schedule import CollectiveSchedule, Operation, OperationKind, Stream
from hpctrain.averaging.dependencies import EventKind, LocalEventKey
from hpctrain.averaging.slices import Slice
from hpctrain.planner.machine import Link, LinkSegment, Machine, OperatorClass, OperatorRate
from hpctrain.planner.tasks import (
    AveragedGroup,
    Compute,
    EndBackward,
    GroupPlacement,
    Happens,
    NeedsParameters,
    RankClass,
    StepProgram,
    Task,
)
from hpctrain.trace.tracer import Category

GROUP = "all"
ITEM_BYTES = 4


def link(alpha: float = 0.0, beta: float = 0.0, *, unattended_bytes: int | None = None, polls: int = 0, **costs: float) -> Link:
    """One segment; costs: fields of `Link`."""
    return Link((LinkSegment(0, alpha, beta, unattended_bytes, polls),), **costs)


def machine(
    between: Link | None = None, within: Link | None = None, *, ranks_per_node: int = 1, cores_per_rank: float = 1.0
) -> Machine:
    """A machine whose kernels beside operators take no time; without links, messages are free."""
    rate = OperatorRate(float("inf"), float("inf"), 0.0)
    return Machine(
        name="toy",
        nodes=1 << 20,
        ranks_per_node=ranks_per_node,
        cores_per_rank=cores_per_rank,
        memory_bytes=1 << 40,
        within=within or link(),
        between=between or link(),
        ranks_per_card=ranks_per_node,
        rates=dict.fromkeys(OperatorClass, rate),
    )


def layers(sizes: Sequence[int]) -> tuple[Slice, ...]:
    """A slice for each layer's weight of so many elements."""
    begin = [sum(sizes[:k]) for k in range(len(sizes))]
    return tuple(Slice(f"l{k}.weight", begin[k], begin[k] + n, k, (f"l{k}.weight",)) for k, n in enumerate(sizes))


def allreduces(sizes: Sequence[int], ranks: int, window: int | None = None) -> CollectiveSchedule:
    """An allreduce for each layer, last layers first."""
    order = [Operation(OperationKind.ALLREDUCE, k, Stream.GRADIENTS) for k in reversed(range(len(sizes)))]
    return CollectiveSchedule("toy allreduces", ranks, layers(sizes), tuple(order), window)


def sharded(sizes: Sequence[int], ranks: int, window: int | None = None) -> CollectiveSchedule:
    """A reduce-scatter for each layer, last layers first, and an allgather on a stream of its own, first layers first."""
    last, first = list(reversed(range(len(sizes)))), range(len(sizes))
    sums = [Operation(OperationKind.REDUCE_SCATTER, k, Stream.GRADIENTS) for k in last]
    gathers = [Operation(OperationKind.ALLGATHER, k, Stream.PARAMETERS) for k in first]
    return CollectiveSchedule("toy reduce-scatters", ranks, layers(sizes), (*sums, *gathers), window)


def tasks(seconds: Sequence[float], *, polls: bool = True) -> tuple[Task, ...]:
    """Forward of all layers, one each, then backward: half for the parameters' gradients, half for the input's."""
    step: list[Task] = []
    for k, one in enumerate(seconds):
        step += [NeedsParameters(GROUP, (f"l{k}.weight",)), Compute(f"l{k}", Category.FORWARD, one, polls)]
    for k in reversed(range(len(seconds))):
        name = f"l{k}.weight"
        step += [
            Compute(f"l{k}", Category.PARAMETERS, seconds[k], polls),
            Happens(GROUP, LocalEventKey(EventKind.GRADIENT, name)),
            Compute(f"l{k}", Category.INPUT, seconds[k], polls),
            Happens(GROUP, LocalEventKey(EventKind.LAST_READ, name)),
        ]
    return (*step, EndBackward())


def placement(ranks: int, ranks_per_node: int = 1, alike: int = 1) -> GroupPlacement:
    """Of ranks that follow each other."""
    return GroupPlacement(ranks, -(-ranks // ranks_per_node), min(ranks, ranks_per_node), alike)


def program(
    classes: Sequence[tuple[int, tuple[Task, ...]]],
    sizes: Sequence[int] = (),
    schedule: CollectiveSchedule | None = None,
    *,
    ranks_per_node: int = 1,
    update_seconds: float = 0.0,
    split: int = 1,
) -> StepProgram:
    """Classes of (ranks, tasks of a step) that all average one group; no sizes: no group. split: classes are split ranks."""
    ranks = sum(count for count, _ in classes)
    names = tuple(f"class {number}" for number in range(len(classes)))
    groups = {}
    if sizes:
        where = placement(ranks, ranks_per_node)
        groups[GROUP] = AveragedGroup(GROUP, sum(sizes), ITEM_BYTES, schedule, where, names, (1,) * ranks)
    return StepProgram(
        tuple(
            RankClass(name, count, number if split > 1 else 0, 1, step, {GROUP: update_seconds})
            for number, (name, (count, step)) in enumerate(zip(names, classes, strict=True))
        ),
        groups,
        all_ranks=placement(ranks, ranks_per_node),
        split=placement(split, ranks_per_node),
        data=placement(ranks // split, max(1, ranks_per_node // split)),
    )
