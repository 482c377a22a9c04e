"""Waits for data: each instant of a step counts once, and what lies between steps counts in none of them."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from hpctrain.train.data_waits import DataWait, DataWaits


class _Time:
    def __init__(self) -> None:
        self.now = 100.0
        self.closed = False

    def clock(self) -> float:
        return self.now

    def batches(self, waits: list[int]) -> Generator[Any, None, None]:
        try:
            for number, seconds in enumerate(waits):
                self.now += seconds
                yield number
        finally:
            self.closed = True


@hypothesis.given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12), st.integers(0, 12))
def test_waits_and_steps_add_up_also_where_an_epoch_ends_early(steps: list[tuple[int, int]], end: int) -> None:
    time = _Time()
    waits = DataWaits(time.clock)
    batches = waits.watched(time.batches([wait for wait, _ in steps]))
    done = steps[: end + 1]
    for number in batches:
        time.now += steps[number][1]
        if number == end:
            break
    batches.close()
    time.now += 1000.0  # an evaluation
    assert waits.take() == DataWait(len(done), sum(wait + work for wait, work in done), sum(wait for wait, _ in done))
    assert waits.take() == DataWait()


def test_sums_go_on_over_epochs_until_they_are_taken() -> None:
    time = _Time()
    waits = DataWaits(time.clock)
    for _ in range(3):
        for _ in waits.watched(time.batches([2, 1])):
            time.now += 4.0
    assert waits.take() == DataWait(6, 33.0, 9.0)


def test_an_error_in_a_step_closes_the_batches() -> None:
    time = _Time()
    batches = DataWaits(time.clock).watched(time.batches([1, 1]))
    next(batches)
    with pytest.raises(ValueError, match="wrong"):
        batches.throw(ValueError("wrong"))
    assert time.closed
