"""Collectives in flight: what is posted on each rank, and the meetings in which all ranks of a group move on together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hpctrain.planner.collective_costs import Stage
from hpctrain.planner.simulation.event_loop import EventLoop
from hpctrain.planner.simulation.transfers import StageTransfer
from hpctrain.planner.tasks import GroupPlacement


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
