"""One rank's share of an operation in flight: latencies and bytes of its rounds, as far as its program looks after them.

Messages move while somebody looks. A round begins at a look; between polls an operation moves what the transport takes
unattended, and no more. A rank that waits looks all the time.
"""

from __future__ import annotations

import math
from typing import Protocol

from hpctrain.planner.collective_costs import Stage
from hpctrain.planner.simulation.event_loop import Act, EventLoop
from hpctrain.planner.simulation.shared_resource import SharedJob, SharedResource

_ROUNDING_SECONDS = 1e-12


class Looker(Protocol):
    """The rank that looks at its transfers. attends: all the time, as it waits."""

    attends: bool

    def looked_at(self, resource: SharedResource) -> float:
        """The resource's position at this rank's last look."""
        ...

    def blocked(self, transfer: StageTransfer) -> None:
        """The transfer goes on at the next look."""
        ...


class StageTransfer:
    """A stage of an operation on one rank.

    Args:
        weight: how many times it counts on `resource`: ranks that send through a card at the same time.
        ended: called at its end.

    Attributes:
        begun_seconds: the instant of its begin. restricted: looks matter to it.
    """

    def __init__(
        self,
        loop: EventLoop,
        looker: Looker,
        stage: Stage,
        resource: SharedResource,
        weight: float,
        ended: Act,
    ) -> None:
        self._loop, self._looker, self._resource, self._weight, self._ended = loop, looker, resource, weight, ended
        self._rounds_left = max(1, stage.rounds)
        self._latency = stage.latency_seconds / self._rounds_left
        self._wire_left = stage.wire_bytes * stage.beta_seconds_per_byte
        self._round_wire = self._wire_left / self._rounds_left
        unattended_bytes = stage.unattended_bytes
        self._unattended_seconds = math.inf if unattended_bytes is None else unattended_bytes * stage.beta_seconds_per_byte
        self._going = 1  # rounds that are under way
        self._polls = stage.polls
        self._polls_left = 0  # before the first byte of the round
        self._round_left = self._granted = 0.0
        self._job: SharedJob | None = None
        self._blocked = False
        self.begun_seconds = loop.now
        self.restricted = self._rounds_left > 1 or self._polls > 0 or self._unattended_seconds < self._wire_left

    def begin(self) -> None:
        """The first round, or all of them; all ranks of the group have posted the operation."""
        self.begun_seconds = self._loop.now
        self._begin_rounds()

    def look(self) -> None:
        """The program looks: what was held up goes on."""
        if not self._blocked:
            return
        self._blocked = False
        if self._polls_left > 1:
            self._polls_left -= 1
            self._block()
        elif self._polls_left:
            self._polls_left = 0
            self._begin_latency()
        elif self._round_left > _ROUNDING_SECONDS:
            self._grant(self._unattended_seconds)
        else:
            self._begin_rounds()

    def attend(self) -> None:
        """The rank begins to wait: nothing is held up."""
        self._polls_left = min(1, self._polls_left)
        self.look()
        if self._job is not None and self._granted < self._round_left:
            self._resource.move_end(self._job, self._resource.remaining(self._job) + self._round_left - self._granted)
            self._granted = self._round_left

    def leave(self) -> None:
        """The rank ends its wait: what is under way goes on as far as it may."""
        job = self._job
        if job is None:
            return
        self._progress(self._granted - self._resource.remaining(job))
        if self._going > 1:
            self._going = 1
            self._rounds_left = max(1, math.ceil(self._wire_left / self._round_wire - 1e-9))
            self._round_left = self._wire_left - (self._rounds_left - 1) * self._round_wire
        self._granted = min(self._round_left, self._unattended_seconds)
        self._resource.move_end(job, self._granted)

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
        self._grant(self._unattended_seconds)

    def _grant(self, unattended_seconds: float) -> None:
        """Move so much, or all of the round while somebody attends."""
        self._granted = self._round_left if self._looker.attends else min(self._round_left, unattended_seconds)
        if self._granted <= _ROUNDING_SECONDS and self._round_left > _ROUNDING_SECONDS:
            self._block()
        elif self._granted <= _ROUNDING_SECONDS:
            self._end_rounds()
        else:
            self._job = self._resource.start(self._granted, self._weight, self._moved)

    def _moved(self) -> None:
        """All that was granted has moved; a look in the meantime granted more."""
        self._job = None
        self._progress(self._granted)
        if self._round_left <= _ROUNDING_SECONDS:
            self._end_rounds()
            return
        resource = self._resource
        self._grant(self._looker.looked_at(resource) + self._unattended_seconds - resource.position)

    def _progress(self, seconds: float) -> None:
        self._round_left -= seconds
        self._wire_left -= seconds
        self._granted -= seconds

    def _end_rounds(self) -> None:
        self._round_left = 0.0
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
