"""Further polls never take more than their share, and waits sleep when they should."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm.poll_policy import MORE_RANKS_THAN_CORES, SLEEPS_AT_ONCE, FurtherPolls, WaitPolicy
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import SingleCommunicator


def _polls(policy: FurtherPolls, operators: list[int], poll: int) -> list[int]:
    """How many polls follow each operator, where all polls take equally long."""
    now, counts = 0, list[int]()
    for operator in operators:
        now += operator
        policy.begin(now)
        counts.append(1)
        now += poll
        while policy.another(now):
            counts[-1] += 1
            now += poll
        policy.end(now)
    return counts


@given(st.lists(st.integers(1, 100_000), min_size=2, max_size=20), st.integers(1, 500), st.sampled_from([0.0, 0.01, 0.1, 1.0]))
def test_polls_take_no_more_than_their_share_beside_the_first(operators: list[int], poll: int, share: float) -> None:
    counts = _polls(FurtherPolls(share), operators, poll)
    for operator, count in zip(operators[1:], counts[1:], strict=True):
        most = max(1, int(share * operator / poll * (1 + 1e-12)))
        assert abs(count - most) <= 1
        assert count == 1 or count * poll <= share * operator * (1 + 1e-9)


def test_long_operators_are_followed_by_many_polls_and_short_ones_by_one() -> None:
    assert _polls(FurtherPolls(0.01), [10_000, 10_000, 1_000, 100_000], 20) == [1, 5, 1, 50]
    assert _polls(FurtherPolls(0.0), [10_000] * 3, 20) == [1, 1, 1]


class _Tests:
    """Complete at the n-th test; each takes 20 us of the clock."""

    def __init__(self, tests: int) -> None:
        self.left, self.now = tests, 0.0

    def clock(self) -> float:
        return self.now

    def test(self) -> bool:
        self.now += 20e-6
        self.left -= 1
        return self.left <= 0


def test_the_engine_looks_again_while_something_is_in_flight_and_time_is_left() -> None:
    handle = _Tests(40)
    engine = ProgressEngine(rank=0, deadline_seconds=1.0, abort=lambda code: None, clock=handle.clock)
    engine.further_polls = FurtherPolls(0.01)
    ticket = engine.queue(SingleCommunicator()).post(lambda: handle, "slow")
    engine.operator_done()
    before = handle.left
    handle.now += 10e-3
    engine.operator_done()
    assert before - handle.left == pytest.approx(5, abs=1)
    handle.now += 1.0
    engine.operator_done()
    assert ticket.done
    assert handle.left == 0  # nothing is in flight any more


def test_without_that_rule_an_operator_is_followed_by_one_poll() -> None:
    handle = _Tests(40)
    engine = ProgressEngine(rank=0, deadline_seconds=1.0, abort=lambda code: None, clock=handle.clock)
    engine.queue(SingleCommunicator()).post(lambda: handle, "slow")
    for _ in range(3):
        before = handle.left
        handle.now += 1.0
        engine.operator_done()
        assert before - handle.left == 1


@given(st.floats(0, 1e4))
def test_ranks_that_outnumber_cores_sleep_for_a_share_of_their_wait(waited_seconds: float) -> None:
    """So a wait is longer by that share at most, and takes next to nothing of the cores where it is long."""
    sleep = MORE_RANKS_THAN_CORES.next_sleep(waited_seconds)
    usual = WaitPolicy().next_sleep(waited_seconds)
    assert usual == WaitPolicy().sleep_seconds
    assert usual <= sleep <= max(usual, min(0.02 * waited_seconds, MORE_RANKS_THAN_CORES.longest_seconds))
    assert MORE_RANKS_THAN_CORES.next_sleep(1e3) == MORE_RANKS_THAN_CORES.longest_seconds


@pytest.mark.parametrize(("policy", "offers"), [(WaitPolicy(), 5), (SLEEPS_AT_ONCE, 0)])
def test_ranks_that_share_a_core_sleep_at_once(policy: WaitPolicy, offers: int) -> None:
    handle, done = _Tests(6), list[str]()
    engine = ProgressEngine(
        rank=0,
        deadline_seconds=1.0,
        abort=lambda code: None,
        clock=handle.clock,
        sleep=lambda seconds: done.append("sleep"),
        offer_core=lambda: done.append("offer"),
    )
    engine.wait_policy = policy
    engine.wait(engine.queue(SingleCommunicator()).post(lambda: handle, "slow"))
    assert done.count("offer") == max(0, offers - 1)
    assert len(done) == 4
