"""Lazy averaging: its rule, on any number of ranks, at any resume; and that nothing is sent in between."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.averaging.collective_schedule import OperationKind
from hpctrain.averaging.strategies.lazy import Lazy, LazyAverager, LazyInterval, LazyStep, next_interval
from hpctrain.comm.base import Communicator
from hpctrain.optim.base import Optimizer
from hpctrain.optim.optimizers import Sgd
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.counters import Counters, CountingCommunicator
from hpctrain_testing.virtual.run import lone_rank, run_virtual, virtual_engine
from tests.support.averaging import (
    LR,
    OPTIMIZERS,
    Saved,
    Watched,
    averaged,
    gradient,
    make_group,
    one_step,
    restore,
    run_steps,
    saved,
)

STEPS = 20
Values = dict[str, np.ndarray]


def _lazy(comm: Communicator, optimizer: Optimizer, **options: object) -> LazyAverager:
    averager = averaged(Lazy, make_group(), optimizer, comm, virtual_engine(comm), **options)  # type: ignore[arg-type]
    assert isinstance(averager, LazyAverager)
    return averager


def _run(ranks: int, seed: int | None, optimizer: str, steps: int, **options: object) -> list[tuple[np.ndarray, int]]:
    def program(comm: ThreadCommunicator) -> tuple[np.ndarray, int]:
        lazy = _lazy(comm, OPTIMIZERS[optimizer](), **{"layers": 2, "bucket_bytes": 50, **options})
        data = run_steps(Watched(lazy), steps)
        return data, lazy.interval

    return run_virtual(ranks, program, seed=seed)


# -- the rule, by hand ---------------------------------------------------------------------------------------------------------
def _gradients(p: Values, step: int) -> Values:
    """Those of a whole step of the network of tests.support.averaging."""
    flat = gradient(np.concatenate([values.ravel() for values in p.values()]), step, 0, 1)
    return {each.parameter: flat[each.start : each.stop].reshape(p[each.parameter].shape) for each in make_group().segments}


def _by_hand(front: tuple[str, ...], check_every: int, most: int, momentum: float = 0.9) -> Iterator[tuple[Values, int]]:
    """Parameters after each step, and the interval that led to them: the rule of the paper, in one loop."""
    p = {name: parameter.data.copy() for name, parameter in make_group().parameters.items()}
    speed = {name: np.zeros_like(values) for name, values in p.items()}
    added = {name: np.zeros_like(p[name]) for name in front}
    interval, decided, count, averagings = 1, 1, 0, 0
    for step in range(STEPS):
        gradients, count = _gradients(p, step), count + 1
        latest = {name: gradients[name] for name in front}
        added = {name: added[name] + latest[name] for name in front}
        averages = count >= interval
        if averages:
            interval = decided
            f, g = (np.concatenate([values[name].ravel() for name in front]) for values in (latest, added))
            angle, magnitude = (f - g) @ (f - g) + f @ f <= g @ g, count * (f @ f) <= g @ g
            if averagings % check_every == 0:
                change = 1 if angle and magnitude else -1 if not angle and not magnitude else 0
                decided = min(max(interval + change, 1), most)
            gradients, added = {**gradients, **added}, {name: np.zeros_like(p[name]) for name in front}
            count, averagings = 0, averagings + 1
        for name, values in gradients.items():
            if averages or name not in front:
                speed[name] = momentum * speed[name] + values
                p[name] = p[name] - LR * speed[name]
        yield dict(p), interval


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", [{"check_every": 1, "max_interval": 8}, {"check_every": 2, "max_interval": 2}], ids=str)
@pytest.mark.parametrize(("layers", "front"), [(1, ("a.weight", "a.bias")), (2, ("a.weight", "a.bias", "s.scale"))])
def test_lazy_averaging_follows_the_rule_of_the_paper(layers: int, front: tuple[str, ...], options: dict[str, int]) -> None:
    expected = list(_by_hand(front, options["check_every"], options["max_interval"]))
    assert len({interval for _, interval in expected}) >= min(3, options["max_interval"])

    def program(comm: ThreadCommunicator) -> None:
        lazy = _lazy(comm, Sgd(momentum=0.9), layers=layers, bucket_bytes=50, **options)
        for step, (values, interval) in enumerate(expected):
            one_step(lazy, step)
            lazy.drain()
            assert lazy.interval == interval, f"step {step}"
            for name, parameter in lazy.group.parameters.items():
                np.testing.assert_allclose(parameter.data, values[name], rtol=1e-10, atol=1e-12, err_msg=f"{name} in step {step}")

    for ranks, seed in ((1, None), (2, None), (3, 1)):
        run_virtual(ranks, program, seed=seed)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "check_every"), [("sgd", 3), ("nesterov", 1), ("clipping", 1), ("lars, clipping", 2)])
def test_any_number_of_ranks_is_equally_lazy(optimizer: str, check_every: int) -> None:
    ((alone, interval),) = _run(1, None, optimizer, 20, check_every=check_every)
    assert interval > 1
    for ranks, seed, more in ((2, 0, {}), (3, 1, {"window": 1}), (4, 2, {"nodes": (0, 0, 1, 1)})):
        for data, found in _run(ranks, seed, optimizer, 20, check_every=check_every, **more):
            assert found == interval
            assert np.linalg.norm(data - alone) <= 1e-10 * np.linalg.norm(alone)


# -- what travels --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("check_every", [1, 100])
def test_lazy_layers_stand_still_between_averagings_and_send_nothing(check_every: int) -> None:
    """And a comparison sums their last gradients once more. All of it in integers."""

    def program(comm: ThreadCommunicator) -> list[tuple[bool, bool, int, int]]:
        counters = Counters()
        group, counting, engine = make_group(), CountingCommunicator(comm, counters), virtual_engine(comm)
        options = {"check_every": check_every, "bucket_bytes": 50, "fc_exchange": "never", "replan": False}
        lazy = averaged(Lazy, group, Sgd(), counting, engine, layers=2, **options)
        seen = []
        for step in range(12):
            before, data = counters.snapshot(), group.parameters["a.weight"].data.copy()
            one_step(lazy, step)
            lazy.drain()
            sent = counters.since(before)
            moved = not np.array_equal(group.parameters["a.weight"].data, data)
            exchanged = [sent.total(operation=name).exchanged_bytes for name in ("ireduce_scatter", "iallgather")]
            assert sum(exchanged) == sent.total().exchanged_bytes
            seen.append((moved, lazy._now.compares, *exchanged))
        return seen

    group, ranks = make_group(), 3
    everything, front = group.size * 8, group.segment("s.scale").stop * 8
    by_rank = run_virtual(ranks, program)
    for of_step in zip(*by_rank, strict=True):
        moved, compares = of_step[0][:2]
        assert {seen[:2] for seen in of_step} == {(moved, compares)}
        eager = everything if moved else everything - front
        assert sum(seen[2] for seen in of_step) == (ranks - 1) * (eager + front * compares)
        assert sum(seen[3] for seen in of_step) == (ranks - 1) * (eager + ranks * 3 * 8 * compares)
    moves = [moved for moved, *_ in by_rank[0]]
    assert False in moves
    assert any(compares for _, compares, *_ in by_rank[0]) == (check_every == 1)


def test_linear_layers_exchange_inputs_and_errors_only_where_they_are_not_lazy() -> None:
    def program(comm: ThreadCommunicator) -> tuple[np.ndarray, set[str]]:
        options = {"check_every": 1, "bucket_bytes": 50, "fc_exchange": "always"}
        lazy = _lazy(comm, OPTIMIZERS["clipping"](), layers=1, **options)
        data = run_steps(Watched(lazy), 12)
        kinds = (OperationKind.INPUTS, OperationKind.ERRORS)
        chosen = (operation.slice for operation in lazy.schedule.operations if operation.kind in kinds)
        return data, {lazy.schedule.slices[k].parameters[0] for k in chosen}

    ((alone, _),) = _run(1, None, "clipping", 12, layers=1, check_every=1)
    for data, exchanging in run_virtual(3, program, seed=3):
        assert exchanging == {"b.weight", "unused.weight"}
        assert np.linalg.norm(data - alone) <= 1e-10 * np.linalg.norm(alone)


# -- a resume ------------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 2, 5])
def test_other_ranks_go_on_with_the_sum(after: int) -> None:
    options = {"layers": 2, "bucket_bytes": 50, "check_every": 1}

    def until(comm: ThreadCommunicator) -> tuple[Saved, dict[str, int]]:
        lazy = _lazy(comm, OPTIMIZERS["momentum"](), **options)
        run_steps(lazy, 8)
        return saved(lazy), lazy.counters()

    def onwards(comm: ThreadCommunicator) -> np.ndarray:
        lazy = _lazy(comm, OPTIMIZERS["momentum"](), **options)
        restore(lazy, stored)
        lazy.load_counters(counters)
        return run_steps(lazy, 10, 8)

    stored, counters = run_virtual(3, until, seed=3)[0]
    assert np.any(stored[1]["a.weight"]["lazy_gradient"])
    ((alone, _),) = _run(1, None, "momentum", 18, check_every=1)
    for data in run_virtual(after, onwards, seed=after):
        np.testing.assert_allclose(data, alone, rtol=1e-9, atol=1e-12)


def test_gradients_that_are_held_back_are_reported() -> None:
    """So that what is not finite is noticed before it is applied."""

    def program(comm: ThreadCommunicator) -> None:
        lazy = _lazy(comm, Sgd(), layers=1, check_every=1)
        assert set(lazy.held_gradients()) == {"a.weight", "a.bias"}
        run_steps(lazy, 3)
        assert all(np.any(values) for values in lazy.held_gradients().values())
        state = lazy.full_state(lazy.group.parameters["a.bias"])["lazy_gradient"]
        assert state[comm.rank].tobytes() == np.ascontiguousarray(lazy.held_gradients()["a.bias"]).tobytes()

    run_virtual(2, program)


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


def _alone(**options: int) -> LazyInterval:
    return LazyInterval(*lone_rank(), **options)


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


def test_opposed_gradients_shorten_the_interval() -> None:
    """Down to steps by themselves, of which f is G, so that it tries again."""
    interval = _alone(max_interval=8, check_every=1)
    _steps(interval, 28)
    assert interval.interval >= 7
    _steps(interval, 36, OPPOSED)
    averaged = [step for step, now in enumerate(_steps(interval, 20, OPPOSED)) if now.averages]
    assert set(np.diff(averaged)) == {1, 2, 3}


def test_an_interval_of_one_at_most_averages_always_and_never_compares() -> None:
    assert set(_steps(_alone(max_interval=1, check_every=1), 9)) == {LazyStep(averages=True, compares=False)}


@pytest.mark.parametrize("numbers", [ALIGNED, OPPOSED, (1.0, 3.0, 5.0)])
def test_counters_resume_an_interval_at_any_step(numbers: tuple[float, float, float]) -> None:
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


def test_no_counters_are_those_of_a_new_run() -> None:
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

    # (1e16 + 1) - 1e16 is 0, and both conditions hold; in an order whose result is 1 only one does.
    assert run_virtual(3, program) == [4, 4, 4]


def test_a_group_that_leaves_a_step_out_is_noticed() -> None:
    interval = _alone(members=2, max_interval=8, check_every=1)
    interval.begin_step(0)
    interval.begin_step(0)
    with pytest.raises(AssertionError, match="skipped a step"):
        interval.begin_step(1)
