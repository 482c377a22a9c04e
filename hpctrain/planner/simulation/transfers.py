"""One rank's share of an operation in flight: latencies and bytes of its rounds, as far as its program looks after them.

Messages move while somebody looks. A round begins at a look; between polls an operation moves what the transport takes
unattended, and no more. A rank that waits looks all the time.
"""

from __future__ import annotations

import math
from typing import Protocol

from hpctrain.planner.collective_costs import Stage
from hpctrain.planner.simulation.event_loop import Act, EventLoop
from hpctrain.planner.simulation.lanes import Lane

_ROUNDING_SECONDS = 1e-12
# Of a long message, in buffers on its way when a shorter one passes it: 2 MiB with MPICH over TCP.
_COMMITTED_BYTES = 2 << 20


class Looker(Protocol):
    """The rank that looks at its transfers. attends: all the time, as it waits."""

    attends: bool

    def owes(self, seconds: float) -> None:
        """The core's time for what moved while the rank did not wait."""
        ...

    def blocked(self, transfer: StageTransfer) -> None:
        """The transfer goes on at the next look."""
        ...


class StageTransfer:
    """A stage of an operation on one rank.

    Args:
        lane: where its messages take their turn. weight: how many times they count on the lane's resource: ranks that send
            through a card at the same time. ended: called at its end.

    Attributes:
        begun_seconds: the instant of its begin. restricted: looks matter to it.
        yields: others pass it in its lane, once `committed_seconds` more of it have moved.
        cpu_left: seconds of the core that its messages still take.
    """

    def __init__(self, loop: EventLoop, looker: Looker, stage: Stage, lane: Lane, weight: float, ended: Act) -> None:
        self._loop, self._looker, self._lane, self._ended = loop, looker, lane, ended
        self.weight, self.yields = weight, stage.yields
        self.committed_seconds = _COMMITTED_BYTES * stage.beta_seconds_per_byte
        self._rounds_left = max(1, stage.rounds)
        self._latency = stage.latency_seconds / self._rounds_left
        self._wire_left = stage.wire_bytes * stage.beta_seconds_per_byte
        self._round_wire = self._wire_left / self._rounds_left
        unattended_bytes = stage.unattended_bytes
        self._unattended_seconds = math.inf if unattended_bytes is None else unattended_bytes * stage.beta_seconds_per_byte
        self._going = 1  # rounds that are under way
        self._round_left = 0.0  # of their bytes
        self._polls = stage.polls
        self._polls_left = 0  # before the first byte of the round
        self._blocked = False
        self.cpu_left = stage.cpu_seconds
        self._cpu_share = stage.cpu_seconds / self._wire_left if self._wire_left > 0 else 0.0
        self.begun_seconds = loop.now
        self.restricted = self._rounds_left > 1 or self._polls > 0 or unattended_bytes is not None

    def begin(self) -> None:
        """The first round, or all of them; all ranks of the group have posted the operation."""
        self.begun_seconds = self._loop.now
        self._begin_rounds()

    # -- looks -------------------------------------------------------------------------------------------------------------------

    def look(self, tests: int = 1) -> None:
        """The program looks, by so many tests: what was held up goes on."""
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
        """The rank begins to wait: nothing is held up."""
        self._polls_left = min(1, self._polls_left)  # a wait tests again at once
        if self._blocked:
            self.look()
        elif self._lane.sends(self):
            self._progress(self._lane.withdraw(), attended=False)
            self.send()

    def leave(self) -> None:
        """The rank ends its wait: what is under way goes on as far as it may."""
        if self._round_left <= _ROUNDING_SECONDS:  # in its latency
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
        """The next round; while somebody attends, all that are left."""
        attends = self._looker.attends
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
        if not self._looker.attends:
            self._going = 1
        self._round_left = self._wire_left - (self._rounds_left - self._going) * self._round_wire
        if self._round_left > _ROUNDING_SECONDS:
            self._lane.enter(self)
        else:
            self._end_rounds()

    def interrupt(self) -> None:
        """Another message passes this one, which goes on when that has moved."""
        self._progress(self._lane.withdraw(), attended=self._looker.attends)

    def send(self) -> None:
        """Move what may move now; all of it may have moved at this very instant."""
        if self._round_left <= _ROUNDING_SECONDS:
            self._round_left = 0.0
            self._lane.leave()
            self._end_rounds()
            return
        seconds = self._round_left
        if not self._looker.attends:
            seconds = min(seconds, self._lane.allowed(self._unattended_seconds))
        if seconds > _ROUNDING_SECONDS:
            self._lane.grant(seconds)
        else:
            self._block()

    def moved(self, seconds: float) -> bool:
        """All that was granted has moved; whether the round has. A look in the meantime may allow more."""
        self._progress(seconds, attended=self._looker.attends)
        return self._round_left <= _ROUNDING_SECONDS

    def _progress(self, seconds: float, *, attended: bool) -> None:
        self._round_left -= seconds
        self._wire_left -= seconds
        if not attended:
            cpu = min(self.cpu_left, self._cpu_share * seconds)
            self.cpu_left -= cpu
            self._looker.owes(cpu)

    def _end_rounds(self) -> None:
        self._rounds_left -= self._going
        if self._rounds_left <= 0:
            self._ended()
        elif self._looker.attends:
            self._begin_rounds()
        else:
            self._block()

    def _block(self) -> None:
        self._blocked = True
        self._looker.blocked(self)
