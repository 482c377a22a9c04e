"""Collectives of a simulated rank: as tasks of a group's averaging, queued, and in flight.

`group_tasks` prices a group's schedule for one class of ranks. `GroupQueues` starts operations in the order of the schedule,
few at a time, when their dependencies allow it. A `Meeting` is a collective in flight: a stage moves once all ranks of the
group have posted it, and is complete once it is complete on all of them.
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
from hpctrain.planner.collective_costs import MessageCosts, Stage
from hpctrain.planner.machine import Machine
from hpctrain.planner.simulation.resources import EventLoop
from hpctrain.planner.simulation.transfers import StageTransfer
from hpctrain.planner.tasks import AveragedGroup, GroupPlacement

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


@dataclass(frozen=True)
class SimulatedGroup:
    """A communicator as one process sees it.

    Attributes:
        key: which one it is. members: processes in it. placement: of its ranks.
        node_share: of the ranks of a node that send in it, and in groups alike, those that the process stands for.
        lane: groups of the same ranks have the same one: what they send goes one after another.
    """

    key: Hashable
    members: int
    placement: GroupPlacement
    node_share: float
    lane: str


class Posted:
    """An operation of one rank: queued, in flight, or done.

    Attributes:
        text, track, number: as traces name it. position: among all that the rank has posted.
        needs: things that must happen before it starts. done: seen to be complete.
        begun_seconds: when it was posted. dependents: operations that come after it. complete: called once it is done.
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
        """As `done`, asked for again after others have acted."""
        return self.done

    def __str__(self) -> str:
        return f"{self.text} ({self.track} {self.number})"


class Member(Protocol):
    """A rank in a meeting."""

    def transfer(self, stage: Stage, group: SimulatedGroup, ended: Callable[[], None]) -> StageTransfer:
        """Its share of a stage, not begun."""
        ...

    def stage_ended(self, share: MeetingShare) -> None:
        """A stage is over; the rank calls `share.seen` once its program has noticed."""
        ...


class MeetingShare:
    """One rank's share of a meeting.

    Attributes:
        posted: the operation. stage: that is under way, or was last; None: none, or one that the others have alone.
        transfer: of that stage.
    """

    __slots__ = ("_group", "_meeting", "_stages", "member", "posted", "stage", "transfer")

    def __init__(self, meeting: Meeting, member: Member, posted: Posted, stages: Sequence[Stage], group: SimulatedGroup) -> None:
        self._meeting, self.member, self.posted, self._stages = meeting, member, posted, stages
        self._group = group
        self.stage: Stage | None = None
        self.transfer: StageTransfer | None = None

    def begin(self, position: int) -> None:
        """This rank's transfer of a stage begins; one that it has no share of is over at once."""
        if position >= len(self._stages):
            self.stage = None
            self._meeting.ended()
            return
        self.stage = self._stages[position]
        self.transfer = self.member.transfer(self.stage, self._group, self._meeting.ended)
        self.transfer.begin()

    @property
    def cpu_seconds(self) -> float:
        """Seconds of the rank's core for the stage that are still to be paid."""
        return 0.0 if self.stage is None or self.transfer is None else self.transfer.cpu_left

    @property
    def begun_seconds(self) -> float:
        """The instant at which the stage began."""
        return 0.0 if self.transfer is None else self.transfer.begun_seconds

    @property
    def is_last(self) -> bool:
        """Whether the stage is the last of the collective."""
        return self._meeting.is_last

    def next_stage(self) -> None:
        """The program has noticed the end of a stage, and posts the next one."""
        self._meeting.arrive()


class Meeting:
    """A collective: a stage moves once all members have posted it, and is over once it is over on all of them.

    Args:
        members: that take part. forget: called once all have arrived, so that nobody looks for it again.
    """

    def __init__(self, loop: EventLoop, members: int, forget: Callable[[], None]) -> None:
        self._loop, self._members, self._forget = loop, members, forget
        self._shares: list[MeetingShare] = []
        self._waiting = members
        self._moving = 0
        self._stage = -1
        self._stages = 0

    def join(self, member: Member, posted: Posted, stages: Sequence[Stage], group: SimulatedGroup) -> None:
        """A member posts its operation."""
        self._shares.append(MeetingShare(self, member, posted, stages, group))
        self._stages = max(self._stages, len(stages))
        if len(self._shares) == self._members:
            self._forget()
        self.arrive()

    @property
    def is_last(self) -> bool:
        """Whether the stage that is under way, or was last, is the collective's last."""
        return self._stage >= self._stages - 1

    def ended(self) -> None:
        """A member's share of the stage is over."""
        self._moving -= 1
        if not self._moving:
            for share in self._shares:
                share.member.stage_ended(share)

    def arrive(self) -> None:
        """A member has posted the next stage."""
        self._waiting -= 1
        if self._waiting:
            return
        self._waiting = self._moving = self._members
        self._stage += 1
        if self._members == 1 and not self._stages:
            self._begin()
        else:  # once all that poll at this instant have done so: no member's order matters
            self._loop.soon(self._begin)

    def _begin(self) -> None:
        for share in self._shares:
            share.begin(self._stage)


class Meetings:
    """All meetings that somebody has come to and not everybody yet, by the operation's key."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._open: dict[Hashable, Meeting] = {}

    def of(self, key: Hashable, members: int) -> Meeting:
        """The meeting of an operation: the communicator that it is posted on, and its position there."""
        meeting = self._open.get(key)
        if meeting is None:
            meeting = self._open[key] = Meeting(self._loop, members, lambda: self._forget(key))
        return meeting

    def _forget(self, key: Hashable) -> None:
        del self._open[key]


class OperationQueue:
    """One stream of a group on one rank.

    Args:
        name: as traces call it. window: most operations in flight; None: no limit.
    """

    def __init__(self, name: str, window: int | None) -> None:
        self.name, self._window = name, window
        self._waiting: deque[tuple[OperationTask, Posted]] = deque()
        self._in_flight = self._count = 0

    def add(self, task: OperationTask, needs: int) -> Posted:
        """Queue an operation that starts after so many things beside its turn."""
        posted = Posted(task.text, self.name, self._count, needs)
        posted.complete = self._complete
        self._count += 1
        self._waiting.append((task, posted))
        return posted

    @property
    def startable(self) -> bool:
        """Whether the first that waits may start."""
        if not self._waiting or self._waiting[0][1].needs:
            return False
        return self._window is None or self._in_flight < self._window

    def take(self) -> tuple[OperationTask, Posted]:
        """The first that waits starts."""
        self._in_flight += 1
        return self._waiting.popleft()

    def _complete(self) -> None:
        self._in_flight -= 1


class StepOperations:
    """The operations of one step of a group on one rank.

    Attributes:
        operations: in the schedule's order. gathered: by slice, its allgather. pending: by slice, sums that are not yet used for
            an update.
    """

    def __init__(self) -> None:
        self.operations: list[Posted] = []
        self.gathered: dict[int, Posted] = {}
        self.pending: dict[int, Posted] = {}
        self.happened: set[LocalEventKey] = set()


class GroupQueues:
    """The queues of one parameter group on one rank, filled at each step's begin.

    Attributes:
        tasks: of the group. queues: by stream. current, previous: steps.
    """

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
        """Queue all operations of the step, in the schedule's order."""
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
        """An event of this step; a second time it is none."""
        if event not in self.current.happened:
            self.current.happened.add(event)
            for position in self._after.get(event, ()):
                self.current.operations[position].needs -= 1

    def all_happen(self) -> None:
        """Whatever has not happened at the end of backward happens now."""
        for event in self._after:
            self.happens(event)

    def gathers_of(self, parameter: str) -> list[Posted]:
        """Operations of the step before that bring a parameter."""
        gathered = self.previous.gathered
        return [gathered[k] for k in self.tasks.touching.get(parameter, ()) if k in gathered]
