"""Lazy averaging: the rule by itself, and that any number of ranks follows the same trajectory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.averaging.lazy_averager import LazyAverager, next_interval
from hpctrain.averaging.strategies.lazy import Lazy
from hpctrain.optim.base import Optimizer
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.counters import Counters, CountingCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support.averaging import OPTIMIZERS, Watched, averaged, make_group, one_step, run_steps

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


def _lazy(comm: ThreadCommunicator, optimizer: Optimizer, **options: int) -> LazyAverager:
    averager = averaged(Lazy, make_group(), optimizer, comm, virtual_engine(comm), **options)
    assert isinstance(averager, LazyAverager)
    return averager


def _run(ranks: int, seed: int | None, optimizer: str, steps: int, **options: int) -> list[tuple[np.ndarray, int]]:
    def program(comm: ThreadCommunicator) -> tuple[np.ndarray, int]:
        lazy = _lazy(comm, OPTIMIZERS[optimizer](), layers=2, bucket_bytes=50, **options)
        data = run_steps(Watched(lazy), steps)
        return data, lazy.interval

    return run_virtual(ranks, program, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "clipping", "lars, clipping"])
@pytest.mark.parametrize("check_every", [1, 3])
def test_any_number_of_ranks_is_equally_lazy(optimizer: str, check_every: int) -> None:
    ((alone, interval),) = _run(1, None, optimizer, 20, check_every=check_every)
    assert interval > 1
    for ranks, seed in ((2, 0), (3, 1), (7, 2)):
        for data, found in _run(ranks, seed, optimizer, 20, check_every=check_every):
            assert found == interval
            assert np.linalg.norm(data - alone) <= 1e-10 * np.linalg.norm(alone)


def test_it_differs_from_blocking_where_it_is_lazy() -> None:
    ((lazy, _),) = _run(1, None, "sgd", 20, check_every=1)
    ((eager, interval),) = _run(1, None, "sgd", 20, max_interval=1)
    assert interval == 1
    assert np.linalg.norm(lazy - eager) > 1e-6


def test_lazy_layers_stand_still_between_averagings_and_send_nothing() -> None:
    def program(comm: ThreadCommunicator) -> list[tuple[bool, int]]:
        counters = Counters()
        group = make_group()
        # the interval grows at the first averaging and is not looked at again
        counting, engine = CountingCommunicator(comm, counters), virtual_engine(comm)
        lazy = averaged(Lazy, group, Sgd(), counting, engine, layers=2, check_every=100, bucket_bytes=50)
        seen = []
        for step in range(9):
            lazy.drain()
            before, data = counters.snapshot(), group.parameters["a.weight"].data.copy()
            one_step(lazy, step)
            lazy.drain()
            moved = not np.array_equal(group.parameters["a.weight"].data, data)
            seen.append((moved, counters.since(before).total(operation="iallreduce").payload_bytes))
        return seen

    for seen in run_virtual(3, program):
        all_bytes = make_group().size * 8
        eager_bytes = (make_group().size - make_group().segment("s.scale").stop) * 8
        for moved, payload in seen[4:]:
            assert payload == (all_bytes if moved else eager_bytes)
        assert [moved for moved, _ in seen[4:]] in ([True, False, True, False, True], [False, True, False, True, False])


def test_a_checkpoint_keeps_what_has_been_added_up() -> None:
    def program(comm: ThreadCommunicator) -> tuple[np.ndarray, np.ndarray]:
        lazy = _lazy(comm, Sgd(), layers=1, check_every=1, bucket_bytes=50)
        step = 0
        parameter = lazy.group.parameters["a.weight"]
        while step < 20 and (step < 6 or not np.any(lazy.full_state(parameter)["lazy_gradient"])):
            one_step(lazy, step)
            lazy.drain()
            step += 1
        state = {name: values.copy() for name, values in lazy.full_state(parameter).items()}
        other = _lazy(comm, Sgd(), layers=1, bucket_bytes=50)
        other.load_state(other.group.parameters["a.weight"], state)
        return state["lazy_gradient"], other.full_state(other.group.parameters["a.weight"])["lazy_gradient"]

    for stored, found in run_virtual(3, program):
        assert np.any(stored)
        np.testing.assert_array_equal(found, stored)
