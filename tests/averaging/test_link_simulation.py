"""Orders from measured times: laws of the simulated link."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.averaging.link_simulation import LinkSimulation, Times, best_order, front_first, reductions_first
from hpctrain.averaging.slices import Slice
from hpctrain.comm.link import LinkModel

LINK = LinkModel(alpha_seconds=1e-4, beta_seconds_per_byte=1e-8)


def _slices(sizes: list[int]) -> list[Slice]:
    starts = np.concatenate([[0], np.cumsum(sizes)])
    return [Slice(f"l{k}", int(starts[k]), int(starts[k + 1]), k, (f"l{k}",)) for k in range(len(sizes))]


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 2), st.floats(0, 1)), min_size=1, max_size=12),
    st.sampled_from([front_first, reductions_first]),
)
def test_every_slice_is_reduced_then_gathered_once(layers: list[tuple[int, float, float]], urgency: object) -> None:
    slices = _slices([size for size, _, _ in layers])
    ready = {f"l{k}": at for k, (_, at, _) in enumerate(layers)}
    free = {f"l{k}": at + more for k, (_, at, more) in enumerate(layers)}
    order = LinkSimulation(slices, Times(ready, free), LINK, 4, 4, 8, urgency).order()  # type: ignore[arg-type]
    assert sorted(order) == sorted((k, gather) for k in range(len(slices)) for gather in (False, True))
    for k in range(len(slices)):
        assert order.index((k, False)) < order.index((k, True))


def test_late_layers_gather_under_backward_where_the_link_would_idle() -> None:
    """The last layer's gradient is ready at once, the first one's only after a second of backward."""
    slices, times = _slices([1000, 1000, 1000]), Times({"l0": 1.0, "l1": 0.5, "l2": 0.0}, {"l0": 1.1, "l1": 0.6, "l2": 0.1})
    order = LinkSimulation(slices, times, LINK, 2, 4, 8, reductions_first).order()
    assert order == [(2, False), (2, True), (1, False), (1, True), (0, False), (0, True)]


def test_gathers_run_into_gradients_where_that_exposes_less() -> None:
    """Gradients of many small layers come one close after the other: their pauses hold no gather of the last, large one."""
    slices = _slices([10] * 20 + [10**7])
    ready = {f"l{k}": 1.0 - 0.04 * k for k in range(20)} | {"l20": 0.0}
    needed = {f"l{k}": 0.01 * k for k in range(21)}
    times = Times(ready, {name: at + 0.001 for name, at in ready.items()}, needed, end_seconds=1.0)
    strict = LinkSimulation(slices, times, LINK, 2, 4, 8, reductions_first)
    assert strict.order().index((20, True)) > 38
    order = best_order(slices, times, LINK, 2, 4, 8, reductions_first)
    assert order.index((20, True)) < 5
    loose = LinkSimulation(slices, times, LINK, 2, 4, 8, reductions_first, overrun_seconds=1.0)
    assert loose.order() == order
    assert loose.stall_seconds() < strict.stall_seconds()


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 2), st.floats(0, 1)), min_size=1, max_size=12))
def test_the_best_order_stalls_no_longer_than_the_strict_one(layers: list[tuple[int, float, float]]) -> None:
    slices = _slices([size for size, _, _ in layers])
    ready = {f"l{k}": at for k, (_, at, _) in enumerate(layers)}
    needed = {f"l{k}": more for k, (_, _, more) in enumerate(layers)}
    times = Times(ready, dict.fromkeys(ready, 2.0), needed, 2.0)
    simulations = [LinkSimulation(slices, times, LINK, 4, 4, 8, reductions_first, each) for each in (0.0, times.longest_gap())]
    orders = [each.order() for each in simulations]
    best = best_order(slices, times, LINK, 4, 4, 8, reductions_first)
    assert sorted(best) == sorted(orders[0])
    for each, order in zip(simulations, orders, strict=True):
        if best == order:
            assert each.stall_seconds() <= simulations[0].stall_seconds()


def test_on_a_busy_link_front_layers_overtake() -> None:
    """All are ready before the link has sent much: by priority an early gather passes late reductions, else it waits."""
    slices = _slices([1000, 10**6, 10**6, 10**6])
    times = Times({"l0": 0.004, "l1": 0.003, "l2": 0.002, "l3": 0.0}, dict.fromkeys(("l0", "l1", "l2", "l3"), 0.004))
    fast = LinkSimulation(slices, times, LINK, 2, 4, 8, front_first).order()
    slow = LinkSimulation(slices, times, LINK, 2, 4, 8, reductions_first).order()
    assert fast.index((0, True)) < fast.index((2, False))
    assert slow[:4] == [(3, False), (2, False), (1, False), (0, False)]
    assert fast.index((0, True)) < slow.index((0, True))


def test_unknown_times_follow_backward() -> None:
    times = Times.unknown(("a", "b", "c"))
    assert sorted(times.ready, key=times.ready.__getitem__) == ["c", "b", "a"]
    assert min(times.free.values()) > max(times.ready.values())


@pytest.mark.parametrize("count", [3000])
def test_thousands_of_slices_take_a_moment(count: int) -> None:
    slices = _slices([50_000] * count)
    times = Times.unknown([f"l{k}" for k in range(count)])
    assert len(LinkSimulation(slices, times, LINK, 2, 4, 8, front_first).order()) == 2 * count
