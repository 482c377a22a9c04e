"""Collectives of a simulated rank: the tasks of a group's averaging, their queues, and collectives in flight.

`group_tasks` prices a group's schedule for one class of ranks. `GroupQueues` starts operations in the order of the schedule when
their dependencies are met, with a limited number in flight. A `Meeting` is a collective in flight: a stage begins when all ranks
of the group have posted it, and is complete when it is complete on all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hpctrain.averaging.collective_schedule import (
    CollectiveSchedule,
    Dependencies,
    LocalEventKey,
    Operation,
    OperationKind,
    Stream,
    covered_slices,
    dependencies,
)
from hpctrain.averaging.slicing import Compression, Slice, layer_slices
from hpctrain.planner.costs.collective_costs import CollectiveStage, GroupPlacement, MessageCosts
from hpctrain.planner.costs.machine import Machine
from hpctrain.planner.simulation.resources import EventLoop
from hpctrain.planner.simulation.tasks import AveragedGroup
from hpctrain.planner.simulation.transfers import StageTransfer

_SQUARES_BYTES = 16  # per parameter: two numbers of 8 bytes
# Squares of weight and gradient, which are converted to float64, take as long as this number of accesses per element (measured).
_SQUARE_ACCESSES = 8


@dataclass(frozen=True)
class OperationTask:
    """Operation of a group's schedule on one class of ranks.

    Attributes:
        events: events before which the operation must not start, as in `Dependencies`.
        operations: positions of operations that must be complete before this one starts, as in `Dependencies`.
        gathers_before: slices whose gathers in the previous step must be complete before the start, as in `Dependencies`.
        slice: position of the operation's slice; -1: all slices.
        gathers: position of the slice whose parameters the operation gathers; None: no gather.
        prepare_seconds: time of other work just before the post (copies of sums, products, squares).
        update_seconds: time of the update of owned elements, after that work.
        parameter: first parameter of the update.
    """

    text: str  # name in traces
    stream: Stream
    stages: tuple[CollectiveStage, ...]
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
        allreduce: whether each rank receives whole sums, and updates each slice late, before its parameters are next needed.
        touching: positions of the slices that contain elements of each parameter.
        late_updates: seconds of the whole update, by slice.
        names: first parameter of each slice.
        window: maximum number of operations in flight per stream.
        whole: allreduce after backward of a group without a schedule; None if there is a schedule.
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
    """Return a group's operations on the rank that owns the largest number of elements.

    Args:
        element_seconds, product_seconds: as `update_seconds` and `product_seconds` in `RankClass`; None: there are no products.
    """
    if group.schedule is None:
        costs = MessageCosts(machine, group.placement, None, group.item_bytes, group.rounding, group.shards)
        stages = costs.stages(OperationKind.ALLREDUCE, group.elements * group.item_bytes)
        update = group.elements * element_seconds
        whole = OperationTask("all gradients", Stream.GRADIENTS, stages, (), (), (), update_seconds=update, parameter=group.name)
        return GroupTasks(group.name, (), False, {}, (), (), None, whole)
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
        self._costs = MessageCosts(machine, group.placement, group.levels, group.item_bytes, group.rounding, group.shards)
        # The stream of norms does not use the order of the levels.
        self._norms_costs = MessageCosts(machine, group.placement, None, group.item_bytes)
        self._element_seconds, self._product_seconds = element_seconds, product_seconds
        self._norms = {first: [schedule.slices[k] for k in slices] for first, slices in covered_slices(schedule).items()}
        self._ranks, self._batch = group.placement.ranks, sum(group.samples)
        self._stages: dict[tuple[OperationKind, int, Compression | None, Stream], tuple[CollectiveStage, ...]] = {}

    def task(self, operation: Operation, needs: Dependencies) -> OperationTask:
        """Return the task of one operation, which starts after `needs`."""
        k, gather = operation.slice, operation.kind is OperationKind.ALLGATHER
        prepare = update = 0.0
        if operation.kind is OperationKind.NORMS:
            for piece in self._norms[k]:  # and squares of owned parameters and gradients
                square_bytes = _SQUARE_ACCESSES * self._updated(piece) * self._group.item_bytes
                prepare += self._finish_seconds(piece) + self._costs.memory_seconds(square_bytes)
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

    def _stages_of(self, operation: Operation) -> tuple[CollectiveStage, ...]:
        """Return the stages of an operation. They are cached, because a schedule may have thousands of slices of one size."""
        compression = None if operation.kind is OperationKind.NORMS else self._schedule.slices[operation.slice].compression
        kind, n_bytes, stream = operation.kind, self._bytes(operation), operation.stream
        key = kind, n_bytes, compression, stream
        if key not in self._stages:
            costs = self._norms_costs if stream is Stream.NORMS else self._costs
            self._stages[key] = costs.stages(kind, n_bytes, compression)
        return self._stages[key]

    def _bytes(self, operation: Operation) -> int:
        """Return the bytes of the whole buffer, as `collective_costs.stages` counts."""
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
        """Return the number of elements of a slice that the first rank updates: owned and replicated elements.

        The first rank owns the largest number of elements.
        """
        return piece.owned_size(0, self._ranks) + len(piece.replicated) * piece.unit

    def _finish_seconds(self, piece: Slice) -> float:
        """Return the time of work on a received slice: product of factors, sum of selected elements, or copy of a sum."""
        owned = piece.owned_size(0, self._ranks)
        if piece.compression is not None:
            return self._costs.scatter_seconds(owned, piece.compression)
        if piece.sufficient_factors:
            return owned * self._product_seconds.get(piece.parameters[0], 0.0)
        return self._costs.memory_seconds(2 * owned * self._group.item_bytes) if self._ranks > 1 else 0.0


@dataclass(frozen=True)
class SimulatedGroup:
    """Communicator of a simulated process.

    Attributes:
        key: identity of the communicator.
        members: number of its processes.
        node_share: number of ranks that this process represents on a node, divided by the number of the node's ranks that
            communicate in groups of this kind.
        lane: name of the lane, which groups of the same ranks share; its messages move one after another.
    """

    key: Hashable
    members: int
    placement: GroupPlacement
    node_share: float
    lane: str


class Posted:
    """Operation of one rank: queued, in flight, or done.

    Attributes:
        position: position among all operations that the rank has posted.
        needs: number of incomplete dependencies.
        done: whether the rank has noticed its completion.
        complete: callback once it is done.
    """

    __slots__ = ("begun_seconds", "complete", "dependents", "done", "needs", "number", "position", "text", "track")

    def __init__(self, text: str, track: str, number: int, needs: int = 0) -> None:
        self.text, self.track, self.number, self.needs = text, track, number, needs
        self.done = False
        self.begun_seconds = 0.0
        self.position = 0
        self.dependents: list[Posted] = []
        self.complete: Callable[[], None] | None = None

    def is_done(self) -> bool:
        """Return `done`. It is a method so that type checkers do not assume an unchanged value."""
        return self.done

    def __str__(self) -> str:
        return f"{self.text} ({self.track} {self.number})"


class Member(Protocol):
    """Rank that takes part in a meeting."""

    def transfer(self, stage: CollectiveStage, group: SimulatedGroup, ended: Callable[[], None]) -> StageTransfer:
        """Return the rank's transfer for a stage, not yet begun. It calls `ended` at its end."""

    def stage_ended(self, share: MeetingShare) -> None:
        """Handle the end of a stage. The rank calls `share.next_stage` at the poll that notices the end."""


class MeetingShare:
    """Participation of one rank in a meeting.

    Attributes:
        stage: current or last stage; None if there is none, or if only other ranks take part in it.
        transfer: transfer of that stage.
    """

    __slots__ = ("_group", "_meeting", "_stages", "member", "posted", "stage", "transfer")

    def __init__(
        self, meeting: Meeting, member: Member, posted: Posted, stages: Sequence[CollectiveStage], group: SimulatedGroup
    ) -> None:
        self._meeting, self.member, self.posted, self._stages = meeting, member, posted, stages
        self._group = group
        self.stage: CollectiveStage | None = None
        self.transfer: StageTransfer | None = None

    def begin(self, position: int) -> None:
        """Begin this rank's transfer of the stage at `position`. If the rank has no part in the stage, end it at once."""
        if position >= len(self._stages):
            self.stage = None
            self._meeting.ended()
            return
        self.stage = self._stages[position]
        self.transfer = self.member.transfer(self.stage, self._group, self._meeting.ended)
        self.transfer.begin()

    @property
    def cpu_seconds(self) -> float:
        """Seconds of the rank's core for the stage that are not yet charged."""
        return 0.0 if self.stage is None or self.transfer is None else self.transfer.cpu_left

    @property
    def begun_seconds(self) -> float:
        """Time at which the stage began."""
        return 0.0 if self.transfer is None else self.transfer.begun_seconds

    @property
    def is_last(self) -> bool:
        """Whether the stage is the last one of the collective."""
        return self._meeting.is_last

    def next_stage(self) -> None:
        """Post the next stage, after the program has noticed the end of the current one."""
        self._meeting.arrive()


class Meeting:
    """Collective in flight. A stage begins when all members have posted it, and ends when it has ended on all of them.

    The meeting calls `forget` once all members have posted the operation.
    """

    def __init__(self, loop: EventLoop, members: int, forget: Callable[[], None]) -> None:
        self._loop, self._members, self._forget = loop, members, forget
        self._shares: list[MeetingShare] = []
        self._waiting = members
        self._moving = 0
        self._stage = -1
        self._stages = 0

    def join(self, member: Member, posted: Posted, stages: Sequence[CollectiveStage], group: SimulatedGroup) -> None:
        """Add a member that posts the operation, with its own stages of it."""
        self._shares.append(MeetingShare(self, member, posted, stages, group))
        self._stages = max(self._stages, len(stages))
        if len(self._shares) == self._members:
            self._forget()
        self.arrive()

    @property
    def is_last(self) -> bool:
        """Whether the current or last stage is the last one of the collective."""
        return self._stage >= self._stages - 1

    def ended(self) -> None:
        """Count a member whose transfer of the stage has ended. After the last one, notify all members."""
        self._moving -= 1
        if not self._moving:
            for share in self._shares:
                share.member.stage_ended(share)

    def arrive(self) -> None:
        """Count a member that has posted the next stage. After the last one, begin the stage."""
        self._waiting -= 1
        if self._waiting:
            return
        self._waiting = self._moving = self._members
        self._stage += 1
        if self._members == 1 and not self._stages:
            self._begin()
        else:  # after all polls at this time, so that the order of members has no effect
            self._loop.soon(self._begin)

    def _begin(self) -> None:
        for share in self._shares:
            share.begin(self._stage)


class Meetings:
    """Meetings that some but not all members have joined, by key of the operation."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._open: dict[Hashable, Meeting] = {}

    def of(self, key: Hashable, members: int) -> Meeting:
        """Return the meeting of an operation; the key has its communicator and its position there."""
        meeting = self._open.get(key)
        if meeting is None:
            meeting = self._open[key] = Meeting(self._loop, members, lambda: self._forget(key))
        return meeting

    def _forget(self, key: Hashable) -> None:
        del self._open[key]


class OperationQueue:
    """Stream of a group on one rank, with at most `window` operations in flight; None: no limit."""

    def __init__(self, name: str, window: int | None) -> None:
        self.name, self._window = name, window
        self._waiting: deque[tuple[OperationTask, Posted]] = deque()
        self._in_flight = self._count = 0

    def add(self, task: OperationTask, needs: int) -> Posted:
        """Queue an operation with `needs` incomplete dependencies, and return it."""
        posted = Posted(task.text, self.name, self._count, needs)
        posted.complete = self._complete
        self._count += 1
        self._waiting.append((task, posted))
        return posted

    @property
    def startable(self) -> bool:
        """Whether the first waiting operation may start."""
        if not self._waiting or self._waiting[0][1].needs:
            return False
        return self._window is None or self._in_flight < self._window

    def take(self) -> tuple[OperationTask, Posted]:
        """Start the first waiting operation, and return it."""
        self._in_flight += 1
        return self._waiting.popleft()

    def _complete(self) -> None:
        self._in_flight -= 1


class StepOperations:
    """Operations of one step of a group on one rank.

    Attributes:
        operations: operations in the order of the schedule.
        gathered: allgather of each slice.
        pending: sums that no update has used yet, by slice.
    """

    def __init__(self) -> None:
        self.operations: list[Posted] = []
        self.gathered: dict[int, Posted] = {}
        self.pending: dict[int, Posted] = {}
        self.happened: set[LocalEventKey] = set()


class GroupQueues:
    """Queues of one parameter group on one rank, filled at the beginning of each step."""

    def __init__(self, tasks: GroupTasks) -> None:
        self.tasks = tasks
        streams = dict.fromkeys(task.stream for task in tasks.operations)
        self.queues = {
            stream: OperationQueue(f"{tasks.name} {stream}", tasks.window) for stream in streams or (Stream.GRADIENTS,)
        }
        self.current, self.previous = StepOperations(), StepOperations()
        self._after: dict[LocalEventKey, list[int]] = {}
        for position, task in enumerate(tasks.operations):
            for event in task.events:
                self._after.setdefault(event, []).append(position)

    def begin_step(self) -> None:
        """Queue all operations of the step in the order of the schedule."""
        self.previous, self.current = self.current, StepOperations()
        step = self.current
        for task in self.tasks.operations:
            posted = self.queues[task.stream].add(task, len(task.events) + len(task.operations))
            for position in task.operations:
                step.operations[position].dependents.append(posted)
            for k in task.gathers_before:
                gather = self.previous.gathered.get(k)
                if gather is not None and not gather.done:
                    gather.dependents.append(posted)
                    posted.needs += 1
            step.operations.append(posted)
            if task.gathers is not None:
                step.gathered[task.gathers] = posted
            elif self.tasks.allreduce:
                step.pending[task.slice] = posted

    def happens(self, event: LocalEventKey) -> None:
        """Record an event of this step; repeated events have no effect."""
        if event not in self.current.happened:
            self.current.happened.add(event)
            for position in self._after.get(event, ()):
                self.current.operations[position].needs -= 1

    def all_happen(self) -> None:
        """Record all remaining events of this step, at the end of backward."""
        for event in self._after:
            self.happens(event)
