"""Times of steps: medians of what is a step, and of nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis
import hypothesis.strategies as st
import pytest

from hpctrain.comm.message_account import MessageAccount
from hpctrain.comm.progress import ProgressEngine
from hpctrain.train.step_times import MeasuredStep, StepTimes


class _Time:
    """A clock, and an engine whose waits pass with it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.engine = ProgressEngine(rank=0, deadline_seconds=1.0, abort=lambda code: None)
        self.engine.account = MessageAccount(clock_ns=lambda: round(self.now * 1e9))

    def clock(self) -> float:
        return self.now

    def passes(self, seconds: float, waited_seconds: float = 0.0, messages_seconds: float = 0.0) -> None:
        account = self.engine.account
        account.begin()
        self.now += messages_seconds
        account.end()
        self.now += seconds - messages_seconds
        self.engine.waited_seconds += waited_seconds


def _after(steps: Sequence[tuple[float, float]]) -> MeasuredStep | None:
    time = _Time()
    times = StepTimes(time.engine, time.clock)
    times.begin()
    for seconds, waited in steps:
        time.passes(seconds, waited)
        times.end_step()
    return times.measured()


def test_the_first_steps_settle_and_are_not_counted() -> None:
    assert _after([(9.0, 8.0)] * 6) is None
    assert _after([(9.0, 8.0)] * 6 + [(0.5, 0.25)] * 3) == MeasuredStep(0.5, 0.25, 3)


@hypothesis.given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=30))
def test_each_median_is_one_of_the_steps_or_lies_between_two(steps: list[tuple[int, int]]) -> None:
    measured = _after([(1.0, 0.0)] * 6 + [(float(seconds), float(waited)) for seconds, waited in steps])
    assert measured is not None
    assert measured.steps == len(steps)
    for value, place in ((measured.seconds, 0), (measured.exposed_seconds, 1)):
        values = [step[place] for step in steps]
        assert 2 * sum(one <= value for one in values) >= len(values)
        assert 2 * sum(one >= value for one in values) >= len(values)


def test_what_happens_between_stretches_and_in_a_step_with_more_to_do_is_no_step() -> None:
    time = _Time()
    times = StepTimes(time.engine, time.clock)
    for _ in range(3):
        time.passes(50.0, 50.0)  # an evaluation
        times.begin()
        for number in range(6):
            time.passes(2.0, 0.5)
            if number == 4:  # a checkpoint
                times.leave_out()
                time.passes(30.0, 30.0)
            times.end_step()
    assert times.measured() == MeasuredStep(2.0, 0.5, 9)


def test_the_latest_steps_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.train.step_times._MOST_STEPS", 5)
    assert _after([(1.0, 0.0)] * 40 + [(3.0, 2.0)] * 5) == MeasuredStep(3.0, 2.0, 5)


def test_the_time_of_posting_and_progress_is_told_beside_the_waits() -> None:
    time = _Time()
    times = StepTimes(time.engine, time.clock)
    times.begin()
    for number in range(9):
        time.passes(2.0, 0.5, 0.25 if number > 6 else 0.125)
        times.end_step()
    measured = times.measured()
    assert measured is not None
    assert (measured.seconds, measured.exposed_seconds) == (2.0, 0.5)
    assert measured.messages_seconds == pytest.approx(0.25)
