"""Strategies one by one: words of stored schedules, slices, streams, what is particular; and what hides on a modelled link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging.base import GradientAverager, PlannedGroup, Strategy
from hpctrain.averaging.collective_schedule import CollectiveSchedule, OperationKind, Stream
from hpctrain.averaging.link_simulation import SliceTraffic, Times, Urgency
from hpctrain.averaging.slicing import Compression
from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.lazy import Lazy, LazyOptions
from hpctrain.averaging.strategies.overlap import Overlap
from hpctrain.averaging.strategies.priority import Priority
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.averaging.strategies.sparse import Sparse, SparseOptions
from hpctrain.comm.link import LinkModel
from hpctrain.core.errors import HpctrainError, OptionError
from hpctrain.nn.parameter import FlatGroup, GroupLayout, ParameterSpec, Segment
from hpctrain.optim.base import Norms, NormsNeeded, Optimizer
from hpctrain.optim.optimizers import Sgd
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.counters import Counters, CountingCommunicator
from hpctrain_testing.virtual.run import lone_rank, run_virtual, virtual_engine
from tests.support.averaging import averaged, make_group, one_step, planned

PARAMETERS = "parameters e81c09d87a9c6ae0; 2 nodes of 2"
BY_RULE = "slice_parameters None, replan True, window None"


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (Bucketed, {}, "bucketed, bucket_bytes None; parameters "),
        (Bucketed, {"bucket_bytes": 4096}, "bucketed, bucket_bytes 4096; parameters "),
        (Priority, {}, f"priority, {BY_RULE}; parameters "),
        (Priority, {"slice_parameters": 8, "window": 2}, "priority, slice_parameters 8, replan True, window 2; parameters "),
        (Sharded, {}, f"sharded, bucket_bytes None, replan True, window None; {PARAMETERS}"),
        (Sharded, {"bucket_bytes": 700, "replan": False}, f"sharded, bucket_bytes 700, replan False, window None; {PARAMETERS}"),
        (Sharded, {"window": 3}, f"sharded, bucket_bytes None, replan True, window 3; {PARAMETERS}"),
    ],
)
def test_words_are_those_of_schedules_that_earlier_versions_stored(
    kind: type[Strategy], options: dict[str, object], words: str
) -> None:
    nodes = {"nodes": (0, 0, 1, 1)} if kind is Sharded else {}
    assert (planned(kind, make_group(), 4, **nodes, **options).request() or "").startswith(words)


def test_parameters_stand_still_until_backward_has_ended() -> None:
    group = make_group("float32")
    averager = averaged(Blocking, group, Sgd(), *lone_rank())
    before = group.data.copy()
    averager.begin_step(0.1)
    group.grad[...] = 1.0
    for parameter in group.parameters.values():
        averager.grad_ready(parameter)
        np.testing.assert_array_equal(group.data, before)
    averager.end_backward()
    assert (group.data != before).all()


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_a_blocking_step_posts_one_allreduce_and_waits_for_all_of_it(ranks: int) -> None:
    """2 (P-1)/P n bytes per rank in the mean, and nothing of the transfer is hidden."""
    link, size = LinkModel(alpha_seconds=1e-5, beta_seconds_per_byte=1e-8), make_group().size

    def program(comm: ThreadCommunicator) -> tuple[Counters, float]:
        counters, engine = Counters(), virtual_engine(comm)
        averager = averaged(Blocking, make_group(), Sgd(), CountingCommunicator(comm, counters), engine)
        for step in range(3):
            one_step(averager, step)
        return counters, engine.waited_seconds

    results = run_virtual(ranks, program, link=link)
    assert sum(counters.total().exchanged_bytes for counters, _ in results) == 3 * 2 * (ranks - 1) * 8 * size
    for counters, waited_seconds in results:
        assert list(counters) == [("world", "iallreduce")]
        assert counters.total().operations == 3
        assert waited_seconds == pytest.approx(6 * link.reduce_scatter_seconds(8 * size, ranks))


def test_each_parameter_has_a_message_of_its_own() -> None:
    group = make_group()
    strategy = planned(Overlap, group, 3)
    schedule = strategy.plan(None)
    assert schedule is not None
    assert [piece.parameters for piece in schedule.slices] == [(name,) for name, each in group.parameters.items() if each.size]
    assert (strategy.request() or "").startswith("overlap; parameters ")
    assert not strategy.needs_link(None)


@pytest.mark.parametrize("exchange", ["never", "always"])
@pytest.mark.parametrize("layers", [1, 2, 3, 5, 99])
def test_no_slice_holds_lazy_and_eager_parameters(layers: int, exchange: str) -> None:
    """The layers of the group are a, s, empty, unused, b, and the parameter of no layer; more of them are all."""
    group = make_group()
    schedule = planned(Lazy, group, 2, layers=layers, bucket_bytes=1 << 20, fc_exchange=exchange).plan(None)
    assert schedule is not None
    front = list(dict.fromkeys(name.rpartition(".")[0] for name in group.parameters))[:layers]
    covered = 0
    for piece in schedule.slices:
        assert len({name.rpartition(".")[0] in front for name in piece.parameters}) == 1
        assert not (piece.sufficient_factors and piece.parameters[0].rpartition(".")[0] in front)
        covered += piece.size + sum(group.segment(name).size for name in piece.replicated)
    assert covered == group.size


def test_layers_are_counted_over_the_whole_network() -> None:
    """Of which a group of split parameters has some."""
    whole = list(make_group().parameters)
    layout = GroupLayout({name: make_group().specs[name] for name in whole if name.startswith(("b.", "unused."))})
    for layers, lazy in (
        (3, set()),
        (4, {"unused.weight", "unused.bias"}),
        (5, {"unused.weight", "unused.bias", "b.weight", "b.bias"}),
    ):
        options = LazyOptions(layers=layers, bucket_bytes=8)
        strategy = Lazy(PlannedGroup(layout, 2, several_groups=True, names=whole), options)
        assert f"layers {layers} with {len(lazy)} parameters" in strategy.request()


def test_another_number_of_layers_is_another_schedule_and_another_interval_is_not() -> None:
    two, three = (planned(Lazy, make_group(), 2, layers=layers, bucket_bytes=100) for layers in (2, 3))
    rarer = planned(Lazy, make_group(), 2, layers=2, bucket_bytes=100, max_interval=3, check_every=1)
    stored = two.plan(None)
    assert two.accepts(stored)
    assert not three.accepts(stored)
    assert rarer.accepts(stored)


def test_lazy_averaging_does_not_use_an_earlier_versions_schedule() -> None:
    strategy = planned(Lazy, make_group(), 2, layers=2, bucket_bytes=100)
    stored = strategy.plan(None)
    assert stored is not None
    words, _, parameters = stored.request.partition("; ")
    assert words != "lazy, layers 2, bucket_bytes 100"
    assert not strategy.accepts(replace(stored, request=f"lazy, layers 2, bucket_bytes 100; {parameters}"))


@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
def test_small_layers_are_fused_and_large_ones_cut(bucket_bytes: int) -> None:
    group = make_group()
    schedule = planned(Sharded, group, 3, bucket_bytes=bucket_bytes, window=5).plan(None)
    assert schedule is not None
    assert schedule.window == 5
    least = max(1, bucket_bytes // group.item_bytes)
    assert all(piece.size <= 4 * least for piece in schedule.slices if len(piece.parameters) == 1)
    assert sum(piece.size < least for piece in schedule.slices if "[" not in piece.name) <= 1
    for operation in schedule.operations:
        assert (operation.stream is Stream.PARAMETERS) == (operation.kind is OperationKind.ALLGATHER)


NODES = {"4 of 1": (0, 1, 2, 3), "2 of 2": (0, 1, 0, 1), "2 of 3": (0, 0, 0, 1, 1, 1)}


def _layout(*shapes: tuple[int, ...]) -> GroupLayout:
    specs = {
        f"l{i}.weight": ParameterSpec(shape, lambda random, shape: random.standard_normal(shape), decay=len(shape) > 1)
        for i, shape in enumerate(shapes)
    }
    return GroupLayout(specs, "float32")


def _schedule(layout: GroupLayout, nodes: Sequence[int], link: LinkModel | None = None, **options: object) -> CollectiveSchedule:
    schedule = planned(Sparse, layout, len(nodes), nodes=nodes, **options).plan(link)
    assert schedule is not None
    return schedule


def _compressed(schedule: CollectiveSchedule) -> set[str]:
    return {name for piece in schedule.slices if piece.compression for name in piece.parameters}


def test_one_node_and_a_density_that_is_no_number_are_refused_but_not_one_rank() -> None:
    with pytest.raises(OptionError, match="density is nan"):
        SparseOptions(density=float("nan"))
    with pytest.raises(HpctrainError, match=r"all 3 ranks are on one node; choose sharded, or set averager.two_level to false"):
        planned(Sparse, make_group(), 3, nodes=(0, 0, 0))
    planned(Sparse, make_group(), 3, nodes=(0, 0, 0), two_level=False)
    assert _compressed(_schedule(_layout((100, 100)), (0,), compress="always")) == set()


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
@pytest.mark.parametrize("compress", ["auto", "always"])
def test_every_element_is_in_one_slice_and_small_ones_are_dense(nodes: tuple[int, ...], compress: str) -> None:
    layout = _layout((300, 300), (9000,), (40, 40), (7, 500, 500), (20,))
    schedule = _schedule(layout, nodes, compress=compress, bucket_bytes=4096)
    assert schedule.slices[0].start == 0
    assert schedule.slices[-1].stop == layout.size
    assert all(a.stop == b.start for a, b in pairwise(schedule.slices))
    assert _compressed(schedule) == {"l0.weight", "l3.weight"}  # not l1, which has no decay, nor l2, which is small
    compressions = {piece.compression for piece in schedule.slices}
    assert compressions == {None, Compression(len(set(nodes)), 0.01)}


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_a_density_that_does_not_pay_sends_everything_whole(nodes: tuple[int, ...]) -> None:
    """2 b_v / (m (b_v + b_i)) = 1 / m for float32."""
    layout, turn = _layout((3000, 3000)), 1 / len(set(nodes))
    assert _compressed(_schedule(layout, nodes, density=turn * 0.95)) == {"l0.weight"}
    assert _compressed(_schedule(layout, nodes, density=turn * 1.05)) == set()
    assert _compressed(_schedule(layout, nodes, density=1.0, compress="always")) == {"l0.weight"}


@pytest.mark.parametrize("norms", NormsNeeded)
@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_sums_within_nodes_come_before_what_crosses_them(nodes: tuple[int, ...], norms: NormsNeeded) -> None:
    options = {"compress": "always", "least_elements": 4, "bucket_bytes": 100, "norms_needed": norms}
    schedule = _schedule(make_group(), nodes, **options)
    sums: set[OperationKind] = {OperationKind.SPARSE}
    if len(nodes) > len(set(nodes)):
        sums.add(OperationKind.REDUCE_SCATTER)
    assert any(piece.compression for piece in schedule.slices)
    for k, piece in enumerate(schedule.slices):
        of_slice = [operation for operation in schedule.operations if operation.slice == k]
        kinds = {operation.kind for operation in of_slice} - {OperationKind.NORMS}
        expected = sums if piece.compression else {OperationKind.REDUCE_SCATTER}
        assert kinds == expected | {OperationKind.ALLGATHER}
        streams = {operation.stream for operation in of_slice if operation.kind is OperationKind.SPARSE}
        assert streams == ({Stream.NODES} if piece.compression else set())


@pytest.mark.parametrize(
    "options",
    [{"density": 0.02}, {"compress": "always"}, {"least_elements": 10}, {"bucket_bytes": 50}, {"two_level": False}],
    ids=str,
)
def test_a_stored_schedule_is_of_the_same_options(options: dict[str, object]) -> None:
    nodes = NODES["2 of 2"]
    stored = _schedule(make_group(), nodes)
    assert planned(Sparse, make_group(), 4, nodes=nodes, warmup_steps=3, momentum_correction=0.5).accepts(stored)
    assert not planned(Sparse, make_group(), 4, nodes=nodes, **options).accepts(stored)


@pytest.mark.parametrize("slice_parameters", [1, 5, 1000])
def test_slices_are_small_and_gathers_have_a_stream_of_their_own(slice_parameters: int) -> None:
    schedule = planned(Priority, make_group(), 3, slice_parameters=slice_parameters, window=2).plan(None)
    assert schedule is not None
    for operation in schedule.operations:
        gather = operation.kind is OperationKind.ALLGATHER
        assert operation.stream is (Stream.PARAMETERS if gather else Stream.GRADIENTS)
    assert all(piece.size <= slice_parameters for piece in schedule.slices if len(piece.parameters) == 1)


def test_the_window_is_given_or_follows_from_the_link() -> None:
    link = LinkModel(1e-4, 1e-8)
    given, measured = planned(Priority, make_group(), 3, window=2, replan=False), planned(Priority, make_group(), 3, replan=False)
    assert given.plan(link).window == 2  # type: ignore[union-attr]
    assert measured.plan(link).window > 2  # type: ignore[union-attr, operator]
    assert measured.plan(None).window is None  # type: ignore[union-attr]
    assert (given.needs_link(None), measured.needs_link(None)) == (False, True)


STEPS = 9
OPERATOR_SECONDS = 0.05


class FirstComeFirstServed(Priority):
    """A mutant: whatever may be sent first is sent first."""

    @property
    def urgency(self) -> Urgency:
        return lambda order, ready, gather: (ready,)


class GathersNeverOvertake(Priority):
    """A mutant: every gather goes after all reductions."""

    streams = (Stream.GRADIENTS,)

    def order(self, traffic: SliceTraffic, times: Times, link: LinkModel) -> list[tuple[int, bool]]:
        return sorted(super().order(traffic, times, link), key=lambda sent: sent[1])


class OneStream(Priority):
    """A mutant: gathers and reductions share a communicator, in the order of `priority`."""

    streams = (Stream.GRADIENTS,)


class OneStreamAsBefore(OneStream):
    """A mutant: one communicator, in the order that earlier versions planned for it."""

    def order(self, traffic: SliceTraffic, times: Times, link: LinkModel) -> list[tuple[int, bool]]:
        return super(Priority, self).order(traffic, times, link)


def _stepped(
    comm: ThreadCommunicator,
    averager: GradientAverager,
    seconds: Sequence[float],
    steps: int,
    polls: int = 2,
    late_free: bool = False,
) -> list[tuple[float, float]]:
    """By step: how long the first layer waits after the backward pass before it, and when its own backward pass ends.

    Args:
        seconds: of forward, by layer; backward takes twice as long. polls: of an operator.
        late_free: in the last step but one, backward lets go of the last layer's data at its end only.
    """
    layers = list(zip(averager.group.parameters.values(), seconds, strict=True))

    def compute(of_operator: float) -> None:
        for _ in range(polls):
            comm.compute(of_operator / polls)
            averager.progress.poll()

    seen, wait, end = [], 0.0, 0.0
    for step in range(steps):
        averager.begin_step(0.1, (4,) * comm.size)
        for number, (parameter, of_layer) in enumerate(layers):
            averager.before_forward([parameter])
            wait = wait if number else comm.now() - end
            compute(of_layer)
        for parameter, of_layer in reversed(layers):
            compute(of_layer)
            averager.grad_ready(parameter)
            compute(of_layer)
            if not (late_free and step == steps - 2 and parameter is layers[-1][0]):
                averager.data_free(parameter)
        averager.end_backward()
        end = comm.now()
        seen.append((wait, end))
    averager.drain()
    return seen


def _front_wait(kind: type[Priority], sizes: Sequence[int], beta: float, ranks: int, late_free: bool = False) -> float:
    """Seconds from the end of backward until the first layer's parameters are there, in the last step, of layers that are alike.

    Args:
        sizes: elements, by layer; a slice has 1000.
    """
    specs = {f"l{k}.weight": ParameterSpec((size,), lambda random, shape: np.zeros(shape)) for k, size in enumerate(sizes)}

    def program(comm: ThreadCommunicator) -> float:
        engine = virtual_engine(comm)
        averager = averaged(kind, FlatGroup(specs), _Free(), comm, engine, fc_exchange="never", slice_parameters=1000, window=2)
        return _stepped(comm, averager, [OPERATOR_SECONDS] * len(sizes), STEPS + 1, late_free=late_free)[-1][0]

    return max(run_virtual(ranks, program, link=LinkModel(1e-4, beta)))


def _wire_seconds(elements: int, beta: float, ranks: int) -> float:
    """Return the seconds of a reduction, or of a gather, of `elements`."""
    return 4 * elements * beta * (ranks - 1) / ranks


LATE_ELEMENTS = 40_000
BUSY = (1000, 1000, 1000, LATE_ELEMENTS // 2, LATE_ELEMENTS // 2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_front_layers_overtake_what_late_layers_have_left_to_send(ranks: int) -> None:
    """Late layers' gradients are ready first and keep the link busy long after backward.

    The first layer waits for a few slices, not for all that came before it. It does where operations go first come, first served
    (they wait for every reduction and for late gathers), and where no gather passes a reduction.
    """
    beta = 1.25e-5 * ranks / (ranks - 1)
    late = _wire_seconds(LATE_ELEMENTS, beta, ranks)
    assert late > 2 * 2 * len(BUSY) * OPERATOR_SECONDS  # twice as long as backward
    assert _front_wait(Priority, BUSY, beta, ranks) < 0.25 * late
    for mutant in (FirstComeFirstServed, GathersNeverOvertake):
        assert _front_wait(mutant, BUSY, beta, ranks) > 0.7 * late


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_gather_that_cannot_start_holds_up_no_reduction(ranks: int) -> None:
    """The last layer's data is let go late, once. Its gather waits, while all gradients are summed: after backward gathers alone
    are left. On one stream its gather holds up the reductions after it, which then cross the link after backward as well.
    """
    sizes = (2000,) * 6
    beta = 5e-6 * ranks / (ranks - 1)
    gathers = _wire_seconds(sum(sizes), beta, ranks)
    assert _front_wait(Priority, sizes, beta, ranks, late_free=True) < 1.15 * gathers
    for mutant in (OneStream, OneStreamAsBefore):
        assert _front_wait(mutant, sizes, beta, ranks, late_free=True) > 1.5 * gathers


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Blocking, {}),
        (Blocking, {"wire": "bfloat16"}),
        (Overlap, {}),
        (Overlap, {"wire": "bfloat16"}),
        (Bucketed, {}),
        (Bucketed, {"wire": "bfloat16"}),
        (Bucketed, {"wire": "bfloat16", "two_level": False}),
        (Sharded, {"fc_exchange": "never"}),
        (Sharded, {"fc_exchange": "always", "two_level": False, "wire_parameters": "bfloat16"}),
        (Priority, {"fc_exchange": "never", "wire": "bfloat16"}),
        (Lazy, {"fc_exchange": "never"}),
        (Sparse, {"compress": "always", "least_elements": 4}),
    ],
)
def test_costs_of_a_strategy_are_those_of_its_plans(kind: type[Strategy], options: dict[str, object]) -> None:
    strategy = planned(kind, make_group(), 4, nodes=(0, 0, 1, 1), nominal_batch=9, **options)
    costs, schedule = kind.costs(strategy.options), strategy.plan(None)
    assert costs.in_levels == (strategy.levels is not None)
    rounding, planned_rounding = costs.rounding(1 if strategy.levels is None else strategy.levels.per_node), strategy.rounding
    assert (rounding is None) == (planned_rounding is None)
    if planned_rounding is not None:
        assert rounding == replace(planned_rounding, cuts_allreduces=False)
    posted = {OperationKind.ALLREDUCE} if schedule is None else {operation.kind for operation in schedule.operations}
    assert (OperationKind.INPUTS in posted) == (costs.fc_exchange == "always")
    assert (OperationKind.SPARSE in posted) == (costs.density is not None)
    assert set(costs.kinds) == posted - {OperationKind.INPUTS, OperationKind.ERRORS, OperationKind.SPARSE}


# Hidden communication on a modelled link and clock: no real time is measured, so the numbers are exact and repeat. A network of a
# few layers, late ones large and quick, early ones small and slow, as convolutional networks are. One link a rank, full duplex,
# serves in order; messages start and end between operators only, as with one thread.
MODELLED_STEPS = 8
SIZES = (100, 300, 1000, 2000, 4000, 4000, 8000, 8000)  # elements, by layer
FORWARD = (0.2, 0.2, 0.2, 0.15, 0.1, 0.1, 0.03, 0.02)  # seconds; backward takes twice as long
COMPUTE_SECONDS = 3.0


class _Free(Optimizer):
    """An update that takes no time, and does nothing, but needs the given norms."""

    def __init__(self, norms: NormsNeeded = NormsNeeded.NONE) -> None:
        self.layer_norms = norms is NormsNeeded.LAYER  # type: ignore[misc]
        self.clip_norm = 1.0 if norms is NormsNeeded.GLOBAL else None

    def bind(self, group: FlatGroup, owned: Sequence[Segment]) -> None:
        """No state."""

    def update(self, segments: Sequence[Segment], lr: float, norms: Norms | None) -> None:
        """Nothing."""

    def state(self, segment: Segment) -> dict[str, np.ndarray]:
        return {}


def _step_seconds(
    kind: type[Strategy], wire_share: float, ranks: int = 2, norms: NormsNeeded = NormsNeeded.NONE, polls: int = 2, **options: Any
) -> float:
    """Time of a late step, where an allreduce of everything would take `wire_share` of the compute.

    Args:
        polls: of an operator.
    """
    specs = {f"l{k}.weight": ParameterSpec((size,), lambda random, shape: np.zeros(shape)) for k, size in enumerate(SIZES)}
    total_bytes = 4 * sum(SIZES)
    beta = wire_share * COMPUTE_SECONDS / (2 * (ranks - 1) / ranks * total_bytes)

    def program(comm: ThreadCommunicator) -> float:
        engine = virtual_engine(comm)
        averager = averaged(kind, FlatGroup(specs), _Free(norms), comm, engine, **options)
        (_, before), (_, last) = _stepped(comm, averager, FORWARD, MODELLED_STEPS, polls)[-2:]
        return last - before

    return max(run_virtual(ranks, program, link=LinkModel(1e-4, beta)))


def _reached(wire_share: float, seconds: float) -> float:
    """limit / step."""
    return COMPUTE_SECONDS * max(1.0, wire_share) / seconds


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("wire_share", [0.3, 0.6, 1.0, 1.5, 3.0])
def test_the_default_comes_near_the_limit_at_every_bandwidth(wire_share: float, ranks: int) -> None:
    assert _reached(wire_share, _step_seconds(Sharded, wire_share, ranks, fc_exchange="never", bucket_bytes=2000)) >= 0.9


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("wire_share", [0.3, 0.6, 1.0, 1.5, 3.0])
def test_strategies_rank_as_their_costs_say(wire_share: float) -> None:
    blocking = _step_seconds(Blocking, wire_share)
    overlap = _step_seconds(Overlap, wire_share)
    bucketed = _step_seconds(Bucketed, wire_share, bucket_bytes=8000)
    sharded = _step_seconds(Sharded, wire_share, fc_exchange="never", bucket_bytes=2000)
    priority = _step_seconds(Priority, wire_share, fc_exchange="never", slice_parameters=1000, window=12)
    assert blocking == pytest.approx(COMPUTE_SECONDS * (1 + wire_share), rel=0.01)
    for hidden in (overlap, bucketed, sharded, priority):
        assert hidden < blocking
    # front layers' reduce-scatters are all that backward and forward cannot hide
    assert sharded <= 1.05 * overlap
    assert priority <= 1.1 * overlap


def test_gathers_under_backward_pay_where_compute_and_wire_are_equal() -> None:
    planned = _step_seconds(Sharded, 1.0, fc_exchange="never", bucket_bytes=2000)
    bottom_up = _step_seconds(Sharded, 1.0, fc_exchange="never", bucket_bytes=2000, replan=False)
    assert planned < 0.95 * bottom_up


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("wire_share", [0.6, 1.0, 1.5])
@pytest.mark.parametrize(
    ("kind", "size"), [(Sharded, {"bucket_bytes": 2000}), (Priority, {"slice_parameters": 1000, "window": 12})]
)
def test_norms_of_layers_leave_gathers_under_backward(kind: type[Strategy], size: dict[str, int], wire_share: float) -> None:
    """LARS is as fast as SGD, up to the polls that see its messages; clipping is not where compute and wire are equal."""
    without, of_layers, of_all = (
        _step_seconds(kind, wire_share, norms=norms, polls=10, fc_exchange="never", **size) for norms in NormsNeeded
    )
    assert of_layers <= 1.03 * without
    if wire_share == 1.0:
        assert of_layers <= 0.9 * of_all


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size"), [(Overlap, {}), (Bucketed, {"bucket_bytes": 8000})])
def test_norms_cost_no_wait_where_every_rank_updates(kind: type[Strategy], size: dict[str, int]) -> None:
    """Whole sums are everywhere, and front layers', which forward waits for, are the last ones anyway."""
    without, of_layers, of_all = (_step_seconds(kind, 1.0, norms=norms, **size) for norms in NormsNeeded)
    assert of_layers == of_all == without
