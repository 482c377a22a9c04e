"""Lanes: the messages of a rank to the same others, which go one after another, as on one connection.

Messages that are posted first are sent first, and while one is held up, so is everything behind it. Lanes of other ranks of a
node share the same card. A lane counts what has moved on it, in seconds of the resource, so that it is known how much may still
move until the next poll.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from hpctrain.planner.simulation.shared_resource import SharedJob, SharedResource

# A test of a further operation at the same poll lets so much of an unattended share move beside that of the first: with MPICH
# over TCP 2, 3, 4 and 6 operations in flight moved 1.28, 1.50, 1.80 and 2.24 times as much between polls as one.
_FURTHER_TEST = 0.26


class Sender(Protocol):
    """A message in a lane."""

    weight: float

    def send(self) -> None:
        """Its turn has come: `Lane.grant` says how much may move."""
        ...

    def moved(self, seconds: float) -> None:
        """All that was granted last has moved."""
        ...


class Lane:
    """Messages in order.

    Args:
        resource: a card or a memory, shared with other lanes.
    """

    def __init__(self, resource: SharedResource) -> None:
        self._resource = resource
        self._queue: deque[Sender] = deque()
        self._job: SharedJob | None = None
        self._granted = 0.0
        self._moved_seconds = self._looked_seconds = 0.0
        self._tests = 1.0

    def enter(self, sender: Sender) -> None:
        """Queue a message; its turn may come at once."""
        self._queue.append(sender)
        if len(self._queue) == 1:
            sender.send()

    def leave(self) -> None:
        """The first message has moved; the next one's turn has come."""
        self._queue.popleft()
        if self._queue:
            self._queue[0].send()

    def sends(self, sender: Sender) -> bool:
        """Whether it is this message's turn."""
        return bool(self._queue) and self._queue[0] is sender

    def grant(self, seconds: float) -> None:
        """Let the first message move so much."""
        self._granted = seconds
        self._job = self._resource.start(seconds, self._queue[0].weight, self._end)

    def withdraw(self) -> float:
        """Take back what was granted and has not moved yet; give what has moved of it."""
        job, self._job = self._job, None
        if job is None:
            return 0.0
        moved = self._granted - self._resource.stop(job)
        self._moved_seconds += moved
        return moved

    def look(self, tests: int = 1) -> None:
        """The rank's program looks after its messages. tests: of operations; further ones let a little more move."""
        self._tests = 1 + _FURTHER_TEST * (tests - 1)
        self._looked_seconds = self._moved_seconds
        if self._job is not None:
            self._looked_seconds += self._granted - self._resource.remaining(self._job)

    def allowed(self, unattended_seconds: float) -> float:
        """Seconds that may still move before the next look, where so many may after one test."""
        return self._looked_seconds + self._tests * unattended_seconds - self._moved_seconds

    def _end(self) -> None:
        self._job = None
        self._moved_seconds += self._granted
        self._queue[0].moved(self._granted)
