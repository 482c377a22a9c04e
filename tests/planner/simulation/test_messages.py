"""Instants, shared resources, lanes and messages, and how far they move while a rank looks or waits."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from hpctrain.planner.costs.collective_costs import CollectiveStage
from hpctrain.planner.simulation.resources import Cores, EventLoop, SharedResource
from hpctrain.planner.simulation.transfers import Attention, Lane, StageTransfer


def test_order_is_of_instants_then_of_asking() -> None:
    loop, seen = EventLoop(), []
    for name, seconds in (("c", 2.0), ("a", 1.0), ("d", 2.0), ("b", 1.0)):
        loop.at(seconds, lambda name=name: seen.append((name, loop.now)))  # type: ignore[misc]
    assert not loop.run()  # nothing is left
    assert seen == [("a", 1.0), ("b", 1.0), ("c", 2.0), ("d", 2.0)]


def test_what_is_asked_for_soon_follows_what_is_due_now() -> None:
    loop, seen = EventLoop(), []
    loop.at(1.0, lambda: loop.soon(lambda: seen.append("soon")))
    loop.at(1.0, lambda: seen.append("due"))
    loop.run()
    assert seen == ["due", "soon"]


def test_the_event_loop_stops_when_asked_to() -> None:
    loop, seen = EventLoop(), []
    loop.at(1.0, loop.stop)
    loop.at(2.0, lambda: seen.append("later"))
    assert loop.run()
    assert seen == []
    assert loop.now == 1.0


def _ends(jobs: list[tuple[float, float, float]], capacity: float = 1.0, saved: float = 0.0) -> list[float]:
    """Ends of jobs of (begin, seconds, weight)."""
    loop = EventLoop()
    resource = SharedResource(loop, capacity, saved)
    ends = [0.0] * len(jobs)

    def begin(number: int) -> None:
        resource.start(jobs[number][1], jobs[number][2], lambda: ends.__setitem__(number, loop.now))

    for number, (seconds, _, _) in enumerate(jobs):
        loop.at(seconds, lambda number=number: begin(number))  # type: ignore[misc]
    loop.run()
    return ends


def test_two_jobs_share_from_where_they_meet() -> None:
    # The first has done 1 of 2 when the second comes; both have half the rate until the first ends.
    assert _ends([(0.0, 2.0, 1.0), (1.0, 2.0, 1.0)]) == pytest.approx([3.0, 4.0])


def test_capacity_is_room_for_as_many() -> None:
    assert _ends([(0.0, 1.0, 1.0)] * 4, capacity=4) == pytest.approx([1.0] * 4)
    assert _ends([(0.0, 1.0, 1.0)] * 4, capacity=2) == pytest.approx([2.0] * 4)


def test_a_weight_counts_as_a_number_of_jobs() -> None:
    assert _ends([(0.0, 1.0, 3.0)]) == pytest.approx([3.0])
    assert _ends([(0.0, 1.0, 3.0), (0.0, 2.0, 1.0)])[1] == pytest.approx(_ends([(0.0, 1.0, 1.0)] * 3 + [(0.0, 2.0, 1.0)])[3])


def test_a_busy_resource_loses_no_time() -> None:
    draw = random.Random(5)
    jobs = [(draw.uniform(0, 3), draw.uniform(0.5, 2), 1.0) for _ in range(40)]
    assert max(_ends(jobs)) == pytest.approx(min(begin for begin, _, _ in jobs) + sum(seconds for _, seconds, _ in jobs))


def test_a_load_slows_and_a_stopped_job_returns_its_rate() -> None:
    loop = EventLoop()
    resource, ends, left = SharedResource(loop, 1.0), list[float](), list[float]()
    resource.start(2.0, 1.0, lambda: ends.append(loop.now))
    other = resource.start(2.0, 1.0, lambda: ends.append(-1.0))
    loop.at(1.0, lambda: left.append(resource.stop(other)))  # both have done 0.5
    loop.at(1.5, lambda: resource.load(1.0))  # half the rate from here on, with 1.0 to go
    loop.run()
    assert left == pytest.approx([1.5])
    assert ends == pytest.approx([3.5])


def test_the_remainder_is_what_is_not_done() -> None:
    loop = EventLoop()
    resource, left = SharedResource(loop, 1.0), []
    job = resource.start(3.0, 1.0, None)
    resource.start(3.0, 1.0, None)
    loop.at(2.0, lambda: left.append(resource.remaining(job)))
    loop.run()
    assert left == pytest.approx([2.0])


def test_saved_time_is_spent_first_and_comes_back_while_idle() -> None:
    # Of 3 s the first 2 are saved, and pass 64 times as fast: 2 = (64 - 1) t are spent in t.
    spent = 2.0 / 63
    first = 3.0 - 63 * spent
    assert _ends([(0.0, 3.0, 1.0)], saved=2.0) == pytest.approx([first])
    assert _ends([(0.0, 1.0, 1.0)], saved=2.0) == pytest.approx([1.0 / 64])
    # Half a second after the end of the first job, half a second is saved again.
    assert _ends([(0.0, 3.0, 1.0), (first + 0.5, 2.0, 1.0)], saved=2.0)[1] == pytest.approx(first + 0.5 + 2.0 - 0.5, rel=0.02)
    # No more than the most is ever saved.
    assert _ends([(0.0, 3.0, 1.0), (100.0, 3.0, 1.0)], saved=2.0)[1] == pytest.approx(100.0 + first)


@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_all_jobs_together_spend_what_is_saved_once(weight: float) -> None:
    jobs = [(0.0, 1.0, weight), (0.0, 1.0, weight), (0.1, 1.0, weight)]
    total = 3.0 * weight
    assert max(_ends(jobs, saved=1.0)) == pytest.approx(max(_ends(jobs)) - 1.0, rel=0.05)
    assert max(_ends(jobs, saved=1.0)) >= total - 1.0 - 0.2


def _work_ends(count: float, ranks: int, *works: tuple[float, float], waiting: float = 0.0, charged: float = 0.0) -> list[float]:
    loop = EventLoop()
    cores, ends = Cores(loop, count, ranks), [0.0] * len(works)
    cores.begin_wait(waiting)
    cores.charge(charged, 1)
    for number, (seconds, weight) in enumerate(works):
        cores.run(seconds, weight, lambda number=number: ends.__setitem__(number, loop.now))  # type: ignore[misc]
    loop.run()
    return ends


def test_ranks_with_cores_of_their_own_disturb_no_other_rank() -> None:
    assert _work_ends(4, 4, (1.0, 4), (2.0, 4), waiting=4, charged=1.0) == [1.0, 2.0]


def test_a_rank_whose_neighbour_waits_has_nearly_all_of_the_core() -> None:
    (end,) = _work_ends(1, 2, (1.0, 1), waiting=1)
    assert 1.0 < end < 1.1


def test_charged_work_is_taken_from_others() -> None:
    assert _work_ends(1, 2, (1.0, 1), charged=0.5) == pytest.approx([1.5])


def _loop_and_lane() -> tuple[EventLoop, Lane]:
    loop = EventLoop()
    return loop, Lane(SharedResource(loop, 1.0))


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
    loop, lane = _loop_and_lane()
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
    loop, lane = _loop_and_lane()
    for message in (_Message(loop, lane, 1.0), _Message(loop, lane, 2.0)):
        lane.enter(message)
    allowed: list[float] = []
    loop.at(2.0, lambda: allowed.append(lane.allowed(5.0, math.inf)))  # the second is under way: it counts once it has moved
    loop.at(2.5, lane.poll)
    loop.at(4.0, lambda: allowed.append(lane.allowed(5.0, math.inf)))
    loop.at(4.0, lambda: allowed.append(lane.allowed(5.0, 2.0)))  # buffers limit all messages together
    loop.run()
    assert allowed == pytest.approx([4.0, 4.5, 1.5])


def test_a_grant_can_be_withdrawn() -> None:
    loop, lane = _loop_and_lane()
    message = _Message(loop, lane, 3.0)
    lane.enter(message)
    moved: list[float] = []
    loop.at(1.25, lambda: moved.append(lane.withdraw()))
    loop.at(2.0, lambda: moved.append(lane.withdraw()))  # nothing is granted any more
    loop.run()
    assert moved == [1.25, 0.0]
    assert message.ends == []
    assert lane.allowed(1.0, math.inf) == pytest.approx(-0.25)


def test_shorter_messages_pass_a_long_one_after_what_is_on_its_way() -> None:
    loop, lane = _loop_and_lane()
    long, *short = _Message(loop, lane, 10.0, yields=True), _Message(loop, lane, 1.0), _Message(loop, lane, 2.0)
    lane.enter(long)
    loop.at(2.0, lambda: lane.enter(short[0]))
    loop.at(2.25, lambda: lane.enter(short[1]))
    loop.run()
    assert long.ends == [2.5, 13.0]  # half a second of it is on its way when the first one comes
    assert [message.ends for message in short] == [[3.5], [5.5]]


def test_a_long_message_passes_nothing_and_one_that_has_almost_moved_is_not_passed() -> None:
    loop, lane = _loop_and_lane()
    first, second = _Message(loop, lane, 1.0, yields=True), _Message(loop, lane, 1.0, yields=True)
    short = _Message(loop, lane, 1.0)
    for message in (first, second):
        lane.enter(message)
    loop.at(0.75, lambda: lane.enter(short))
    loop.run()
    assert (first.ends, short.ends, second.ends) == ([1.0], [2.0], [3.0])


def _transfer(seconds: float, rounds: int = 1, **stage: Any) -> tuple[EventLoop, Attention, StageTransfer, list[float]]:
    """A stage that takes `seconds` of the wire, attended to but not begun, and where its end is noted."""
    loop, ends, attention = EventLoop(), list[float](), Attention(lambda: None)
    lane = Lane(SharedResource(loop, 1.0))
    of_wire = CollectiveStage(True, stage.pop("latency", 0.0), seconds, 1.0, stage.pop("cpu", 0.0), rounds, **stage)
    transfer = StageTransfer(loop, attention, of_wire, lane, 1.0, lambda: ends.append(loop.now))
    attention.add(transfer, lane)
    return loop, attention, transfer, ends


def _end(seconds: float, *, looks: tuple[float, ...] = (), waits_from: float | None = None, **stage: Any) -> float | None:
    """Return the end of a stage that takes `seconds` of the wire, or None if it does not end."""
    loop, attention, transfer, ends = _transfer(seconds, **stage)
    for look in looks:
        loop.at(look, attention.poll)
    if waits_from is not None:
        loop.at(waits_from, attention.begin_wait)
    transfer.begin()
    loop.run()
    return ends[0] if ends else None


@pytest.mark.parametrize(
    ("seconds", "keywords", "end"),
    [
        (2.0, {"latency": 0.5}, 2.5),  # the transport moves the message by itself
        (2.0, {"waits_from": 2.0}, 2.0),  # the wait begins as the last byte arrives
        # Nothing moves beyond the unattended bytes. The look at 1 comes while the message moves.
        (2.0, {"unattended_bytes": 1.5}, None),
        (2.0, {"unattended_bytes": 1.5, "looks": (5.0,)}, 5.5),
        (2.0, {"unattended_bytes": 1.5, "looks": (1.0,)}, 2.0),
        (2.0, {"unattended_bytes": 0.5, "looks": (1.0, 2.0, 3.0)}, 3.5),
        # Each round begins at a look.
        (3.0, {"rounds": 3, "latency": 0.3}, None),
        (3.0, {"rounds": 3, "latency": 0.3, "looks": (2.0, 10.0)}, 11.1),
        # A handshake takes polls.
        (3.0, {"polls": 2, "looks": (1.0,)}, None),
        (3.0, {"polls": 2, "latency": 0.5, "looks": (1.0, 2.0)}, 5.5),
        (4.0, {"rounds": 2, "polls": 1, "looks": (1.0, 4.0, 5.0)}, 7.0),
        (3.0, {"polls": 2, "looks": (1.0,), "waits_from": 7.0}, 10.0),
        (3.0, {"polls": 2, "waits_from": 0.0}, 3.0),
        # During a wait, everything moves.
        (3.0, {"rounds": 3, "latency": 0.3, "waits_from": 0.0}, 3.3),
        (3.0, {"rounds": 3, "latency": 0.3, "waits_from": 5.0}, 7.2),
        (2.0, {"unattended_bytes": 0.5, "waits_from": 4.0}, 5.5),
        (2.0, {"unattended_bytes": 1.0, "waits_from": 0.5}, 2.0),
    ],
)
def test_a_message_moves_by_itself_at_looks_and_during_waits(seconds: float, keywords: dict[str, Any], end: float | None) -> None:
    assert _end(seconds, **keywords) == (None if end is None else pytest.approx(end))


@pytest.mark.parametrize("rounds", [1, 2, 7])
@pytest.mark.parametrize("unattended", [0.1, 1.0, None])
def test_more_looks_never_make_it_later(rounds: int, unattended: float | None) -> None:
    few = _end(2.0, rounds=rounds, unattended_bytes=unattended, looks=tuple(float(k) for k in range(1, 60)))
    many = _end(2.0, rounds=rounds, unattended_bytes=unattended, looks=tuple(k / 4 for k in range(1, 240)))
    waiting = _end(2.0, rounds=rounds, unattended_bytes=unattended, waits_from=0.0)
    assert few is not None
    assert many is not None
    assert waiting is not None
    assert waiting <= many + 1e-9
    assert many <= few + 1e-9


def test_an_ended_wait_leaves_a_round_under_way() -> None:
    loop, attention, transfer, ends = _transfer(4.0, rounds=4)
    attention.begin_wait()
    transfer.begin()
    # In the third of four rounds of a second, which ends at 3; the fourth begins at the next look.
    loop.at(2.5, attention.end_wait)
    loop.at(9.0, attention.poll)
    loop.run()
    assert ends == pytest.approx([10.0])


def test_further_tests_of_a_poll_let_a_little_more_move() -> None:
    loop, attention, transfer, ends = _transfer(4.0, unattended_bytes=0.5)
    transfer.begin()  # moves 0.5
    loop.at(2.0, lambda: attention.poll(3))  # three operations are tested: 0.5 for the first, and 2 * 0.78 * 0.5 more
    loop.at(10.0, lambda: attention.poll(4))  # 1.67 more
    loop.at(20.0, attention.poll)  # one: 0.5 more
    loop.at(30.0, attention.poll)  # the last 0.05
    loop.run()
    assert ends == [pytest.approx(30.05)]


def test_messages_that_move_while_no_rank_waits_are_paid_later() -> None:
    loop, attention, transfer, _ = _transfer(4.0, cpu=1.0, unattended_bytes=10)
    transfer.begin()
    owed: list[float] = []
    loop.at(1.0, attention.begin_wait)
    loop.at(1.0, lambda: owed.append(attention.pay()))
    loop.at(3.0, attention.end_wait)
    loop.at(5.0, lambda: owed.append(attention.pay()))
    loop.run()
    assert owed == [0.25, 0.25]  # of the first and of the last second
    assert transfer.cpu_left == 0.5  # of those that were attended to
    assert attention.pay() == 0
