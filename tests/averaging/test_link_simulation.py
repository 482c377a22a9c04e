"""Orders from measured times: laws of the simulated link."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.averaging.compute_times import Times
from hpctrain.averaging.link_simulation import (
    LinkSimulation,
    Urgency,
    best_order,
    front_first,
    reductions_first,
    two_stream_order,
)
from hpctrain.averaging.rounding import Rounding
from hpctrain.averaging.slice_traffic import SliceTraffic
from hpctrain.averaging.slices import Slice
from hpctrain.comm.link import LinkModel

LINK = LinkModel(alpha_seconds=1e-4, beta_seconds_per_byte=1e-8)


def _slices(sizes: list[int]) -> list[Slice]:
    starts = np.concatenate([[0], np.cumsum(sizes)])
    return [Slice(f"l{k}", int(starts[k]), int(starts[k + 1]), k, (f"l{k}",)) for k in range(len(sizes))]


def _traffic(slices: list[Slice], ranks: int = 2, norms: Sequence[range] = ()) -> SliceTraffic:
    return SliceTraffic(slices, ranks, item_bytes=4, batch=8, norms=norms)


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 2), st.floats(0, 1)), min_size=1, max_size=12),
    st.sampled_from([front_first, reductions_first]),
)
def test_every_slice_is_reduced_then_gathered_once(layers: list[tuple[int, float, float]], urgency: object) -> None:
    slices = _slices([size for size, _, _ in layers])
    ready = {f"l{k}": at for k, (_, at, _) in enumerate(layers)}
    free = {f"l{k}": at + more for k, (_, at, more) in enumerate(layers)}
    order = LinkSimulation(_traffic(slices, 4), Times(ready, free), LINK, urgency).order()  # type: ignore[arg-type]
    assert sorted(order) == sorted((k, gather) for k in range(len(slices)) for gather in (False, True))
    for k in range(len(slices)):
        assert order.index((k, False)) < order.index((k, True))


def test_late_layers_gather_under_backward_where_the_link_would_idle() -> None:
    """The last layer's gradient is ready at once, the first one's only after a second of backward."""
    slices, times = _slices([1000, 1000, 1000]), Times({"l0": 1.0, "l1": 0.5, "l2": 0.0}, {"l0": 1.1, "l1": 0.6, "l2": 0.1})
    order = LinkSimulation(_traffic(slices), times, LINK, reductions_first).order()
    assert order == [(2, False), (2, True), (1, False), (1, True), (0, False), (0, True)]


def test_gathers_run_into_gradients_where_that_exposes_less() -> None:
    """Gradients of many small layers come one close after the other: their pauses hold no gather of the last, large one."""
    slices = _slices([10] * 20 + [10**7])
    ready = {f"l{k}": 1.0 - 0.04 * k for k in range(20)} | {"l20": 0.0}
    needed = {f"l{k}": 0.01 * k for k in range(21)}
    times = Times(ready, {name: at + 0.001 for name, at in ready.items()}, needed, end_seconds=1.0)
    strict = LinkSimulation(_traffic(slices), times, LINK, reductions_first)
    assert strict.order().index((20, True)) > 38
    order = best_order(_traffic(slices), times, LINK, reductions_first)
    assert order.index((20, True)) < 5
    loose = LinkSimulation(_traffic(slices), times, LINK, reductions_first, overrun_seconds=1.0)
    assert loose.order() == order
    assert loose.stall_seconds() < strict.stall_seconds()


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 2), st.floats(0, 1)), min_size=1, max_size=12))
def test_the_best_order_stalls_no_longer_than_the_strict_one(layers: list[tuple[int, float, float]]) -> None:
    slices = _slices([size for size, _, _ in layers])
    ready = {f"l{k}": at for k, (_, at, _) in enumerate(layers)}
    needed = {f"l{k}": more for k, (_, _, more) in enumerate(layers)}
    times = Times(ready, dict.fromkeys(ready, 2.0), needed, 2.0)
    traffic, overruns = _traffic(slices, 4), (0.0, times.longest_gap())
    simulations = [LinkSimulation(traffic, times, LINK, reductions_first, overrun) for overrun in overruns]
    orders = [simulation.order() for simulation in simulations]
    best = best_order(traffic, times, LINK, reductions_first)
    assert sorted(best) == sorted(orders[0])
    for simulation, order in zip(simulations, orders, strict=True):
        if best == order:
            assert simulation.stall_seconds() <= simulations[0].stall_seconds()


def test_on_a_busy_link_front_layers_overtake() -> None:
    """All are ready before the link has sent much: by priority an early gather passes late reductions, else it waits."""
    slices = _slices([1000, 10**6, 10**6, 10**6])
    times = Times({"l0": 0.004, "l1": 0.003, "l2": 0.002, "l3": 0.0}, dict.fromkeys(("l0", "l1", "l2", "l3"), 0.004))
    fast = LinkSimulation(_traffic(slices), times, LINK, front_first).order()
    slow = LinkSimulation(_traffic(slices), times, LINK, reductions_first).order()
    assert fast.index((0, True)) < fast.index((2, False))
    assert slow[:4] == [(3, False), (2, False), (1, False), (0, False)]
    assert fast.index((0, True)) < slow.index((0, True))


@pytest.mark.parametrize("count", [3000])
def test_thousands_of_slices_take_a_moment(count: int) -> None:
    slices = _slices([50_000] * count)
    times = Times.unknown([f"l{k}" for k in range(count)])
    assert len(LinkSimulation(_traffic(slices), times, LINK, front_first).order()) == 2 * count


def test_a_gather_starts_one_look_after_the_one_that_finds_its_sum() -> None:
    """The sum of l1 is complete at 0.2: found at 0.4, on its way from 0.6 on. Behind the last look it looks all the time."""
    slices, link = _slices([10_000, 10_000]), LinkModel(0.0, 1e-5)  # 0.2 s each
    times = Times({"l0": 5.0, "l1": 0.0}, {"l0": 5.0, "l1": 0.1})
    simulation = LinkSimulation(_traffic(slices), times, link, front_first, looks=(0.0, 0.4, 0.6, 5.0))
    assert simulation.order() == [(1, False), (1, True), (0, False), (0, True)]
    assert simulation._gathered == pytest.approx([5.4, 0.8])
    at_once = LinkSimulation(_traffic(slices), times, link, front_first)
    at_once.order()
    assert at_once._gathered == pytest.approx([5.4, 0.4])


def test_late_sums_let_gathers_of_front_layers_go_first() -> None:
    """Without the look a late layer's gather would be planned under backward, where it is not ready in truth."""
    slices = _slices([10_000, 10_000])
    times = Times({"l0": 0.4, "l1": 0.0}, {"l0": 0.4, "l1": 0.1}, {"l0": 0.0, "l1": 0.5}, 0.4)
    link = LinkModel(0.0, 1e-5)
    on_time = best_order(_traffic(slices), times, link, front_first)
    assert on_time == [(1, False), (1, True), (0, False), (0, True)]
    late = best_order(_traffic(slices), times, link, front_first, looks=times.looks())
    assert late == [(1, False), (0, False), (0, True), (1, True)]


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 2), st.floats(0, 1)), min_size=1, max_size=12),
    st.sampled_from([front_first, reductions_first]),
    st.integers(1, 12),
)
def test_on_two_streams_every_gather_stands_behind_all_that_it_needs(
    layers: list[tuple[int, float, float]], urgency: Urgency, together: int
) -> None:
    """Alone, or where slices are gathered together once norms of all of them are known."""
    slices = _slices([size for size, _, _ in layers])
    ready = {f"l{k}": at for k, (_, at, _) in enumerate(layers)}
    free = {f"l{k}": at + more for k, (_, at, more) in enumerate(layers)}
    times = Times(ready, free, dict.fromkeys(ready, 0.1), 3.0)
    groups = [range(begin, min(begin + together, len(slices))) for begin in range(0, len(slices), together)]
    for norms in ((), groups):
        order = two_stream_order(_traffic(slices, 4, norms), times, LINK, urgency)
        assert sorted(order) == sorted((k, gather) for k in range(len(slices)) for gather in (False, True))
        needs = {k: group for group in norms for k in group}
        for k in range(len(slices)):
            assert all(order.index((other, False)) < order.index((k, True)) for other in needs.get(k, (k,)))


def test_a_reduction_overtakes_only_what_a_faster_link_would_not_have_sent() -> None:
    """l0 comes when the measured link has just not sent l1 and l2; a third faster, it has: nothing then waits for l0's gradient.

    With nine tenths of the time gone l0 overtakes what is left.
    """
    slices, link = _slices([10_000] * 9), LinkModel(1e-3, 1e-5)  # 0.2 s each
    names = [f"l{k}" for k in range(9)]

    def reductions(at: float) -> list[int]:
        return [k for k, gather in two_stream_order(_traffic(slices), _at(names, at), link, front_first) if not gather]

    assert reductions(1.3)[-1] == 0
    assert reductions(0.5).index(0) < 5
    assert [k for k, gather in best_order(_traffic(slices), _at(names, 1.3), link, front_first) if not gather][-1] != 0


def _at(names: list[str], front: float) -> Times:
    return Times(dict.fromkeys(names[1:], 0.0) | {"l0": front}, dict.fromkeys(names, front))


def test_rounded_messages_leave_the_link_earlier() -> None:
    """Halved reductions let a gather go under backward that would have held up the next gradient."""
    slices = _slices([1, 1, 1])
    ready = {"l2": 0.0, "l1": 3.0, "l0": 9.0}
    times = Times(ready, {name: at + 0.1 for name, at in ready.items()})
    link = LinkModel(0.0, 1.0)
    halves = Rounding("bfloat16", "bfloat16")
    full, half = (best_order(SliceTraffic(slices, 2, 4, 0, how), times, link, reductions_first) for how in (Rounding(), halves))
    assert full != half
    assert half[:3] == [(2, False), (2, True), (1, False)]
