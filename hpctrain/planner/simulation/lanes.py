"""Lanes: the messages of a rank to the same others, which go one after another, as on one connection.

Messages that are posted first are sent first, and while one is held up, so is everything behind it. Long messages that are sent
after a handshake let shorter ones pass, even those that come while they move. Lanes of other ranks of a
node share the same card. A lane counts what has moved on it, in seconds of the resource, so that it is known how much may still
move until the next poll.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from hpctrain.planner.simulation.resources import SharedJob, SharedResource

# A test of a further operation at the same poll lets so much of an unattended share move beside that of the first: with MPICH
# over TCP 2, 3, 4 and 6 messages took 1 / 1.28, 1 / 1.50, 1 / 1.80 and 1 / 2.24 of the polls that they take one after another,
# and fewer and fewer of them are in flight meanwhile.
_FURTHER_TEST = 0.78
_ROUNDING_SECONDS = 1e-12


class Sender(Protocol):
    """A message in a lane.

    weight: how many times it counts on the resource. yields: others pass it, once `committed_seconds` more of it have moved.
    """

    weight: float
    yields: bool
    committed_seconds: float

    def interrupt(self) -> None:
        """Another one passes: `Lane.withdraw` what was granted; `send` follows later."""
        ...

    def send(self) -> None:
        """Its turn has come: `Lane.grant` says how much may move."""
        ...

    def moved(self, seconds: float) -> bool:
        """All that was granted last has moved; whether that is all there is."""
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
        self._granted = self._committed = 0.0
        self._moved_seconds = self._looked_seconds = 0.0
        self._tests = 1.0

    def enter(self, sender: Sender) -> None:
        """Queue a message behind those that it does not pass; its turn may come at once."""
        place = len(self._queue)
        while place and self._queue[place - 1].yields and not sender.yields:
            place -= 1
        passed = self._queue[0] if self._queue and not place else None
        if passed is not None and self._job is not None:  # what is on its way goes first
            passed.interrupt()
            self._committed = passed.committed_seconds
            self._queue.insert(1, sender)
            passed.send()
            return
        self._queue.insert(place, sender)
        if not place:
            sender.send()

    def leave(self) -> None:
        """The first message has moved; the next one's turn has come."""
        self._queue.popleft()
        self._committed = 0.0
        if self._queue:
            self._queue[0].send()

    def sends(self, sender: Sender) -> bool:
        """Whether it is this message's turn."""
        return bool(self._queue) and self._queue[0] is sender

    def grant(self, seconds: float) -> None:
        """Let the first message move so much."""
        limited = self._queue[0].yields and self._committed > _ROUNDING_SECONDS
        self._granted = min(seconds, self._committed) if limited else seconds
        self._job = self._resource.start(self._granted, self._queue[0].weight, self._end)

    def withdraw(self) -> float:
        """Take back what was granted and has not moved yet; give what has moved of it."""
        job, self._job = self._job, None
        if job is None:
            return 0.0
        moved = self._granted - self._resource.stop(job)
        self._moved_seconds += moved
        self._committed = max(0.0, self._committed - moved)
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
        sender = self._queue[0]
        complete = sender.moved(self._granted)
        if sender.yields and not complete and len(self._queue) > 1 and not self._queue[1].yields:
            self._committed -= self._granted
            if self._committed <= _ROUNDING_SECONDS:
                self._let_pass()
                return
        sender.send()

    def _let_pass(self) -> None:
        """The first message goes behind those that pass it."""
        self._committed = 0.0
        passed = self._queue.popleft()
        place = next((k for k, other in enumerate(self._queue) if other.yields), len(self._queue))
        self._queue.insert(place, passed)
        self._queue[0].send()
