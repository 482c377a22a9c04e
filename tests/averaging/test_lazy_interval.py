"""The rule of the interval, and that all ranks and groups of parameters follow it together."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.averaging.lazy_interval import LazyInterval, LazyStep, next_interval
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import SingleCommunicator
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine

vectors = st.lists(st.floats(-1, 1), min_size=2, max_size=2)


@given(st.integers(1, 9), st.integers(1, 9), vectors, vectors)
def test_the_interval_moves_by_one_and_stays_in_bounds(interval: int, steps: int, f: list[float], g: list[float]) -> None:
    latest, total = np.array(f), np.array(g)
    squares = (float(latest @ latest), float(total @ total), float((latest - total) @ (latest - total)))
    found = next_interval(interval, steps, *squares, most=9)
    assert abs(found - interval) <= 1
    assert 1 <= found <= 9
    angle, magnitude = squares[2] + squares[0] <= squares[1], steps * squares[0] <= squares[1]
    assert (found > interval) == (angle and magnitude and interval < 9)
    assert (found < interval) == (not angle and not magnitude and interval > 1)


def test_aligned_gradients_make_it_lazier_and_opposed_ones_more_eager() -> None:
    assert next_interval(2, 2, 1.0, 4.0, 1.0, most=8) == 3  # G = 2 f
    assert next_interval(2, 2, 1.0, 0.0, 1.0, most=8) == 1  # G = 0: the two steps cancelled
    assert next_interval(2, 4, 1.0, 3.0, 1.0, most=8) == 2  # one condition only


def _alone(**options: int) -> LazyInterval:
    comm = SingleCommunicator()
    return LazyInterval(comm, ProgressEngine(rank=0, deadline_seconds=5, abort=comm.abort), **options)


def _add(numbers: tuple[float, float, float], squares: np.ndarray) -> None:
    squares += numbers


ALIGNED, OPPOSED = (1.0, 100.0, 81.0), (1.0, 0.0, 1.0)


def _steps(interval: LazyInterval, steps: int, numbers: tuple[float, float, float] = ALIGNED) -> list[LazyStep]:
    seen = []
    for _ in range(steps):
        seen.append(interval.begin_step(0))
        if seen[-1].compares:
            interval.compare(partial(_add, numbers), ())
    return seen


def test_an_interval_holds_from_the_averaging_after_the_one_that_found_it() -> None:
    """1 and 1 (f is G, so it grows), then 2, 3 and 4 steps."""
    interval = _alone(max_interval=8, check_every=1)
    seen = _steps(interval, 11)
    assert [step for step, now in enumerate(seen) if now.averages] == [0, 1, 3, 6, 10]
    assert [step for step, now in enumerate(seen) if now.compares] == [3, 6, 10]
    assert interval.interval == 5
    interval.settle()
    assert interval.interval == 5  # the last comparison counts from the next averaging on


def test_opposed_gradients_bring_it_back() -> None:
    """Down to steps by themselves, of which f is G, so that it tries again."""
    interval = _alone(max_interval=8, check_every=1)
    _steps(interval, 28)
    assert interval.interval >= 7
    _steps(interval, 36, OPPOSED)
    averaged = [step for step, now in enumerate(_steps(interval, 20, OPPOSED)) if now.averages]
    assert set(np.diff(averaged)) == {1, 2, 3}


@pytest.mark.parametrize("check_every", [2, 3])
def test_it_is_looked_at_every_so_many_averagings(check_every: int) -> None:
    averagings = [now.compares for now in _steps(_alone(max_interval=8, check_every=check_every), 60) if now.averages]
    compared = [place for place, compares in enumerate(averagings) if compares]
    assert compared
    assert all(place % check_every == 0 for place in compared)
    assert np.all(np.diff(compared) == check_every)


def test_an_interval_of_one_at_most_averages_always_and_never_compares() -> None:
    assert set(_steps(_alone(max_interval=1, check_every=1), 9)) == {LazyStep(averages=True, compares=False)}


@pytest.mark.parametrize("numbers", [ALIGNED, OPPOSED, (1.0, 3.0, 5.0)])
def test_counters_carry_it_on_at_any_step(numbers: tuple[float, float, float]) -> None:
    """Taking them changes nothing, and what takes them goes on alike: a comparison that is not adopted yet included."""
    through = _steps(_alone(max_interval=5, check_every=1), 30, numbers)
    for stop in range(30):
        first, second = (_alone(max_interval=5, check_every=1) for _ in range(2))
        before = _steps(first, stop, numbers)
        first.settle()
        second.load_counters(first.counters())
        assert before + _steps(second, 30 - stop, numbers) == through
        assert before + _steps(first, 30 - stop, numbers) == through


def test_a_smaller_largest_interval_holds_at_once() -> None:
    interval = _alone(max_interval=1, check_every=1)
    interval.load_counters({"interval": 6, "decided": 7, "steps": 2, "averagings": 4})
    assert interval.begin_step(0).averages


def test_nothing_counted_is_a_new_run() -> None:
    interval = _alone(max_interval=4, check_every=1)
    new = interval.counters()
    interval.load_counters({})
    assert interval.counters() == new


@pytest.mark.parametrize("seed", range(4))
def test_all_ranks_decide_alike_by_the_sum_of_what_each_has(seed: int) -> None:
    """Alone, rank 0 would say more, and rank 1 less; the sum of both keeps it. One member of rank 2 has nothing."""
    parts = {0: (0.0, 3.0, 0.0), 1: (2.0, 0.0, 1.0), 2: (0.0, 0.0, 0.0)}
    assert next_interval(3, 2, *parts[0], most=8) == 4
    assert next_interval(3, 2, *parts[1], most=8) == 2

    def program(comm: ThreadCommunicator) -> tuple[int, ...]:
        interval = LazyInterval(comm, virtual_engine(comm), 2, max_interval=8, check_every=1)
        for _ in range(8):
            for member in (0, 1) if comm.rank else (1, 0):
                if interval.begin_step(member).compares:
                    numbers = parts[comm.rank] if member == 0 else (0.0, 0.0, 0.0)
                    interval.compare(partial(_add, numbers), ())
        interval.settle()
        return tuple(interval.counters().values())

    results = run_virtual(3, program, seed=seed)
    assert len(set(results)) == 1
    assert results[0][:2] == (3, 3)


def test_sums_are_those_of_the_ranks_in_order() -> None:
    """1e16 + 1 - 1e16: another order would find another number, and another interval."""
    big = {0: 1e16, 1: 1.0, 2: -1e16}

    def program(comm: ThreadCommunicator) -> int:
        interval = LazyInterval(comm, virtual_engine(comm), max_interval=8, check_every=1)
        for _ in range(4):
            if interval.begin_step(0).compares:
                interval.compare(partial(_add, (big[comm.rank], 0.5, 0.0)), ())
        interval.settle()
        return interval.counters()["decided"]

    # (1e16 + 1) - 1e16 is 0, and both conditions hold; in an order that gives 1 only one does.
    assert run_virtual(3, program) == [4, 4, 4]


def test_a_group_that_leaves_a_step_out_is_noticed() -> None:
    interval = _alone(members=2, max_interval=8, check_every=1)
    interval.begin_step(0)
    interval.begin_step(0)
    with pytest.raises(AssertionError, match="left a step out"):
        interval.begin_step(1)
