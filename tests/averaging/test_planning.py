"""Slices cover a group once; their sizes and their order follow from a link and from measured times."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.averaging.link_simulation import (
    LinkSimulation,
    SliceTraffic,
    StepClock,
    Times,
    Urgency,
    best_order,
    front_first,
    over_ranks,
    reductions_first,
    two_stream_order,
)
from hpctrain.averaging.sixteen_bits import Rounding
from hpctrain.averaging.slicing import (
    RULE_LINK,
    Compression,
    Slice,
    bucket_bytes,
    cut,
    fused,
    layer_slices,
    parts_of,
    per_parameter,
    slice_bytes,
    slice_elements,
    sufficient_factor_slices,
)
from hpctrain.averaging.strategies.priority import credit_window
from hpctrain.comm.link import LinkModel
from hpctrain.comm.progress import ProgressEngine
from hpctrain.core.errors import ConfigError
from hpctrain.core.intervals import even
from hpctrain.nn.parameter import FlatGroup, GroupLayout, ParameterSpec
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine

sizes = st.lists(st.integers(0, 40), min_size=1, max_size=12)


def _group(lengths: list[int]) -> FlatGroup:
    specs = {f"l{i}.weight": ParameterSpec((n,), lambda random, shape: np.zeros(shape)) for i, n in enumerate(lengths)}
    return FlatGroup(specs, "float32")


def _check_cover(group: FlatGroup, slices: tuple[Slice, ...]) -> None:
    assert sum(each.size for each in slices) == group.size
    assert all(a.stop == b.start and a.order <= b.order for a, b in pairwise(slices))
    for each in slices:
        assert each.size
        inside = group.covering(each.start, each.stop)
        assert each.parameters == tuple(segment.parameter for segment in inside)
        assert each.order == inside[0].order


@given(sizes)
def test_a_slice_a_parameter(lengths: list[int]) -> None:
    group = _group(lengths)
    slices = per_parameter(group)
    _check_cover(group, slices)
    assert len(slices) == sum(length > 0 for length in lengths)


@given(sizes, st.integers(1, 100))
def test_only_the_front_most_fused_slice_may_be_small(lengths: list[int], least: int) -> None:
    group = _group(lengths)
    slices = fused(group, least)
    _check_cover(group, slices)
    assert all(each.size >= least for each in slices[1:])
    for each in slices:  # without its front-most parameter it would have been too small
        assert each.size - group.segment(each.parameters[0]).size < least


@given(sizes, st.integers(1, 60), st.integers(1, 30))
def test_cutting_keeps_elements_and_order(lengths: list[int], least: int, most: int) -> None:
    group = _group(lengths)
    pieces = cut(group, fused(group, least), most)
    _check_cover(group, pieces)
    assert all(each.size <= most for each in pieces)
    assert len({each.name for each in pieces}) == len(pieces)


@given(sizes, st.integers(1, 30), st.sets(st.integers(0, 11)))
def test_what_is_left_out_is_neither_in_a_slice_nor_spanned(lengths: list[int], least: int, out: set[int]) -> None:
    group = _group(lengths)
    names = {f"l{i}.weight" for i in out if i < len(lengths)}
    slices = fused(group, least, names)
    covered = {i for each in slices for i in range(each.start, each.stop)}
    left = {i for name in names for i in range(group.segment(name).start, group.segment(name).stop)}
    assert covered | left == set(range(group.size))
    assert not covered & left


@given(st.integers(0, 500), st.integers(1, 9), st.integers(1, 17))
def test_parts_lie_in_rank_order_and_hold_whole_units(units: int, unit: int, ranks: int) -> None:
    each = Slice("x", 10, 10 + units * unit, 0, ("x",), unit)
    parts = [each.part(rank, ranks) for rank in range(ranks)]
    assert parts[0][0] == each.start
    assert parts[-1][1] == each.stop
    assert all(a[1] == b[0] for a, b in pairwise(parts))
    assert tuple(end - begin for begin, end in parts) == each.counts(ranks)
    assert all((end - begin) % unit == 0 for begin, end in parts)


def test_a_linear_layer_is_split_by_rows() -> None:
    specs = {name: ParameterSpec(shape, lambda random, shape: np.zeros(shape)) for name, shape in (("w", (5, 3)), ("b", (3,)))}
    (each,) = sufficient_factor_slices(FlatGroup(specs, "float32"), "w", ("b",), 2, 1)
    assert each.counts(2) == (9, 6)
    assert each.counts(7) == (3, 3, 3, 3, 3, 0, 0)
    assert each.replicated == ("b",)


@given(st.integers(1, 900), st.integers(1, 5), st.integers(1, 7), st.integers(1, 3000))
def test_a_linear_layer_in_slices_leaves_each_rank_as_many_rows(inputs: int, outputs: int, ranks: int, most: int) -> None:
    shapes = {"before": (3,), "w": (inputs, outputs), "b": (outputs,)}
    group = FlatGroup({name: ParameterSpec(shape, lambda random, shape: np.zeros(shape)) for name, shape in shapes.items()})
    slices = sufficient_factor_slices(group, "w", ("b",), ranks, most)
    assert slices[0].start == 3
    assert slices[-1].stop == 3 + inputs * outputs
    assert all(a.stop == b.start for a, b in pairwise(slices))
    assert [sum(counts) for counts in zip(*(each.counts(ranks) for each in slices), strict=True)] == [
        outputs * rows for rows in even(inputs, ranks)
    ]
    for each in slices:
        assert each.size % outputs == 0
        assert each.size <= max(most, 33 * ranks * outputs) + ranks * outputs
    assert [each.replicated for each in slices] == [("b",)] + [()] * (len(slices) - 1)
    assert len({each.name for each in slices}) == len(slices)
    assert all(layer_slices(slices, k) == tuple(range(len(slices))) for k in range(len(slices)))


def test_more_slices_than_can_be_planned_are_refused() -> None:
    shapes = {"w": (1_000_000, 1_000_000)}
    layout = GroupLayout({name: ParameterSpec(shape, lambda random, shape: np.zeros(shape)) for name, shape in shapes.items()})
    with pytest.raises(ConfigError, match=r"w would be cut into 1,000,000 slices, but the maximum is 10,000"):
        cut(layout, per_parameter(layout), 1_000_000)
    with pytest.raises(ConfigError, match=r"w would be cut into \d+,\d+ slices"):
        sufficient_factor_slices(layout, "w", (), 1, 1_000_000)
    assert len(cut(layout, per_parameter(layout), 10**8)) == 10_000


@pytest.mark.parametrize("most", [1, 7])
def test_pieces_are_named_by_their_place(most: int) -> None:
    group = _group([4, 6])
    assert [each.name for each in cut(group, per_parameter(group), 4)] == ["l0.weight", "l1.weight[0:3]", "l1.weight[3:6]"]
    assert sum(each.size for each in cut(group, fused(group, 10), most)) == 10


LINK = LinkModel(alpha_seconds=1e-4, beta_seconds_per_byte=1e-8)


def _exposed(size_bytes: float, total: int, ranks: int, link: LinkModel) -> float:
    """Latency of all slices, and the last reduction and first gather of a slice of the largest size."""
    return (ranks - 1) * (link.alpha_seconds * total / size_bytes + 2 * 4 * size_bytes / ranks * link.beta_seconds_per_byte)


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


def _slices_cost(size_bytes: float, total: int, ranks: int, link: LinkModel) -> float:
    """The core's time for all slices, and the transfers of the last."""
    count, others = total / size_bytes, ranks - 1
    return 2 * others * (count * link.operation_seconds + size_bytes / ranks * link.beta_seconds_per_byte)


@given(
    st.integers(1 << 16, 1 << 31),
    st.integers(2, 512),
    st.floats(1e-7, 1e-3),
    st.floats(1e-11, 1e-7),
    st.sampled_from([4096, 200_000]),
)
def test_no_other_size_of_small_slices_is_much_better(total: int, ranks: int, operation: float, beta: float, least: int) -> None:
    link = LinkModel(1e-4, beta, operation)
    best = slice_bytes(least, total, ranks, link)
    assert least <= best <= max(least, 1 << 24)
    others = (least << k for k in range(13) if least << k <= 1 << 24)
    assert all(_slices_cost(best, total, ranks, link) <= 1.1 * _slices_cost(size, total, ranks, link) for size in others)


def test_slices_are_the_least_without_a_link_and_the_largest_on_one_rank() -> None:
    free = LinkModel(1e-5, 1e-9)
    links = (None, LinkModel(1e-5, 0.0), free)
    assert [slice_bytes(1000, 10**9, 4, link) for link in links] == [1000] * 3
    assert slice_bytes(1000, 10**9, 1, RULE_LINK) == 1 << 24


def test_sizes_by_rule_are_those_of_the_documentation() -> None:
    """200,000 bytes are the paper's 50,000 parameters in float32."""
    sizes = {
        total: [slice_bytes(200_000, total, ranks, RULE_LINK) for ranks in (2, 3, 4)]
        for total in (46_800_000, 102_200_000, 553_400_000)
    }
    assert sizes == {
        46_800_000: [800_000, 800_000, 800_000],
        102_200_000: [800_000, 1_600_000, 1_600_000],
        553_400_000: [3_200_000, 3_200_000, 3_200_000],
    }


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


@given(st.sampled_from(["float32", "float64"]), st.integers(1, 1 << 26), st.integers(2, 64))
def test_slices_have_the_bytes_that_are_set_or_that_the_link_asks_for(dtype: str, size: int, ranks: int) -> None:
    layout = GroupLayout({"weight": ParameterSpec((size,), lambda chance, shape: chance.standard_normal(shape))}, dtype)
    asked = bucket_bytes(size * layout.item_bytes, ranks, LINK)
    assert slice_elements(None, layout, ranks, LINK) == slice_elements(asked, layout, ranks, None)
    least, most = slice_elements(asked, layout, ranks, None)
    assert (least * layout.item_bytes, most >= least) == (asked, True)
    assert slice_elements(1, layout, ranks, LINK) == (1, 1)


SLOW_LINK = LinkModel(3.0, 0.5)


def test_a_dense_slice_crosses_all_ranks() -> None:
    piece = Slice("x", 0, 12, 0, ("x",))
    traffic = SliceTraffic([piece], ranks=4, item_bytes=8, batch=0)
    assert (
        traffic.reduce_seconds(piece, SLOW_LINK) == traffic.gather_seconds(piece, SLOW_LINK) == SLOW_LINK.allgather_seconds(96, 4)
    )


def test_a_rounded_slice_takes_as_long_as_its_bytes() -> None:
    """Factors travel in full precision: they bring errors, and their rows are gathered."""
    piece, factors = (Slice("x", 0, 12, 0, ("x",), unit=3, sufficient_factors=exchanged) for exchanged in (False, True))
    gradients, both = (
        SliceTraffic([piece, factors], 4, 8, 10, Rounding("bfloat16", parameters)) for parameters in ("float32", "bfloat16")
    )
    assert (
        gradients.reduce_seconds(piece, SLOW_LINK) == both.gather_seconds(piece, SLOW_LINK) == SLOW_LINK.allgather_seconds(24, 4)
    )
    assert gradients.reduce_seconds(factors, SLOW_LINK) == SLOW_LINK.allgather_seconds(10 * 3 * 8, 4)
    for one in (piece, factors):
        assert gradients.gather_seconds(one, SLOW_LINK) == SLOW_LINK.allgather_seconds(96, 4)


@pytest.mark.parametrize(("nodes", "per_node"), [(4, 1), (2, 2), (2, 3)])
def test_of_a_compressed_slice_only_messages_cross_nodes(nodes: int, per_node: int) -> None:
    piece = Slice("x", 0, 1200, 0, ("x",), compression=Compression(nodes, 0.1))
    traffic, kept = SliceTraffic([piece], nodes * per_node, 4, 0), 120 // per_node
    within = (per_node - 1) * (3.0 + 0.5 * 4 * 1200 / per_node)
    across = (nodes - 1) * (3.0 + 0.5 * 8 * kept)
    assert traffic.reduce_seconds(piece, SLOW_LINK) == pytest.approx(within + across)
    assert traffic.gather_seconds(piece, SLOW_LINK) == pytest.approx(within)


#: by layer: its elements, and two times
LAYERS = st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 2), st.floats(0, 1)), min_size=1, max_size=12)


def _slices(sizes: list[int]) -> list[Slice]:
    starts = np.concatenate([[0], np.cumsum(sizes)])
    return [Slice(f"l{k}", int(starts[k]), int(starts[k + 1]), k, (f"l{k}",)) for k in range(len(sizes))]


def _traffic(slices: list[Slice], ranks: int = 2, norms: Sequence[range] = ()) -> SliceTraffic:
    return SliceTraffic(slices, ranks, item_bytes=4, batch=8, norms=norms)


@given(LAYERS, st.sampled_from([front_first, reductions_first]))
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


@given(LAYERS)
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


def test_a_gather_starts_one_look_after_the_one_that_finds_its_sum() -> None:
    """The sum of l1 is complete at 0.2: found at 0.4, on its way from 0.6 on. After the last look it looks all the time."""
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


@given(LAYERS, st.sampled_from([front_first, reductions_first]), st.integers(1, 12))
def test_on_two_streams_every_gather_stands_after_all_that_it_needs(
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


TIMES = Times({"b": 4.0, "a": 6.0, "c": 6.5}, {"b": 4.5, "a": 8.0, "c": 8.0}, {"a": 0.0, "b": 2.0}, 8.0)


def test_unknown_times_follow_backward() -> None:
    times = Times.unknown(("a", "b", "c"))
    assert sorted(times.ready, key=times.ready.__getitem__) == ["c", "b", "a"]
    assert min(times.free.values()) > max(times.ready.values())


def test_late_times_are_shifted_by_the_longest_gap() -> None:
    assert TIMES.longest_gap() == 2.0
    assert TIMES.late() == Times({"b": 6.0, "a": 8.0, "c": 8.5}, {"b": 6.5, "a": 10.0, "c": 10.0}, TIMES.needed, 8.0)


def test_the_program_looks_where_work_for_a_parameter_ends() -> None:
    assert TIMES.looks() == [4.0, 4.5, 6.0, 6.5, 8.0, 10.0]


class Hand:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def _step(clock: StepClock, hand: Hand, engine: ProgressEngine, seconds: float, waited: float) -> None:
    """Forward reads both; backward computes b, then a, and waits in between. The last event of c is never announced."""
    clock.begin(True)
    for name in ("a", "b"):
        clock.needed(name)
        hand.seconds += seconds
    clock.ready("b")
    clock.free("b")
    hand.seconds += waited
    engine.waited_seconds += waited
    hand.seconds += seconds
    clock.ready("a")
    clock.free("a")
    hand.seconds += seconds
    clock.end(("a", "b", "c"))


def test_medians_without_waits() -> None:
    hand = Hand()
    engine = ProgressEngine(rank=0, deadline_seconds=5, abort=lambda code: None, clock=hand)
    clock = StepClock(engine)
    clock.begin(False)
    hand.seconds += 100
    clock.ready("a")  # not measured
    for seconds, waited in ((1.0, 7.0), (2.0, 0.0), (3.0, 50.0)):
        _step(clock, hand, engine, seconds, waited)
    times = clock.times()
    assert times.needed == {"a": 0.0, "b": 2.0}
    assert times.ready == {"b": 4.0, "a": 6.0, "c": 8.0}
    assert times.free == times.ready
    assert times.end_seconds == 8.0


NAMES = ("a", "b", "c")


def _measured(rank: int) -> Times:
    """Made-up times of a rank; no rank knows when c is read, and only some when b is."""
    random = np.random.default_rng(rank)
    ready, free, needed = (dict(zip(NAMES, random.random(3).tolist(), strict=True)) for _ in range(3))
    del needed["c"]
    if rank % 2:
        del needed["b"]
    return Times(ready, free, needed, random.random())


def _upper_median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 12])  # more ranks than events, too
@pytest.mark.parametrize("seed", [None, 3])
def test_a_typical_rank_has_the_upper_median_of_each_event(ranks: int, seed: int | None) -> None:
    def program(comm: ThreadCommunicator) -> Times:
        return over_ranks(_measured(comm.rank), NAMES, comm, virtual_engine(comm))

    results = run_virtual(ranks, program, seed=seed)
    everyone = [_measured(rank) for rank in range(ranks)]
    assert all(result == results[0] for result in results)
    for kind in ("ready", "free", "needed"):
        by_rank = [getattr(times, kind) for times in everyone]
        known = {name: [times[name] for times in by_rank if name in times] for name in NAMES}
        assert getattr(results[0], kind) == {name: _upper_median(values) for name, values in known.items() if values}
    assert results[0].end_seconds == _upper_median([times.end_seconds for times in everyone])
