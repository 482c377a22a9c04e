"""Simulated process: it computes, posts, polls and waits as a rank does, and records the same events as a run."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence, Sized
from typing import TypeAlias

import numpy as np

from hpctrain.comm.progress import ProgressMode
from hpctrain.comm.waiting import INTERVAL_SECONDS
from hpctrain.planner.costs.collective_costs import CollectiveStage
from hpctrain.planner.simulation.operations import MeetingShare, OperationQueue, Posted, SimulatedGroup
from hpctrain.planner.simulation.resources import SharedResource
from hpctrain.planner.simulation.transfers import Attention, Lane, StageTransfer
from hpctrain.planner.simulation.world import SimulatedPlace, SimulatedWorld
from hpctrain.trace.tracer import HOOKS, Category, Events

_NANOSECONDS = 1e9


class EventRecorder:
    """Recorder of a process's events. Events that are added before `begin` are discarded.

    Arguments are seconds since the beginning of the simulation; events are stored in ns.
    """

    def __init__(self) -> None:
        self.recording = False
        self._end = float("inf")
        self._numbers = [array("q") for _ in range(4)]  # category, name, track, number
        self._seconds = [array("d"), array("d")]
        self._names: dict[str, int] = {}
        self._tracks: dict[str, int] = {"": 0}

    def begin(self) -> None:
        """Start recording. Events in progress are recorded when they end."""
        self.recording = True

    def end(self, seconds: float) -> None:
        """Discard events that begin at `seconds` or later."""
        self._end = seconds

    def add(self, category: Category, name: str, start: float, stop: float, track: str = "", number: int = 0) -> None:
        """Record an event; `track` and `number` are those of an operation in flight."""
        if not self.recording or start >= self._end:
            return
        names, tracks, numbers = self._names, self._tracks, self._numbers
        numbers[0].append(category)
        numbers[1].append(names.setdefault(name, len(names)))
        numbers[2].append(tracks.setdefault(track, len(tracks)))
        numbers[3].append(number)
        self._seconds[0].append(start)
        self._seconds[1].append(stop)

    def events(self) -> Events:
        """Return a copy of the recorded events, ordered by their begin; of events that begin together, the outer comes first."""
        numbers = np.array(self._numbers, np.int64)
        start, stop = np.rint(np.array(self._seconds) * _NANOSECONDS).astype(np.int64)
        depth = np.select([numbers[0] == Category.STEP, numbers[0] == Category.WAIT], [0, 1], 2)
        order = np.lexsort((depth, -stop, start))
        category, name, track, number = numbers[:, order]
        return Events(
            tuple(self._names),
            tuple(self._tracks),
            category.astype(np.int32),
            name.astype(np.int32),
            track.astype(np.int32),
            number,
            start[order],
            stop[order],
        )


#: part of the program; it yields while it computes or waits, and continues when it is resumed
Stretch: TypeAlias = Generator[None, None, None]


class SimulatedProcess:
    """Process that simulates the ranks of one place: their work on cores, their polls, and their part in operations.

    Args:
        slow: factor by which all work of the cores takes longer.

    Attributes:
        queues: queues of operations, in the order of polls.
        group_of: communicator of each queue.
        awaited: operation for which the process waits; None: it does not wait.
    """

    def __init__(self, place: SimulatedPlace, world: SimulatedWorld, progress: ProgressMode, slow: float = 1.0) -> None:
        self.place, self.world, self._progress, self._slow = place, world, progress, slow
        self.recorder = EventRecorder()
        self.queues: list[OperationQueue] = []
        self.group_of: dict[OperationQueue, SimulatedGroup] = {}
        self.awaited: Posted | None = None
        self._loop, self._cores, self._card = world.loop, world.cores(place), world.card(place)
        self._memory = SharedResource(world.loop, 1.0)  # for copies of this rank
        self._program: Iterator[None] = iter(())
        self._asleep = self._thread_due = False
        self._unseen: list[MeetingShare] = []
        self._attention = Attention(self._expect_thread)
        self._lanes: dict[tuple[str, bool], Lane] = {}
        self._flying: dict[Posted, None] = {}
        self._wait_begun = self._paid_until = 0.0
        self._posted: dict[Hashable, int] = {}
        self._count = 0

    # -- running ---------------------------------------------------------------------------------------------------------------

    def start(self, program: Stretch) -> None:
        """Run a program, beginning at the current time."""
        self._program = program
        self._loop.soon(self.resume)

    def resume(self) -> None:
        """Continue the program after a wait."""
        next(self._program, None)

    def work(self, seconds: float) -> Stretch:
        """Compute for `seconds` seconds of a core of normal speed."""
        if seconds <= 0:
            return
        seconds *= self._slow
        attended = self._attention.attends
        if attended:
            self._end_wait()
        self._cores.run(seconds, self.place.node_ranks, self.resume)
        yield
        if attended:
            self._begin_wait()

    def wait(self, posted: Posted) -> Stretch:
        """Poll until an operation is complete."""
        if posted.is_done():
            return
        begin = self._loop.now
        self._begin_wait()
        yield from self.poll()
        while not posted.is_done():
            self._asleep, self.awaited = True, posted
            yield
            yield from self.poll()
        self.awaited = None
        if begin + self._cores.slice_seconds > self._loop.now:  # wait until the process gets back the core that it has yielded
            self._loop.at(begin + self._cores.slice_seconds, self.resume)
            yield
        self._end_wait()
        self.recorder.add(Category.WAIT, posted.text, begin, self._loop.now, posted.track, posted.number)

    @property
    def busy(self) -> bool:
        """Whether a poll would do any work."""
        return (
            bool(self._unseen)
            or self._attention.needed
            or self._attention.debt_seconds > 0
            or any(queue.startable for queue in self.queues)
        )

    def poll(self) -> Stretch:
        """Poll operations in flight, complete those that have ended, and start waiting operations that may start."""
        self._attention.poll(_tests(self._flying))
        debt = self._attention.pay()
        if debt > 0:
            begin = self._loop.now
            yield from self.work(debt)
            self._record_progress(begin)
        while True:
            unseen, self._unseen = self._unseen, []
            for share in sorted(unseen, key=_position):
                if share.cpu_seconds > 0:  # the core pays for the messages of a stage before the stage is complete
                    yield from self._pay(share.cpu_seconds, share.begun_seconds)
                _complete(share, self._flying, self.recorder, self._loop.now)
            queue = next((queue for queue in self.queues if queue.startable), None)
            if queue is not None:
                yield from self._start_head(queue)
            elif not self._unseen:
                return

    def post(self, group: SimulatedGroup, posted: Posted, stages: Sequence[CollectiveStage]) -> None:
        """Post an operation on a group's communicator. All processes of the group post the same operations in the same order."""
        posted.begun_seconds = self._loop.now
        posted.position, self._count = self._count, self._count + 1
        self._flying[posted] = None
        key = (group.key, posted.track)
        number = self._posted[key] = self._posted.get(key, 0) + 1
        meeting = self.world.meetings.of((key, number), group.members)
        meeting.join(self, posted, stages, group)

    def finish(self) -> None:
        """Record the operations that are in flight at the end of the simulation."""
        for posted in self._flying:
            _record_operation(self.recorder, posted, self._loop.now)

    # -- operations --------------------------------------------------------------------------------------------------------------

    def _start_head(self, queue: OperationQueue) -> Stretch:
        task, posted = queue.take()
        begin = self._loop.now
        yield from self.work(task.prepare_seconds)
        self._record_progress(begin)
        yield from self.update(task.update_seconds, task.parameter)
        self.post(self.group_of[queue], posted, task.stages)

    def update(self, seconds: float, parameter: str) -> Stretch:
        """Run an update of the optimiser that takes `seconds`, and record it under `parameter`."""
        begin = self._loop.now
        yield from self.work(seconds)
        if seconds > 0:
            self.recorder.add(Category.UPDATE, parameter, begin, self._loop.now)

    def _pay(self, seconds: float, since: float) -> Stretch:
        """Charge the core for messages sent `since` a time: on arrival while the rank waits, otherwise at the noticing poll."""
        begin = self._loop.now
        if not self._attention.attends:
            yield from self.work(seconds)
            self._record_progress(begin)
            return
        from_seconds = max(since, self._wait_begun, self._paid_until)
        covered = min(seconds, max(0.0, begin - from_seconds))
        self._paid_until = from_seconds + covered
        self._cores.charge(covered, self.place.node_ranks)
        yield from self.work(seconds - covered)

    def _record_progress(self, begin: float) -> None:
        """Record the program's time between operators, unless it belongs to a wait."""
        if self._loop.now > begin and not self._attention.attends:
            self.recorder.add(Category.AVERAGING, HOOKS, begin, self._loop.now)

    # -- attention ---------------------------------------------------------------------------------------------------------------

    def _begin_wait(self) -> None:
        self._wait_begun = self._loop.now
        self._cores.begin_wait(self.place.node_ranks)
        self._attention.begin_wait()

    def _end_wait(self) -> None:
        self._cores.end_wait(self.place.node_ranks)
        self._attention.end_wait(_tests(self._flying))

    def _poll_from_thread(self) -> None:
        """Poll from the progress thread: messages move and next stages begin. Operations do not complete."""
        self._thread_due = False
        self._attention.poll(_tests(self._flying))
        if self._attention.attends:
            return
        while shares := [share for share in self._unseen if not share.is_last]:
            self._unseen = [share for share in self._unseen if share not in shares]
            for share in sorted(shares, key=_position):
                self._attention.owes(share.cpu_seconds)  # the program pays for this time of the core at its next poll
                _complete(share, self._flying, self.recorder, self._loop.now)

    def _expect_thread(self) -> None:
        if self._progress is ProgressMode.THREAD and not self._thread_due:
            self._thread_due = True
            passes = math.floor(self._loop.now / INTERVAL_SECONDS * (1 + 1e-12)) + 1
            self._loop.at(passes * INTERVAL_SECONDS, self._poll_from_thread)

    # -- a member of meetings ----------------------------------------------------------------------------------------------------

    def transfer(self, stage: CollectiveStage, group: SimulatedGroup, ended: Callable[[], None]) -> StageTransfer:
        lane = self._lanes.get((group.lane, stage.between))
        if lane is None:
            lane = self._lanes[group.lane, stage.between] = Lane(self._card if stage.between else self._memory)
        weight = stage.sharers * group.node_share if stage.between else 1.0
        transfer = StageTransfer(self._loop, self._attention, stage, lane, weight, ended)
        self._attention.add(transfer, lane)
        return transfer

    def stage_ended(self, share: MeetingShare) -> None:
        if share.transfer is not None:
            self._attention.remove(share.transfer)
        self._unseen.append(share)
        if self._asleep:
            self._asleep = False
            self._loop.soon(self.resume)
        elif not self._attention.attends:
            self._expect_thread()


def _complete(share: MeetingShare, flying: dict[Posted, None], recorder: EventRecorder, now: float) -> None:
    """Complete a stage: post the next stage; after the last one, release dependent operations."""
    if not share.is_last:
        share.next_stage()
        return
    posted = share.posted
    posted.done = True
    del flying[posted]
    if posted.complete is not None:
        posted.complete()
    for later in posted.dependents:
        later.needs -= 1
    posted.dependents.clear()
    _record_operation(recorder, posted, now)


def _position(share: MeetingShare) -> int:
    """Return the position of the operation in posting order, in which operations are tested."""
    return share.posted.position


def _tests(flying: Sized) -> int:
    """Return the number of tests of a poll: one per operation in flight, at least one."""
    return max(1, len(flying))


def _record_operation(recorder: EventRecorder, posted: Posted, now: float) -> None:
    recorder.add(Category.COMMUNICATION, posted.text, posted.begun_seconds, now, posted.track, posted.number)
