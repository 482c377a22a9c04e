"""Messages of one rank in flight: the order in which they move, and how far they move between two polls.

A `Lane` holds the messages of a rank to the same ranks. They move one after another in posting order, as on one connection: a
blocked message also blocks those after it. Shorter messages overtake long messages with a handshake, even while the long messages
move. The lanes of all ranks that use a card share it. A lane counts the seconds of the resource that its messages have used, to
determine how much may move before the next poll.

A `StageTransfer` is one rank's part in a stage of an operation: the latencies and bytes of its rounds. A round begins at a poll.
Between polls, an operation moves only as much as the transport does without the program. A waiting rank polls all the time. A
rank's `Attention` continues its blocked transfers when it polls or waits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from hpctrain.planner.costs.collective_costs import CollectiveStage
from hpctrain.planner.simulation.resources import Act, EventLoop, SharedJob, SharedResource

# Bytes that each additional test of a poll lets move, relative to the first test. With MPICH over TCP, 2, 3, 4 and 6 messages at
# once took 1 / 1.28, 1 / 1.50, 1 / 1.80 and 1 / 2.24 as many polls as one after another, while the number in flight fell.
_FURTHER_TEST = 0.78
_ROUNDING_SECONDS = 1e-12


class Lane:
    """Queue of the messages of a rank to the same ranks; they move one at a time on a card or memory that lanes share."""

    def __init__(self, resource: SharedResource) -> None:
        self._resource = resource
        self._queue: deque[StageTransfer] = deque()
        self._job: SharedJob | None = None
        self._granted = self._committed = 0.0
        self._moved_seconds = self._polled_seconds = 0.0
        self._tests = 1.0

    def enter(self, sender: StageTransfer) -> None:
        """Queue a message after the messages that it does not overtake. If it is the first one, start sending it."""
        place = len(self._queue)
        while place and self._queue[place - 1].yields and not sender.yields:
            place -= 1
        passed = self._queue[0] if self._queue and not place else None
        if passed is not None and self._job is not None:  # the message in flight goes first
            passed.interrupt()
            self._committed = passed.committed_seconds
            self._queue.insert(1, sender)
            passed.send()
            return
        self._queue.insert(place, sender)
        if not place:
            sender.send()

    def leave(self) -> None:
        """Remove the first message, and start sending the next one."""
        self._queue.popleft()
        self._committed = 0.0
        if self._queue:
            self._queue[0].send()

    def sends(self, sender: StageTransfer) -> bool:
        """Return whether the message is the first one, which may be sent."""
        return bool(self._queue) and self._queue[0] is sender

    def grant(self, seconds: float) -> None:
        """Let the first message move for at most `seconds` seconds."""
        limited = self._queue[0].yields and self._committed > _ROUNDING_SECONDS
        self._granted = min(seconds, self._committed) if limited else seconds
        self._job = self._resource.start(self._granted, self._queue[0].weight, self._end)

    def withdraw(self) -> float:
        """Cancel the rest of the grant, and return the seconds used."""
        job, self._job = self._job, None
        if job is None:
            return 0.0
        moved = self._granted - self._resource.stop(job)
        self._moved_seconds += moved
        self._committed = max(0.0, self._committed - moved)
        return moved

    def poll(self, tests: int = 1) -> None:
        """Record a poll with `tests` tested operations. Each test lets the messages move a little further."""
        self._tests = 1 + _FURTHER_TEST * (tests - 1)
        self._polled_seconds = self._moved_seconds
        if self._job is not None:
            self._polled_seconds += self._granted - self._resource.remaining(self._job)

    def allowed(self, unattended_seconds: float, buffered_seconds: float) -> float:
        """Return the seconds that messages may move before the next poll.

        All messages together move at most `unattended_seconds` for each test of the last poll, and at most `buffered_seconds`.
        """
        return self._polled_seconds + min(self._tests * unattended_seconds, buffered_seconds) - self._moved_seconds

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
        """Move the first message after the messages that overtake it."""
        self._committed = 0.0
        passed = self._queue.popleft()
        place = next((k for k, other in enumerate(self._queue) if other.yields), len(self._queue))
        self._queue.insert(place, passed)
        self._queue[0].send()


# Bytes of a long message that still move when a shorter one overtakes it, because they are in buffers: 2 MiB with MPICH over TCP.
_COMMITTED_BYTES = 2 << 20


class StageTransfer:
    """Stage of an operation on one rank.

    Args:
        weight: weight of the messages on the resource of the lane: number of ranks that send through a card at the same time.

    Attributes:
        restricted: whether the transfer needs polls to continue.
        yields: whether other messages of the lane overtake the message, which then moves only for `committed_seconds` more.
        committed_seconds: seconds that the message still moves when another message overtakes it.
        cpu_left: seconds of the core that the messages still need.
    """

    def __init__(
        self, loop: EventLoop, attention: Attention, stage: CollectiveStage, lane: Lane, weight: float, ended: Act
    ) -> None:
        self._loop, self._attention, self._lane, self._ended = loop, attention, lane, ended
        self.weight, self.yields = weight, stage.yields
        self.committed_seconds = _COMMITTED_BYTES * stage.beta_seconds_per_byte
        self._rounds_left = max(1, stage.rounds)
        self._latency = stage.latency_seconds / self._rounds_left
        self._wire_left = stage.wire_bytes * stage.beta_seconds_per_byte
        self._round_wire = self._wire_left / self._rounds_left
        self._unattended_seconds, self._buffered_seconds = (
            math.inf if n_bytes is None else n_bytes * stage.beta_seconds_per_byte
            for n_bytes in (stage.unattended_bytes, stage.buffered_bytes)
        )
        self._going = 1  # rounds in progress
        self._round_left = 0.0  # seconds of their bytes that have not moved
        self._polls = stage.polls
        self._polls_left = 0  # polls before the first byte of the round moves
        self._blocked = False
        self.cpu_left = stage.cpu_seconds
        self._cpu_share = stage.cpu_seconds / self._wire_left if self._wire_left > 0 else 0.0
        self.begun_seconds = loop.now
        self.restricted = (
            self._rounds_left > 1 or self._polls > 0 or min(self._unattended_seconds, self._buffered_seconds) < math.inf
        )

    def begin(self) -> None:
        """Begin the first round, or all rounds if the rank waits. All ranks of the group must have posted the operation."""
        self.begun_seconds = self._loop.now
        self._begin_rounds()

    # -- polls -------------------------------------------------------------------------------------------------------------------

    def poll(self, tests: int = 1) -> None:
        """Continue a blocked transfer at a poll with `tests` tests."""
        if not self._blocked:
            return
        self._blocked = False
        if self._polls_left > tests:
            self._polls_left -= tests
            self._block()
        elif self._polls_left:
            self._polls_left = 0
            self._begin_latency()
        elif self._round_left <= _ROUNDING_SECONDS:
            self._begin_rounds()
        elif self._lane.sends(self):
            self.send()

    def attend(self) -> None:
        """Handle the start of a wait, during which the transfer is not blocked."""
        self._polls_left = min(1, self._polls_left)  # a waiting rank tests again at once
        if self._blocked:
            self.poll()
        elif self._lane.sends(self):
            self._progress(self._lane.withdraw(), attended=False)
            self.send()

    def leave(self) -> None:
        """Handle the end of a wait. Messages in flight continue as far as they can without polls."""
        if self._round_left <= _ROUNDING_SECONDS:  # no byte is in flight during the latency
            return
        sends = self._lane.sends(self)
        if sends:
            self._progress(self._lane.withdraw(), attended=True)
        if self._going > 1:
            self._going = 1
            self._rounds_left = max(1, math.ceil(self._wire_left / self._round_wire - 1e-9))
            self._round_left = self._wire_left - (self._rounds_left - 1) * self._round_wire
        if sends:
            self.send()

    # -- rounds ------------------------------------------------------------------------------------------------------------------

    def _begin_rounds(self) -> None:
        """Begin the next round; while the rank waits, begin all remaining rounds."""
        attends = self._attention.attends
        self._going = self._rounds_left if attends else 1
        self._polls_left = 0 if attends else self._polls
        if self._polls_left:
            self._block()
        else:
            self._begin_latency()

    def _begin_latency(self) -> None:
        if self._latency > 0:
            self._loop.at(self._loop.now + self._going * self._latency, self._begin_wire)
        else:
            self._begin_wire()

    def _begin_wire(self) -> None:
        if not self._attention.attends:
            self._going = 1
        self._round_left = self._wire_left - (self._rounds_left - self._going) * self._round_wire
        if self._round_left > _ROUNDING_SECONDS:
            self._lane.enter(self)
        else:
            self._end_rounds()

    def interrupt(self) -> None:
        """Pause this message while another one overtakes it."""
        self._progress(self._lane.withdraw(), attended=self._attention.attends)

    def send(self) -> None:
        """Move the message as far as possible; end the rounds if they are complete."""
        if self._round_left <= _ROUNDING_SECONDS:
            self._round_left = 0.0
            self._lane.leave()
            self._end_rounds()
            return
        seconds = self._round_left
        if not self._attention.attends:
            seconds = min(seconds, self._lane.allowed(self._unattended_seconds, self._buffered_seconds))
        if seconds > _ROUNDING_SECONDS:
            self._lane.grant(seconds)
        else:
            self._block()

    def moved(self, seconds: float) -> bool:
        """Account for a used grant, and return whether the rounds are complete."""
        self._progress(seconds, attended=self._attention.attends)
        return self._round_left <= _ROUNDING_SECONDS

    def _progress(self, seconds: float, *, attended: bool) -> None:
        self._round_left -= seconds
        self._wire_left -= seconds
        if not attended:
            cpu = min(self.cpu_left, self._cpu_share * seconds)
            self.cpu_left -= cpu
            self._attention.owes(cpu)

    def _end_rounds(self) -> None:
        self._rounds_left -= self._going
        if self._rounds_left <= 0:
            self._ended()
        elif self._attention.attends:
            self._begin_rounds()
        else:
            self._block()

    def _block(self) -> None:
        self._blocked = True
        self._attention.blocked(self)


class Attention:
    """Polls of a rank, which let blocked transfers continue.

    Args:
        needs_poll: callback if a transfer needs a poll to continue.

    Attributes:
        attends: whether the rank waits and therefore polls all the time.
        debt_seconds: time of the core that is not yet charged, for bytes that have moved.
    """

    def __init__(self, needs_poll: Callable[[], None]) -> None:
        self._needs_poll = needs_poll
        self.attends = False
        self.debt_seconds = 0.0
        self._lanes: dict[Lane, None] = {}
        self._blocked: list[StageTransfer] = []
        self._restricted: dict[StageTransfer, None] = {}

    @property
    def needed(self) -> bool:
        """Whether a poll affects any transfer in flight."""
        return bool(self._restricted)

    def add(self, transfer: StageTransfer, lane: Lane) -> None:
        """Add a transfer that begins."""
        self._lanes[lane] = None
        if transfer.restricted:
            self._restricted[transfer] = None

    def remove(self, transfer: StageTransfer) -> None:
        """Remove a complete transfer."""
        self._restricted.pop(transfer, None)

    def poll(self, tests: int = 1) -> None:
        """Poll once; `tests` operations in flight are tested."""
        if self._restricted and not self.attends:
            self._mark(tests)
            blocked, self._blocked = self._blocked, []
            for transfer in blocked:
                transfer.poll(tests)

    def begin_wait(self) -> None:
        """Start polling all the time."""
        self.attends = True
        self._blocked.clear()
        for transfer in tuple(self._restricted):
            transfer.attend()

    def end_wait(self, tests: int = 1) -> None:
        """Stop polling; the last poll had `tests` tests."""
        self.attends = False
        self._mark(tests)
        for transfer in tuple(self._restricted):
            transfer.leave()

    def blocked(self, transfer: StageTransfer) -> None:
        """Let the transfer continue at the next poll."""
        self._blocked.append(transfer)
        self._needs_poll()

    def owes(self, seconds: float) -> None:
        """Add time of the core for messages that moved while the rank did not wait; a later poll charges it."""
        self.debt_seconds += seconds

    def pay(self) -> float:
        """Return the time that is not yet charged, and reset it."""
        debt, self.debt_seconds = self.debt_seconds, 0.0
        return debt

    def _mark(self, tests: int) -> None:
        for lane in self._lanes:
            lane.poll(tests)
