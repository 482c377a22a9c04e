"""Sizes and orders from alpha, beta and measured times: laws of the optimum and of the simulated link."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.averaging.planning import (
    Simulation,
    Times,
    best_order,
    bucket_bytes,
    credit_window,
    front_first,
    parts_of,
    reductions_first,
    slice_bytes,
)
from hpctrain.averaging.slices import Slice
from hpctrain.boxes import even
from hpctrain.comm.link import LinkModel

LINK = LinkModel(alpha_seconds=1e-4, beta_seconds_per_byte=1e-8)


def _exposed(size_bytes: float, total: int, ranks: int, link: LinkModel) -> float:
    """Latency of all slices, and the transfer of the last."""
    return (ranks - 1) * (link.alpha_seconds * total / size_bytes + size_bytes / ranks * link.beta_seconds_per_byte)


@given(st.integers(1 << 16, 1 << 30), st.integers(2, 512), st.floats(1e-7, 1e-3), st.floats(1e-11, 1e-7))
def test_no_other_power_of_two_is_much_better(total: int, ranks: int, alpha: float, beta: float) -> None:
    link = LinkModel(alpha, beta)
    best = bucket_bytes(total, ranks, link)
    assert best & (best - 1) == 0
    others = (2.0**k for k in range(14, total.bit_length()))
    assert all(_exposed(best, total, ranks, link) <= 1.1 * _exposed(size, total, ranks, link) for size in others)


def test_without_a_link_to_wait_for_one_bucket_is_best() -> None:
    assert bucket_bytes(10**8, 1, LINK) == 10**8
    assert bucket_bytes(10**8, 4, LinkModel(1e-6, 0.0)) == 10**8


@given(st.integers(2, 512), st.floats(1e-7, 1e-2), st.floats(1e-11, 1e-7), st.sampled_from([1 << 12, 200_000]))
def test_slices_spend_little_of_their_time_on_latency(ranks: int, alpha: float, beta: float, least: int) -> None:
    link = LinkModel(alpha, beta)
    size = slice_bytes(least, ranks, link)
    latency = (ranks - 1) * alpha
    assert size >= least
    assert latency <= 0.21 * link.allgather_seconds(size, ranks) or size == max(least, 1 << 24)
    if size > least:  # half of it would have spent more
        assert latency >= 0.19 * link.allgather_seconds(size // 2, ranks)


def test_without_a_measured_link_slices_are_the_least() -> None:
    assert slice_bytes(1000, 4, None) == slice_bytes(1000, 4, LinkModel(1e-5, 0.0)) == 1000


def test_the_window_holds_what_the_link_sends_between_two_looks() -> None:
    size = 200_000  # 1.1 ms on 2 ranks
    assert credit_window(size, 2, LINK, None) == 56
    times = Times({"a": 0.5, "b": 0.45, "c": 0.1}, {})
    assert credit_window(size, 2, LINK, times) == 956
    assert credit_window(size, 2, LINK, Times({"a": 0.5}, {})) == 4
    assert credit_window(size, 1, LINK, times) is None
    assert credit_window(size, 2, None, times) is None
    assert credit_window(size, 2, LinkModel(0.0, 0.0), times) is None


@given(st.integers(0, 1 << 28), st.sampled_from([4, 8]), st.integers(1, 300))
def test_large_arrays_are_sent_in_parts_that_leave_each_rank_its_share(size: int, item_bytes: int, ranks: int) -> None:
    parts = parts_of(size, item_bytes, ranks)
    assert [begin for begin, _ in parts] == [0, *(end for _, end in parts[:-1])][: len(parts)]
    assert (parts[-1][1] if parts else 0) == size
    limit = max(1 << 24, ranks << 20) + ranks * item_bytes
    assert all((end - begin) * item_bytes <= limit for begin, end in parts)
    if len(parts) > 1:
        assert parts[0][1] * item_bytes > limit // 3
    assert [sum(each) for each in zip(*(even(end - begin, ranks) for begin, end in parts), strict=True)] == [
        share for share in even(size, ranks) if parts
    ]


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
    order = Simulation(slices, Times(ready, free), LINK, 4, 4, 8, urgency).order()  # type: ignore[arg-type]
    assert sorted(order) == sorted((k, gather) for k in range(len(slices)) for gather in (False, True))
    for k in range(len(slices)):
        assert order.index((k, False)) < order.index((k, True))


def test_late_layers_gather_under_backward_where_the_link_would_idle() -> None:
    """The last layer's gradient is ready at once, the first one's only after a second of backward."""
    slices, times = _slices([1000, 1000, 1000]), Times({"l0": 1.0, "l1": 0.5, "l2": 0.0}, {"l0": 1.1, "l1": 0.6, "l2": 0.1})
    order = Simulation(slices, times, LINK, 2, 4, 8, reductions_first).order()
    assert order == [(2, False), (2, True), (1, False), (1, True), (0, False), (0, True)]


def test_gathers_run_into_gradients_where_that_exposes_less() -> None:
    """Gradients of many small layers come one close after the other: their pauses hold no gather of the last, large one."""
    slices = _slices([10] * 20 + [10**7])
    ready = {f"l{k}": 1.0 - 0.04 * k for k in range(20)} | {"l20": 0.0}
    needed = {f"l{k}": 0.01 * k for k in range(21)}
    times = Times(ready, {name: at + 0.001 for name, at in ready.items()}, needed, end_seconds=1.0)
    strict = Simulation(slices, times, LINK, 2, 4, 8, reductions_first)
    assert strict.order().index((20, True)) > 38
    order = best_order(slices, times, LINK, 2, 4, 8, reductions_first)
    assert order.index((20, True)) < 5
    loose = Simulation(slices, times, LINK, 2, 4, 8, reductions_first, overrun_seconds=1.0)
    assert loose.order() == order
    assert loose.stall_seconds() < strict.stall_seconds()


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 2), st.floats(0, 1)), min_size=1, max_size=12))
def test_the_best_order_stalls_no_longer_than_the_strict_one(layers: list[tuple[int, float, float]]) -> None:
    slices = _slices([size for size, _, _ in layers])
    ready = {f"l{k}": at for k, (_, at, _) in enumerate(layers)}
    needed = {f"l{k}": more for k, (_, _, more) in enumerate(layers)}
    times = Times(ready, dict.fromkeys(ready, 2.0), needed, 2.0)
    simulations = [Simulation(slices, times, LINK, 4, 4, 8, reductions_first, each) for each in (0.0, times.longest_gap())]
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
    fast = Simulation(slices, times, LINK, 2, 4, 8, front_first).order()
    slow = Simulation(slices, times, LINK, 2, 4, 8, reductions_first).order()
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
    assert len(Simulation(slices, times, LINK, 2, 4, 8, front_first).order()) == 2 * count
