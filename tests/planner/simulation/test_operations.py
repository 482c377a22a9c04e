"""A collective moves once all have come, stage after stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from hpctrain.planner.collective_costs import Stage
from hpctrain.planner.simulation.event_loop import EventLoop
from hpctrain.planner.simulation.lanes import Lane
from hpctrain.planner.simulation.operations import Meetings, MeetingShare, Posted, SimulatedGroup
from hpctrain.planner.simulation.shared_resource import SharedResource
from hpctrain.planner.simulation.transfers import StageTransfer
from tests.support.simulated import placement

_GROUP = SimulatedGroup("all", 2, placement(2), 1.0, "all")


class _Rank:
    """Waits all the time, and so notices at once."""

    attends = True

    def __init__(self, loop: EventLoop) -> None:
        self.loop, self.ends = loop, list[float]()

    def owes(self, seconds: float) -> None:
        """Messages take no time of a core here."""
        assert seconds == 0

    def blocked(self, transfer: StageTransfer) -> None:
        raise AssertionError("a rank that waits holds nothing up")

    def transfer(self, stage: Stage, group: SimulatedGroup, ended: Callable[[], None]) -> StageTransfer:
        return StageTransfer(self.loop, self, stage, Lane(SharedResource(self.loop, 1.0)), group.node_share, ended)

    def stage_ended(self, share: MeetingShare) -> None:
        self.ends.append(self.loop.now)
        if not share.is_last:
            share.next_stage()


def _ends(*ranks: tuple[float, Sequence[Stage]]) -> list[list[float]]:
    """When each rank saw each stage end; ranks post at their instants."""
    loop = EventLoop()
    meetings = Meetings(loop)
    members = [_Rank(loop) for _ in ranks]

    def join(rank: _Rank, stages: Sequence[Stage]) -> None:
        meetings.of("one", len(ranks)).join(rank, Posted("sum", "queue", 0), stages, _GROUP)

    for rank, (seconds, stages) in zip(members, ranks, strict=True):
        loop.at(seconds, partial(join, rank, stages))
    loop.run()
    return [rank.ends for rank in members]


def _stage(seconds: float) -> Stage:
    return Stage(True, 0.0, seconds, 1.0, 0.0, 1)


def test_nothing_moves_before_the_last_has_come() -> None:
    assert _ends((0.0, [_stage(1.0)]), (5.0, [_stage(1.0)])) == [[6.0], [6.0]]


def test_stages_follow_each_other() -> None:
    assert _ends((0.0, [_stage(1.0), _stage(2.0)]), (0.0, [_stage(1.0), _stage(2.0)])) == [[1.0, 3.0]] * 2


def test_the_slowest_share_counts() -> None:
    assert _ends((0.0, [_stage(1.0)]), (0.0, [_stage(3.0)])) == [[3.0]] * 2
    assert _ends((0.0, []), (2.0, [_stage(3.0)])) == [[5.0]] * 2


def test_without_stages_it_is_over_once_all_have_come() -> None:
    assert _ends((0.0, []), (2.0, [])) == [[2.0]] * 2


def test_a_meeting_is_forgotten_once_all_have_come() -> None:
    loop = EventLoop()
    meetings, rank = Meetings(loop), _Rank(loop)
    first = meetings.of("key", 2)
    first.join(rank, Posted("sum", "queue", 0), [], _GROUP)
    assert meetings.of("key", 2) is first
    first.join(rank, Posted("sum", "queue", 0), [], _GROUP)
    assert meetings.of("key", 2) is not first
