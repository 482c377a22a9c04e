"""Posting queues: operations of one communicator, which start in the order of a schedule, few at a time, when they may."""

from __future__ import annotations

from collections import deque

from hpctrain.averaging.collective_schedule import Stream
from hpctrain.averaging.dependencies import LocalEventKey
from hpctrain.planner.simulation.group_tasks import GroupTasks, OperationTask
from hpctrain.planner.simulation.operations import Posted


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
