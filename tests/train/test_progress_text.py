"""Words of progress: short numbers, time left, and facts that fit."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.train.progress_text import TimeLeft, duration_text, fitting, loss_text


@given(st.floats(width=32))
def test_a_loss_is_never_long(loss: float) -> None:
    text = loss_text(loss)
    assert len(text) <= 11
    if math.isfinite(loss):
        assert float(text) == pytest.approx(loss, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00:00"), (7, "0:00:07"), (3599.6, "1:00:00"), (90061, "1 d 1:01:01"), (864000, "10 d 0:00:00")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_time_left_follows_from_what_this_run_has_done() -> None:
    times = iter([100.0, 110.0, 130.0, 140.0])
    left = TimeLeft(50, 200, lambda: next(times))
    assert left.seconds(50) is None
    assert left.seconds(100) == pytest.approx(20)  # 50 in 10 seconds, 100 to go
    assert left.seconds(200) == 0.0


FACT = st.tuples(st.integers(0, 9), st.text("abc ", min_size=1, max_size=9))
FACTS = st.lists(FACT, max_size=6, unique_by=lambda fact: fact[0])


@given(FACTS, st.integers(0, 40))
def test_facts_fit_in_their_order_and_the_most_important_stay(facts: list[tuple[int, str]], room: int) -> None:
    line = fitting(facts, room)
    assert len(line) <= room
    by_rank = sorted(facts)
    for kept in range(len(facts), -1, -1):
        whole = "  ".join(text for fact in facts if fact in by_rank[:kept] for text in [fact[1]])
        if len(whole) <= room:
            assert line == whole
            break
