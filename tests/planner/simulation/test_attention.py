"""Polls let go on what was held up; waits hold nothing up."""

import pytest

from hpctrain.planner.collective_costs import Stage
from hpctrain.planner.simulation.attention import Attention
from hpctrain.planner.simulation.event_loop import EventLoop
from hpctrain.planner.simulation.lanes import Lane
from hpctrain.planner.simulation.shared_resource import SharedResource
from hpctrain.planner.simulation.transfers import StageTransfer


def _run(*acts: tuple[float, str], rounds: int = 1, unattended: float | None = None) -> tuple[list[float], int]:
    """Ends of a transfer of 4 s under acts of an attention at instants, and how often it was held up."""
    loop, ends, held_up = EventLoop(), list[float](), list[float]()
    attention, lane = Attention(lambda: held_up.append(loop.now)), Lane(SharedResource(loop, 1.0))
    stage = Stage(True, 0.0, 4.0, 1.0, 0.0, rounds, unattended_bytes=unattended)
    transfer = StageTransfer(loop, attention, stage, lane, 1.0, lambda: ends.append(loop.now))
    attention.add(transfer, lane)
    assert attention.needed == (rounds > 1 or unattended is not None)
    transfer.begin()
    for seconds, act in acts:
        loop.at(seconds, getattr(attention, act))
    loop.run()
    attention.remove(transfer)
    assert not attention.needed
    return ends, len(held_up)


def test_without_restrictions_polls_do_not_matter() -> None:
    assert _run() == ([4.0], 0)


def test_a_poll_lets_a_round_begin() -> None:
    assert _run(rounds=2) == ([], 1)
    assert _run((3.0, "look"), rounds=2) == ([5.0], 1)


def test_a_poll_counts_for_what_moves_after_it() -> None:
    assert _run((1.0, "look"), (2.0, "look"), unattended=2.0) == ([4.0], 0)
    assert _run((1.0, "look"), unattended=2.0) == ([], 1)


def test_a_wait_lets_all_move_until_it_ends() -> None:
    assert _run((3.0, "begin_wait"), rounds=4) == ([6.0], 1)
    assert _run((3.0, "begin_wait"), (4.5, "end_wait"), (9.0, "look"), rounds=4) == ([10.0], 2)


def test_further_tests_of_a_poll_let_a_little_more_move() -> None:
    loop, ends = EventLoop(), list[float]()
    attention, lane = Attention(lambda: None), Lane(SharedResource(loop, 1.0))
    stage = Stage(True, 0.0, 4.0, 1.0, 0.0, 1, unattended_bytes=0.5)
    transfer = StageTransfer(loop, attention, stage, lane, 1.0, lambda: ends.append(loop.now))
    attention.add(transfer, lane)
    transfer.begin()  # moves 0.5
    loop.at(2.0, lambda: attention.look(3))  # three operations are tested: 0.5 for the first, and 2 * 0.78 * 0.5 more
    loop.at(10.0, lambda: attention.look(4))  # 1.67 more
    loop.at(20.0, attention.look)  # one: 0.5 more
    loop.at(30.0, attention.look)  # the last 0.05
    loop.run()
    assert ends == [pytest.approx(30.05)]


def test_messages_that_move_while_nobody_waits_are_paid_later() -> None:
    loop = EventLoop()
    attention, lane = Attention(lambda: None), Lane(SharedResource(loop, 1.0))
    stage = Stage(True, 0.0, 4.0, 1.0, 1.0, 1, unattended_bytes=10)
    transfer = StageTransfer(loop, attention, stage, lane, 1.0, lambda: None)
    attention.add(transfer, lane)
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
