"""Messages of a lane go one after another; lanes share a resource."""

from __future__ import annotations

import pytest

from hpctrain.planner.simulation.event_loop import EventLoop
from hpctrain.planner.simulation.lanes import Lane
from hpctrain.planner.simulation.shared_resource import SharedResource


class _Message:
    """Moves in pieces, as soon as it is its turn. ends: of pieces, or of what was granted of them."""

    def __init__(self, loop: EventLoop, lane: Lane, *pieces: float, yields: bool = False) -> None:
        self.weight, self.yields, self.committed_seconds = 1.0, yields, 0.5
        self.ends: list[float] = []
        self._loop, self._lane, self._pieces = loop, lane, list(pieces)

    def send(self) -> None:
        if self._pieces:
            self._lane.grant(self._pieces[0])
        else:
            self._lane.leave()

    def interrupt(self) -> None:
        self._progress(self._lane.withdraw())

    def moved(self, seconds: float) -> bool:
        self._progress(seconds)
        self.ends.append(self._loop.now)
        return not self._pieces

    def _progress(self, seconds: float) -> None:
        self._pieces[0] -= seconds
        assert self._pieces[0] >= 0
        if self._pieces[0] == 0:
            del self._pieces[0]


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


def test_shorter_messages_pass_a_long_one_behind_what_is_on_its_way() -> None:
    loop = EventLoop()
    lane = Lane(SharedResource(loop, 1.0))
    long, *short = _Message(loop, lane, 10.0, yields=True), _Message(loop, lane, 1.0), _Message(loop, lane, 2.0)
    lane.enter(long)
    loop.at(2.0, lambda: lane.enter(short[0]))
    loop.at(2.25, lambda: lane.enter(short[1]))
    loop.run()
    assert long.ends == [2.5, 13.0]  # half a second of it is on its way when the first one comes
    assert [message.ends for message in short] == [[3.5], [5.5]]


def test_a_long_message_passes_nothing_and_one_that_has_almost_moved_is_not_passed() -> None:
    loop = EventLoop()
    lane = Lane(SharedResource(loop, 1.0))
    first, second = _Message(loop, lane, 1.0, yields=True), _Message(loop, lane, 1.0, yields=True)
    short = _Message(loop, lane, 1.0)
    for message in (first, second):
        lane.enter(message)
    loop.at(0.75, lambda: lane.enter(short))
    loop.run()
    assert (first.ends, short.ends, second.ends) == ([1.0], [2.0], [3.0])
