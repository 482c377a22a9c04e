"""Simulated time, and the resources that jobs share: cores, network cards and memories.

`EventLoop` runs actions in the order of time; actions at the same time run in the order of the requests. `SharedResource`
simulates processor sharing. All jobs progress at the same rate, so a single number, the position, measures the progress of each
job. It grows by one per second below the capacity, and more slowly above it. A job ends at a fixed position, so only the first
end needs an event. An idle network card accumulates tokens, as a token bucket does. Until it has spent them, it sends many times
faster. The ranks of a node share its `Cores` if there are more ranks than cores.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial

Act = Callable[[], object]


class EventLoop:
    """Queue of actions, ordered by time.

    Attributes:
        now: seconds since the beginning of the simulation.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._actions: list[tuple[float, int, Act]] = []
        self._count = 0
        self._running = True

    def at(self, seconds: float, action: Act) -> None:
        """Schedule an action at a time that is not in the past."""
        self._count += 1
        heapq.heappush(self._actions, (seconds, self._count, action))

    def soon(self, action: Act) -> None:
        """Schedule an action at the current time, after the current action."""
        self.at(self.now, action)

    def stop(self) -> None:
        """Make `run` return after the current action."""
        self._running = False

    def run(self) -> bool:
        """Run actions. Return True once `stop` was called; return False if no action is left."""
        actions, pop = self._actions, heapq.heappop
        while self._running:
            if not actions:
                return False
            self.now, _, action = pop(actions)
            action()
        return True


_ROUNDING_SECONDS = 1e-13
# Speed-up while accumulated time is spent; the latency contains the rest of a message's time.
_SPENDING = 64.0


class SharedJob:
    """Job of a shared resource.

    Attributes:
        end: position at which it is complete.
        action: callback at its end; None: nothing is called.
        active: whether it is neither complete nor stopped.
    """

    __slots__ = ("action", "active", "end", "weight")

    def __init__(self, end: float, weight: float, action: Act | None) -> None:
        self.end, self.weight, self.action = end, weight, action
        self.active = True


class SharedResource:
    """Resource that jobs share.

    Args:
        capacity: total weight up to which jobs progress by one second per second; above it, all jobs progress more slowly.
        most_saved_seconds: maximum time that an idle resource accumulates, and the amount with which it begins.
    """

    def __init__(self, loop: EventLoop, capacity: float, most_saved_seconds: float = 0.0) -> None:
        self._loop, self._capacity = loop, capacity
        self._most_saved = self._saved = most_saved_seconds
        self._due_is_spent = False  # whether the next event is the end of the accumulated time, not of a job
        self._ends: list[tuple[float, int, SharedJob]] = []
        self._jobs = self._count = self._due = 0
        self._due_seconds = -1.0
        self._weight = self._load = 0.0
        self._position = self._at_seconds = 0.0
        self._rate = 1.0

    @property
    def position(self) -> float:
        """Progress, in seconds, of a job that has run since the beginning of the simulation."""
        now = self._loop.now
        if now > self._at_seconds:
            self._position += (now - self._at_seconds) * self._rate
            if self._most_saved:
                used = self._rate * self._weight if self._jobs else 0.0
                self._saved = min(self._most_saved, max(0.0, self._saved + (now - self._at_seconds) * (1.0 - used)))
            self._at_seconds = now
        return self._position

    def start(self, seconds: float, weight: float, action: Act | None) -> SharedJob:
        """Start a job of `weight` that takes `seconds` seconds without other jobs, and run `action` at its end."""
        job = SharedJob(self.position + seconds, weight, action)
        self._jobs += 1
        self._weight += weight
        self._count += 1
        heapq.heappush(self._ends, (job.end, self._count, job))
        self._changed()
        return job

    def load(self, weight: float) -> None:
        """Add a permanent weight without a job; a negative weight removes it."""
        self.position  # noqa: B018  # progress so far at the old rate
        self._load += weight
        self._changed()

    def remaining(self, job: SharedJob) -> float:
        """Return the seconds that a job still needs."""
        return max(0.0, job.end - self.position)

    def stop(self, job: SharedJob) -> float:
        """End a job early, without its action, and return the seconds that it still needed."""
        left = self.remaining(job)
        job.active = False
        self._jobs -= 1
        self._weight -= job.weight
        self._changed()
        return left

    def _changed(self) -> None:
        """Schedule the next end, at the rate of the current jobs."""
        if not self._jobs:
            self._weight = 0.0  # so that rounding errors do not accumulate
        weight = self._weight + self._load
        self._rate = 1.0 if weight <= self._capacity else self._capacity / weight
        ends = self._ends
        while ends and not ends[0][2].active:
            heapq.heappop(ends)
        if not ends:
            self._due += 1
            self._due_seconds = -1.0
            return
        spends = self._saved > _ROUNDING_SECONDS and self._weight > 0
        if spends:
            self._rate *= _SPENDING
        due = self._loop.now + max(0.0, ends[0][0] - self._position) / self._rate
        left = self._loop.now + self._saved / max(_ROUNDING_SECONDS, self._rate * self._weight - 1.0) if spends else due
        self._due_is_spent = left < due
        due = min(due, left)
        if due != self._due_seconds:
            self._due += 1
            self._due_seconds = due
            self._loop.at(due, partial(self._end, self._due))

    def _end(self, due: int) -> None:
        if due != self._due:
            return
        if self._due_is_spent:
            self.position  # noqa: B018  # progress so far at the high rate
            self._saved, self._due_seconds = 0.0, -1.0
            self._changed()
            return
        ends = self._ends
        self._position = reached = max(self.position, ends[0][0])
        complete: list[SharedJob] = []
        while ends and ends[0][0] <= reached + _ROUNDING_SECONDS:
            _, _, job = heapq.heappop(ends)
            if job.active:
                job.active = False
                self._jobs -= 1
                self._weight -= job.weight
                complete.append(job)
        self._due_seconds = -1.0
        self._changed()
        for job in complete:
            if job.action is not None:
                job.action()


#: share of a core that a waiting rank uses: it yields its core after each poll, and soon sleeps between polls
_POLLING_SHARE = 0.05
# Half of the time between two clock ticks (250 per second): Linux lets a computing rank continue until a tick.
_SLICE_SECONDS = 2e-3


class Cores:
    """All cores of a node, shared fairly by the operating system.

    Args:
        ranks: number of ranks of the node; if each rank has a core to itself, nothing is shared.

    Attributes:
        slice_seconds: mean time until a rank that has yielded its core receives it again; 0 if nothing is shared.
    """

    def __init__(self, loop: EventLoop, count: float, ranks: int) -> None:
        self._loop = loop
        self._shared = SharedResource(loop, count) if count < ranks else None
        self.slice_seconds = 0.0 if self._shared is None else _SLICE_SECONDS

    def run(self, seconds: float, ranks: float, action: Act) -> None:
        """Compute for `seconds` seconds of a core on each of `ranks` ranks, then run `action`."""
        if self._shared is None:
            self._loop.at(self._loop.now + seconds, action)
        else:
            self._shared.start(seconds, ranks, action)

    def charge(self, seconds: float, ranks: float) -> None:
        """Charge `seconds` of work that each of `ranks` ranks did during a wait, which leaves less time for other ranks."""
        if self._shared is not None and seconds > 0:
            self._shared.start(seconds, ranks, None)

    def begin_wait(self, ranks: float) -> None:
        """Start polling on `ranks` ranks."""
        if self._shared is not None:
            self._shared.load(_POLLING_SHARE * ranks)

    def end_wait(self, ranks: float) -> None:
        """Stop polling on `ranks` ranks."""
        if self._shared is not None:
            self._shared.load(-_POLLING_SHARE * ranks)
