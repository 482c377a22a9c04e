"""A limit asks for the end as late as it can, and early enough for what is still to come."""

from __future__ import annotations

import math

import pytest

from hpctrain.train.time_limit import TimeLimit


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _run(limit: TimeLimit, clock: _Clock, step: float, checkpoint: float, every: int = 0, steps: int = 100_000) -> float:
    """Train until the limit has asked, one step more, and a checkpoint: when that is written."""
    for number in range(1, steps):
        clock.now += step
        over = limit.over(saves=every > 0 and number % every == 0)
        if every and number % every == 0:
            with limit.saving():
                clock.now += checkpoint
        if over:
            clock.now += step
            with limit.saving():
                clock.now += checkpoint
            return clock.now
    raise AssertionError("never asked")


@pytest.mark.parametrize("step", [0.01, 0.5, 7.0])
@pytest.mark.parametrize("checkpoint", [0.1, 20.0])
@pytest.mark.parametrize("every", [0, 10])
def test_the_checkpoint_is_written_before_the_limit(step: float, checkpoint: float, every: int) -> None:
    clock = _Clock()
    end = _run(TimeLimit(1000.0, clock), clock, step, checkpoint, every)
    assert end <= 1000.0
    # Late enough: no more is left than two steps, the slack of two checkpoints, and what leaving and a first one may take.
    assert end > 1000.0 - 3 * step - 2 * checkpoint - 10 - 60


def test_without_a_limit_nothing_is_asked() -> None:
    limit = TimeLimit(math.inf)
    assert not limit.finite
    assert not limit.over()
    assert not limit.asked


def test_a_limit_that_is_past_asks_at_once() -> None:
    limit = TimeLimit(-5.0, _Clock())
    assert limit.over()
    assert limit.asked


def test_an_evaluation_that_does_not_fit_any_more_is_left_to_the_next_run() -> None:
    clock = _Clock()
    limit = TimeLimit(1000.0, clock)
    with limit.evaluating():
        clock.now += 300
    with limit.saving():
        clock.now += 1
    for _ in range(450):
        clock.now += 1
        assert not limit.over()
    assert limit.over(evaluates=True)


def test_checkpoints_and_evaluations_are_no_part_of_a_step() -> None:
    clock = _Clock()
    limit = TimeLimit(1000.0, clock)
    clock.now += 1
    limit.over()
    with limit.saving():
        clock.now += 100
    with limit.evaluating():
        clock.now += 600
    clock.now += 1
    assert not limit.over()  # 702 s are gone; a step of 701 s would ask for 1402 more


def test_a_slow_first_step_is_forgotten() -> None:
    clock = _Clock()
    limit = TimeLimit(1000.0, clock)
    clock.now += 250  # programs are made
    assert not limit.over()
    for _ in range(400):
        clock.now += 1
        assert not limit.over()
