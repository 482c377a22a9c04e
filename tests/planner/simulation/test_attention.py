"""Polls let go on what was held up; waits hold nothing up."""

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
