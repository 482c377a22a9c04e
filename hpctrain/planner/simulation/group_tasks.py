"""A parameter group's averaging as data for one class of ranks: its operations, what each comes after, moves and computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.averaging.collective_schedule import CollectiveSchedule, Operation, OperationKind, Stream
from hpctrain.averaging.dependencies import Dependencies, LocalEventKey, dependencies
from hpctrain.averaging.norm_groups import covered_slices
from hpctrain.averaging.slicing import Compression, Slice, layer_slices
from hpctrain.planner.collective_costs import Stage
from hpctrain.planner.machine import Machine
from hpctrain.planner.message_costs import MessageCosts
from hpctrain.planner.tasks import AveragedGroup

_SQUARES_BYTES = 16  # of a parameter: two numbers of 8 bytes


@dataclass(frozen=True)
class OperationTask:
    """One operation of a group's schedule on one class of ranks.

    Attributes:
        text: as traces name it. stream: it is posted on. stages: it consists of. slice: position; -1: of all.
        events, operations, gathers_before: it comes after, as `Dependencies` has them. gathers: the slice whose parameters it
            brings; None: none.
        prepare_seconds: of other work just before it is posted (sums put into place, products, squares).
        update_seconds: of the update of what is owned, after that. parameter: the first that it updates.
    """

    text: str
    stream: Stream
    stages: tuple[Stage, ...]
    events: tuple[LocalEventKey, ...]
    operations: tuple[int, ...]
    gathers_before: tuple[int, ...]
    slice: int = -1
    gathers: int | None = None
    prepare_seconds: float = 0.0
    update_seconds: float = 0.0
    parameter: str = ""


@dataclass(frozen=True)
class GroupTasks:
    """All operations of a step of one group, in posting order.

    Attributes:
        allreduce: sums come whole, and each slice is updated late, where its parameters are next needed.
        touching: by parameter, its slices. late_updates: by slice, seconds of the whole update. names: by slice, its first
            parameter. window: most operations in flight on a stream.
        whole: the one allreduce of a group without a schedule, after backward; None where there is a schedule.
    """

    name: str
    operations: tuple[OperationTask, ...]
    allreduce: bool
    touching: dict[str, tuple[int, ...]]
    late_updates: tuple[float, ...]
    names: tuple[str, ...]
    window: int | None
    whole: OperationTask | None = None


def group_tasks(
    group: AveragedGroup, machine: Machine, element_seconds: float, product_seconds: Mapping[str, float] | None = None
) -> GroupTasks:
    """A group's operations on a rank that owns as much as any.

    Args:
        element_seconds: of the update of one element. product_seconds: as `RankClass` has them; None: none.
    """
    if group.schedule is None:
        return GroupTasks(group.name, (), False, {}, (), (), None, _all_gradients(group, machine, element_seconds))
    schedule = group.schedule
    pricing = _Pricing(group, schedule, machine, element_seconds, product_seconds or {})
    touching: dict[str, tuple[int, ...]] = {}
    for k, piece in enumerate(schedule.slices):
        for name in (*piece.parameters, *piece.replicated):
            touching[name] = (*touching.get(name, ()), k)
    return GroupTasks(
        group.name,
        tuple(
            pricing.task(operation, needs) for operation, needs in zip(schedule.operations, dependencies(schedule), strict=True)
        ),
        any(operation.kind is OperationKind.ALLREDUCE for operation in schedule.operations),
        touching,
        tuple(piece.size * element_seconds for piece in schedule.slices),
        tuple(piece.parameters[0] for piece in schedule.slices),
        schedule.window,
    )


def _all_gradients(group: AveragedGroup, machine: Machine, element_seconds: float) -> OperationTask:
    n_bytes = group.elements * group.item_bytes
    stages = MessageCosts(machine, group.placement, None, group.item_bytes, group.rounding).stages(
        OperationKind.ALLREDUCE, n_bytes
    )
    update = group.elements * element_seconds
    return OperationTask("all gradients", Stream.GRADIENTS, stages, (), (), (), update_seconds=update, parameter=group.name)


class _Pricing:
    """Bytes and seconds of a group's operations."""

    def __init__(
        self,
        group: AveragedGroup,
        schedule: CollectiveSchedule,
        machine: Machine,
        element_seconds: float,
        product_seconds: Mapping[str, float],
    ) -> None:
        self._group, self._schedule = group, schedule
        self._costs = MessageCosts(machine, group.placement, group.levels, group.item_bytes, group.rounding)
        # The ranks of the stream of norms are in their own order.
        self._norms_costs = MessageCosts(machine, group.placement, None, group.item_bytes)
        self._element_seconds, self._product_seconds = element_seconds, product_seconds
        self._norms = {first: [schedule.slices[k] for k in slices] for first, slices in covered_slices(schedule).items()}
        self._ranks, self._batch = group.placement.ranks, sum(group.samples)
        self._stages: dict[tuple[OperationKind, int, Compression | None, Stream], tuple[Stage, ...]] = {}

    def task(self, operation: Operation, needs: Dependencies) -> OperationTask:
        """One operation."""
        k, gather = operation.slice, operation.kind is OperationKind.ALLGATHER
        prepare = update = 0.0
        if operation.kind is OperationKind.NORMS:
            prepare = sum(self._finish_seconds(piece) + self._square_seconds(piece) for piece in self._norms[k])
        elif operation.kind is OperationKind.SPARSE:
            prepare = self._costs.selection_seconds(self._schedule.slices[k].owned_size(0, self._ranks))
        elif gather:
            prepare = 0.0 if self._norms else self._finish_seconds(self._schedule.slices[k])
            update = self._updated(self._schedule.slices[k]) * self._element_seconds
        return OperationTask(
            self._schedule.text(operation),
            operation.stream,
            self._stages_of(operation),
            needs.events,
            needs.operations,
            needs.gathers_before,
            k,
            k if gather else None,
            prepare,
            update,
            self._schedule.slices[k].parameters[0],
        )

    def _stages_of(self, operation: Operation) -> tuple[Stage, ...]:
        """Equal ones are made once: a schedule may have thousands of slices of one size."""
        compression = None if operation.kind is OperationKind.NORMS else self._schedule.slices[operation.slice].compression
        kind, n_bytes, stream = operation.kind, self._bytes(operation), operation.stream
        key = kind, n_bytes, compression, stream
        if key not in self._stages:
            costs = self._norms_costs if stream is Stream.NORMS else self._costs
            self._stages[key] = costs.stages(kind, n_bytes, compression)
        return self._stages[key]

    def _bytes(self, operation: Operation) -> int:
        """The whole buffer, as collective_costs.py counts."""
        slices, item_bytes = self._schedule.slices, self._group.item_bytes
        if operation.kind is OperationKind.NORMS:
            return _SQUARES_BYTES * len({name for piece in self._norms[operation.slice] for name in piece.parameters})
        piece = slices[operation.slice]
        if operation.kind is OperationKind.INPUTS:
            inputs = sum(slices[k].units for k in layer_slices(slices, operation.slice))
            return max(self._group.samples) * inputs * item_bytes
        if operation.kind is OperationKind.ERRORS:
            return self._batch * piece.unit * item_bytes
        return piece.size * item_bytes

    def _updated(self, piece: Slice) -> int:
        """Elements that the first rank, which owns most, updates of a slice: its own, and what every rank updates."""
        return piece.owned_size(0, self._ranks) + len(piece.replicated) * piece.unit

    def _finish_seconds(self, piece: Slice) -> float:
        """The product of exchanged factors, the sum of what nodes chose, or the copy of what was summed."""
        owned = piece.owned_size(0, self._ranks)
        if piece.compression is not None:
            return self._costs.scatter_seconds(owned, piece.compression)
        if piece.sufficient_factors:
            return owned * self._product_seconds.get(piece.parameters[0], 0.0)
        return self._costs.memory_seconds(2 * owned * self._group.item_bytes) if self._ranks > 1 else 0.0

    def _square_seconds(self, piece: Slice) -> float:
        """Squares of what is owned, of parameters and gradients."""
        return self._costs.memory_seconds(2 * self._updated(piece) * self._group.item_bytes)
