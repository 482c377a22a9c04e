"""Queues of work, done as late and in as odd an order as the marks between them allow.

Whenever something is enqueued, some of the work that may be done is done, of any queue; when somebody waits, the work that is
waited for is done, alone or among other work. So a program that forgets to wait is likely to compute with what is not there yet,
and the seed that shows it shows it again.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.cuda.emulator.errors import EmulatedDeviceError

#: by seed, the probability that one more piece of work is done after a call; and that nothing is done but what is waited for
_EAGERNESS, _LAZINESS = (0.02, 0.2, 0.5), (0.3, 0.9)
#: by seed and queue, how much a queue is preferred
_PREFERENCES = (1, 1, 20)


class WorkQueue:
    """Work in its order.

    Attributes:
        issued, done: numbers of pieces.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.pending: deque[Work] = deque()
        self.issued, self.done = 0, 0

    @property
    def mark(self) -> Mark:
        """All work so far."""
        return Mark(self, self.issued)

    @property
    def blocked_by(self) -> Mark | None:
        """The mark that the next piece waits for."""
        after = self.pending[0].after if self.pending else None
        return None if after is None or after.done else after


@dataclass(frozen=True)
class Mark:
    """The work of a queue up to a position."""

    queue: WorkQueue
    position: int

    @property
    def done(self) -> bool:
        """All of it is done."""
        return self.queue.done >= self.position


@dataclass
class Work:
    """A piece of work.

    Args:
        after: it is done after this. kept: arrays whose memory stays in use until it is done.
        reads, writes: host memory. goes_on: is asked while the piece is the next one, as it needs other devices; True once it can
            be done.
    """

    text: str
    action: Callable[[], None] | None = None
    after: Mark | None = None
    kept: Sequence[DeviceArray] = ()
    reads: tuple[np.ndarray, ...] = ()
    writes: tuple[np.ndarray, ...] = ()
    goes_on: Callable[[], bool] | None = None


class WorkScheduler:
    """Does the work of many queues. failed: a piece raised an error."""

    def __init__(self, source: random.Random) -> None:
        self.queues: list[WorkQueue] = []
        self.failed = False
        self._random = source
        self._eagerness, self._laziness = source.choice(_EAGERNESS), source.choice(_LAZINESS)
        self._preferences: dict[WorkQueue, int] = {}

    def queue(self, name: str) -> WorkQueue:
        """A new queue."""
        queue = WorkQueue(name)
        self.queues.append(queue)
        self._preferences[queue] = self._random.choice(_PREFERENCES)
        return queue

    def append(self, queue: WorkQueue, work: Work) -> None:
        """Add a piece to a queue."""
        queue.pending.append(work)
        queue.issued += 1

    def is_pending(self, memory: np.ndarray) -> bool:
        """Work that is not done reads or writes this memory of the host."""
        works = (work for queue in self.queues for work in queue.pending)
        return any(np.may_share_memory(memory, other) for work in works for other in (*work.reads, *work.writes))

    def run_until(self, mark: Mark) -> None:
        """Do what a mark needs, and maybe other work."""
        alone = self._random.random() < self._laziness
        while not mark.done:
            self._step_where_ready(self._needed(mark.queue) if alone else self._pick())

    def run_all(self) -> None:
        """Do all work."""
        while any(queue.pending for queue in self.queues):
            self._step_where_ready(self._pick())

    def run_some(self) -> None:
        """Do some work, or none."""
        while self._random.random() < self._eagerness and any(q.pending and not q.blocked_by for q in self.queues):
            self._step_where_ready(self._pick())

    def advance(self, mark: Mark, *, everything: bool = False) -> None:
        """Ask other devices, where the next piece that a mark needs is one that needs these; never waits for them.

        everything: do all that the mark needs, as far as other devices have come.
        """
        while not mark.done:
            queue = self._needed(mark.queue)
            asks = queue.pending[0].goes_on is not None
            if not (asks or everything) or not self._step_where_ready(queue) or not everything:
                return

    def _pick(self) -> WorkQueue:
        """A queue whose next piece can be done."""
        ready = [queue for queue in self.queues if queue.pending and not queue.blocked_by]
        if not ready:
            raise _deadlock([queue for queue in self.queues if queue.pending])
        return self._random.choices(ready, [self._preferences[queue] for queue in ready])[0]

    def _needed(self, queue: WorkQueue) -> WorkQueue:
        """The queue whose next piece brings `queue` forward."""
        passed = []
        while mark := queue.blocked_by:
            passed.append(queue)
            queue = mark.queue
            if queue in passed or not queue.pending:
                raise _deadlock(passed)
        return queue

    def _step_where_ready(self, queue: WorkQueue) -> bool:
        """Do the next piece of a queue, unless other devices have not come so far; True where it was done."""
        goes_on = queue.pending[0].goes_on
        try:
            ready = goes_on is None or goes_on()
        except BaseException:
            self.failed = True
            raise
        if ready:
            self._step(queue)
        return ready

    def _step(self, queue: WorkQueue) -> None:
        work = queue.pending.popleft()
        try:
            if work.action:
                work.action()
        except BaseException:
            self.failed = True
            raise
        finally:
            queue.done += 1


def _deadlock(queues: Sequence[WorkQueue]) -> EmulatedDeviceError:
    waits = ", ".join(f"{queue.name} in {queue.pending[0].text}" for queue in queues)
    return EmulatedDeviceError(f"Streams wait without end: {waits}.")
