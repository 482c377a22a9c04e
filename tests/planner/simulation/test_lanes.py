"""Messages of a lane go one after another; lanes share a resource."""

from __future__ import annotations

import pytest

from hpctrain.planner.simulation.event_loop import EventLoop
from hpctrain.planner.simulation.lanes import Lane
from hpctrain.planner.simulation.shared_resource import SharedResource


class _Message:
    """Moves in pieces, as soon as it is its turn."""

    def __init__(self, loop: EventLoop, lane: Lane, *pieces: float) -> None:
        self.weight = 1.0
        self.ends: list[float] = []
        self._loop, self._lane, self._pieces = loop, lane, list(pieces)

    def send(self) -> None:
        self._lane.grant(self._pieces[0])

    def moved(self, seconds: float) -> None:
        assert seconds == self._pieces.pop(0)
        self.ends.append(self._loop.now)
        if self._pieces:
            self.send()
        else:
            self._lane.leave()


def test_first_come_first_sent() -> None:
    loop = EventLoop()
    lane = Lane(SharedResource(loop, 1.0))
    first, second = _Message(loop, lane, 1.0, 2.0), _Message(loop, lane, 0.5)
    lane.enter(first)
    lane.enter(second)
    assert lane.sends(first)
    assert not lane.sends(second)
    loop.run()
    assert (first.ends, second.ends) == ([1.0, 3.0], [3.5])


def test_lanes_share_what_they_send_through() -> None:
    loop = EventLoop()
    card = SharedResource(loop, 1.0)
    lanes = Lane(card), Lane(card)
    messages = [_Message(loop, lane, 1.0) for lane in lanes]
    for lane, message in zip(lanes, messages, strict=True):
        lane.enter(message)
    loop.run()
    assert [message.ends for message in messages] == [[2.0], [2.0]]


def test_the_transport_takes_so_much_between_looks_of_all_messages_together() -> None:
    loop = EventLoop()
    lane = Lane(SharedResource(loop, 1.0))
    for message in (_Message(loop, lane, 1.0), _Message(loop, lane, 2.0)):
        lane.enter(message)
    allowed: list[float] = []
    loop.at(2.0, lambda: allowed.append(lane.allowed(5.0)))  # the second is under way: it counts once it has moved
    loop.at(2.5, lane.look)
    loop.at(4.0, lambda: allowed.append(lane.allowed(5.0)))
    loop.run()
    assert allowed == pytest.approx([4.0, 4.5])


def test_a_grant_can_be_withdrawn() -> None:
    loop = EventLoop()
    lane = Lane(SharedResource(loop, 1.0))
    message = _Message(loop, lane, 3.0)
    lane.enter(message)
    moved: list[float] = []
    loop.at(1.25, lambda: moved.append(lane.withdraw()))
    loop.at(2.0, lambda: moved.append(lane.withdraw()))  # nothing is granted any more
    loop.run()
    assert moved == [1.25, 0.0]
    assert message.ends == []
    assert lane.allowed(1.0) == pytest.approx(-0.25)
