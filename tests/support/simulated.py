"""Small programs and machines for the simulator, on which its answers are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from hpctrain.averaging.collective_schedule import CollectiveSchedule, EventKind, LocalEventKey, Operation, OperationKind, Stream
from hpctrain.averaging.slicing import Slice
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import KernelSet
from hpctrain.models import catalogue
from hpctrain.nn.compile.plan import Action, PlannedStep, StepMemory
from hpctrain.nn.layers import Layer
from hpctrain.nn.network import Lowering, declared
from hpctrain.optim.base import NormsNeeded
from hpctrain.planner.costs.collective_costs import GridPlacements, GroupPlacement
from hpctrain.planner.costs.machine import Link, LinkSegment, Machine, OperatorClass, OperatorRate
from hpctrain.planner.costs.operator_work import FactorProduct
from hpctrain.planner.job import Job
from hpctrain.planner.simulation.tasks import (
    AveragedGroup,
    Compute,
    EndBackward,
    Happens,
    NeedsParameters,
    RankClass,
    StepProgram,
    Task,
)
from hpctrain.trace.tracer import Category


class NoCompute:
    """`ComputeCosts` of ranks that compute in no time."""

    def seconds(self, step: PlannedStep, action: Action, memory: StepMemory | None = None) -> float:
        return 0.0

    def product_seconds(self, product: FactorProduct) -> float:
        return 0.0

    def update_seconds(self, elements: int) -> float:
        return 0.0

    def step_seconds(self, input_bytes: int, operators: int) -> float:
        return 0.0

    def measured_share(self) -> float:
        return 0.0


def job_of(
    model: Layer | str,
    image_shape: tuple[int, int, int],
    batch: int,
    options: Mapping[str, Any] | None = None,
    kernels: KernelSet | None = None,
    dtype: str = "float32",
) -> Job:
    """Return a job. model: a layer, or a name of the catalogue with options."""
    layer = catalogue.build(model, options or {}) if isinstance(model, str) else model
    graph_of = partial(Lowering(layer, dtype=dtype).graph, image_shape=image_shape)
    return Job(
        model=model if isinstance(model, str) else "net",
        graph_of=graph_of,
        specs=declared(layer, graph_of(1))[0],
        kernels=kernels or NumpyKernelSet(),
        dtype=dtype,
        image_shape=image_shape,
        batch=batch,
        norms_needed=NormsNeeded.NONE,
    )


def machine_of(
    *,
    alpha_seconds: float = 1e-6,
    bytes_per_second: float = 1e9,
    ranks_per_node: int = 1,
    memory_bytes: int = 1 << 34,
    flops_per_second: float = 1e10,
    within: Link | None = None,
) -> Machine:
    """Return a machine of equal links that cost no time of a core."""
    between = link(alpha_seconds, 1.0 / bytes_per_second)
    rate = OperatorRate(flops_per_second, flops_per_second, 1e-6)
    return machine(between, within or between, rate=rate, ranks_per_node=ranks_per_node, nodes=1 << 14, memory_bytes=memory_bytes)


GROUP = "all"

ITEM_BYTES = 4


def link(alpha: float = 0.0, beta: float = 0.0, *, unattended_bytes: int | None = None, polls: int = 0, **costs: float) -> Link:
    """One segment; costs: fields of `Link`."""
    return Link((LinkSegment(0, alpha, beta, unattended_bytes, polls),), **costs)


def machine(
    between: Link | None = None,
    within: Link | None = None,
    *,
    rate: OperatorRate | None = None,
    ranks_per_node: int = 1,
    cores_per_rank: float = 1.0,
    nodes: int = 1 << 20,
    memory_bytes: int = 1 << 40,
) -> Machine:
    """A machine. rate: None: kernels take no time; without links, messages are free."""
    return Machine(
        name="toy",
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        cores_per_rank=cores_per_rank,
        memory_bytes=memory_bytes,
        within=within or link(),
        between=between or link(),
        ranks_per_card=ranks_per_node,
        rates=dict.fromkeys(OperatorClass, rate or OperatorRate(float("inf"), float("inf"), 0.0)),
    )


def layers(sizes: Sequence[int]) -> tuple[Slice, ...]:
    """Return a slice for each layer's weight, with its number of elements."""
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
        GridPlacements(
            placement(ranks, ranks_per_node),
            placement(split, ranks_per_node),
            placement(ranks // split, max(1, ranks_per_node // split)),
        ),
    )
