"""Schedules are data: laws that hold for every strategy, what operations start after, and how ranks agree on one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.averaging import slicing
from hpctrain.averaging.allreduce import AllreduceStrategy
from hpctrain.averaging.averagers import AveragerChoice, check_same_schedule
from hpctrain.averaging.base import PlannedGroup, Strategy
from hpctrain.averaging.collective_schedule import (
    ALL_SLICES,
    CollectiveSchedule,
    EventKind,
    LocalEventKey,
    Operation,
    OperationKind,
    Stream,
    covered_slices,
    dependencies,
    norm_groups,
    slices_of_groups,
)
from hpctrain.averaging.link_simulation import Times
from hpctrain.averaging.reduce_scatter_strategy import ReduceScatterStrategy
from hpctrain.averaging.slicing import Compression, Slice, cut, fused, layer_slices
from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.overlap import Overlap
from hpctrain.averaging.strategies.priority import Priority
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.comm.base import Communicator
from hpctrain.comm.link import LinkModel
from hpctrain.core.errors import CheckpointError, CollectiveMismatchError
from hpctrain.core.intervals import even
from hpctrain.models.families import vgg
from hpctrain.nn.network import Lowering, declared
from hpctrain.nn.parameter import GroupLayout, ParameterSpec
from hpctrain.optim.base import NormsNeeded
from hpctrain.optim.optimizers import Sgd
from hpctrain_testing.virtual.run import lone_rank, run_virtual, virtual_engine
from tests.support.averaging import STRATEGIES, averaged, exchanged, make, make_group, planned


def _schedule(strategy: str, ranks: int = 3, optimizer: str = "clipping") -> CollectiveSchedule:
    def program(comm: Communicator) -> CollectiveSchedule:
        schedule = make(strategy, optimizer, comm, virtual_engine(comm)).schedule  # type: ignore[arg-type]
        assert schedule is not None
        return schedule

    schedules = run_virtual(ranks, program)
    assert len({each.digest() for each in schedules}) == 1
    return schedules[0]


@pytest.mark.parametrize("optimizer", ["clipping", "lars"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_json_restores_the_same_schedule_and_the_table_names_every_operation(strategy: str, optimizer: str) -> None:
    schedule = _schedule(strategy, optimizer=optimizer)
    text, lines = schedule.to_json(), schedule.table().splitlines()
    again = CollectiveSchedule.from_json(text)
    assert again == schedule
    assert again.digest() == schedule.digest()
    assert ('"compression"' in text) == strategy.startswith("sparse")
    for operation, line in zip(schedule.operations, lines[2:], strict=True):
        assert operation.kind.value in line
        assert operation.slice < 0 or schedule.slices[operation.slice].name in line


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"slices": [{}], "operations": []}'])
def test_text_that_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="A schedule in the checkpoint cannot be read"):
        CollectiveSchedule.from_json(text)


COMPRESSED = tuple(
    Operation(kind, 0, stream)
    for kind, stream in (
        (OperationKind.REDUCE_SCATTER, Stream.GRADIENTS),
        (OperationKind.SPARSE, Stream.NODES),
        (OperationKind.ALLGATHER, Stream.PARAMETERS),
    )
)


def _compressed(size: int, nodes: int, per_node: int, density: float) -> CollectiveSchedule:
    slices = (Slice("x", 0, size, 0, ("x",), compression=Compression(nodes, density)),)
    return CollectiveSchedule("x", nodes * per_node, slices, COMPRESSED)


@pytest.mark.parametrize("density", [0.01, 0.3, 1.0])
@pytest.mark.parametrize(("nodes", "per_node"), [(2, 1), (2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("size", [1, 5, 10, 1000])
def test_a_compressed_slice_exchanges_its_largest_elements_with_their_positions(
    size: int, nodes: int, per_node: int, density: float
) -> None:
    """Over all ranks: (n - 1) of the slice twice within each node, and k pairs of each part to m - 1 other nodes."""
    schedule = _compressed(size, nodes, per_node, density)
    ranks, samples = nodes * per_node, (1,) * nodes * per_node
    counts = even(size, per_node)
    pairs = [(nodes - 1) * min(count, max(1, round(density * count))) for count in counts]
    for rank in range(ranks):
        number = rank // nodes
        assert schedule.slices[0].owned_size(rank, ranks) == counts[number]
        by_kind = exchanged(schedule, rank, samples)
        within = size - counts[number]
        assert (by_kind[OperationKind.REDUCE_SCATTER], by_kind[OperationKind.ALLGATHER]) == (within, within)
        assert by_kind[OperationKind.SPARSE] == 2 * pairs[number]
        assert schedule.exchanged_by_rank(samples)[rank] == sum(by_kind.values())
        for item in (4, 8):
            assert schedule.exchanged_bytes_by_rank(samples, item)[rank] == item * 2 * within + (item + 4) * pairs[number]


SUMS = (OperationKind.REDUCE_SCATTER, OperationKind.SPARSE, OperationKind.INPUTS, OperationKind.ERRORS)


def _planned_schedule(strategy: str, norms: NormsNeeded) -> CollectiveSchedule:
    kind, options = STRATEGIES[strategy]
    schedule = planned(kind, make_group(), 3, norms_needed=norms, **options).plan(None)
    assert schedule is not None
    return schedule


@pytest.mark.parametrize("norms", NormsNeeded)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sums_need_their_gradients_and_gathers_need_sums_and_free_data(strategy: str, norms: NormsNeeded) -> None:
    """All of them come earlier, so the order of posting can always be kept."""
    schedule = _planned_schedule(strategy, norms)
    gathered = [operation.slice for operation in schedule.operations if operation.kind is OperationKind.ALLGATHER]
    summed = [operation.slice for operation in schedule.operations if operation.kind is OperationKind.ALLREDUCE]
    assert sorted(gathered + summed) == list(range(len(schedule.slices)))
    sums = {k: set() for k in range(len(schedule.slices))}
    for position, operation in enumerate(schedule.operations):
        if operation.kind in SUMS:
            for k in layer_slices(schedule.slices, operation.slice):
                sums[k].add(position)
    norms_at = {operation.slice: i for i, operation in enumerate(schedule.operations) if operation.kind is OperationKind.NORMS}
    norms_of = {k: {norms_at[first]} for first, slices in covered_slices(schedule).items() for k in slices}
    for position, (operation, needs) in enumerate(zip(schedule.operations, dependencies(schedule), strict=True)):
        assert all(other < position for other in needs.operations)
        if operation.kind is OperationKind.NORMS:
            slices = [k for k, positions in norms_of.items() if norms_at[operation.slice] in positions]
            assert set(needs.operations) == set().union(*(sums[k] for k in slices))
            assert not needs.events
            assert set(needs.gathers_before) == set(slices)  # a step may leave their sums out, which else say so
            continue
        piece = schedule.slices[operation.slice]
        if operation.kind is OperationKind.ALLGATHER:
            assert sums[operation.slice]
            assert set(needs.operations) == sums[operation.slice] | norms_of.get(operation.slice, set())
            names, kind = (*piece.parameters, *piece.replicated), EventKind.LAST_READ
            assert not needs.gathers_before
        else:
            names = piece.parameters
            kind = EventKind.INPUTS if operation.kind is OperationKind.INPUTS else EventKind.GRADIENT
            gathers = operation.kind is not OperationKind.ALLREDUCE
            assert needs.gathers_before == (layer_slices(schedule.slices, operation.slice) if gathers else ())
        assert set(needs.events) == {LocalEventKey(kind, name) for name in names}


@pytest.mark.parametrize("per_node", [1, 2])
def test_the_largest_elements_come_after_the_nodes_sum_and_before_the_gather(per_node: int) -> None:
    """Where nodes have one rank each, after the gradients themselves."""
    piece = Slice("x", 0, 8, 0, ("x",), compression=Compression(2, 0.5))
    within = (Operation(OperationKind.REDUCE_SCATTER, 0, Stream.GRADIENTS),) if per_node > 1 else ()
    sparse = Operation(OperationKind.SPARSE, 0, Stream.NODES)
    rest = (Operation(OperationKind.NORMS, -1, Stream.GRADIENTS), Operation(OperationKind.ALLGATHER, 0, Stream.PARAMETERS))
    needs = dependencies(CollectiveSchedule("x", 2 * per_node, (piece,), (*within, sparse, *rest)))
    *before, exchange, norms, gather = needs
    gradient = LocalEventKey(EventKind.GRADIENT, "x")
    assert (exchange.events, exchange.gathers_before) == (() if before else (gradient,), (0,))
    assert exchange.operations == tuple(range(len(before)))
    assert norms.operations == tuple(range(len(before) + 1))
    assert gather.operations == (*norms.operations, len(before) + 1)


def _layout(sizes: list[int]) -> GroupLayout:
    return GroupLayout({f"l{k}": ParameterSpec((size,), lambda random, shape: np.zeros(shape)) for k, size in enumerate(sizes)})


@given(st.lists(st.integers(0, 60), max_size=40), st.integers(1, 80), st.integers(1, 80))
def test_every_parameter_is_in_one_group_of_neighbours(sizes: list[int], least: int, most: int) -> None:
    layout = _layout(sizes)
    slices = cut(layout, fused(layout, least), most)
    groups = list(slices_of_groups(norm_groups(layout, slices), len(slices)).values())
    assert [k for group in groups for k in group] == list(range(len(slices)))
    names = [dict.fromkeys(name for k in group for name in slices[k].parameters) for group in groups]
    in_order = [name for group in names for name in group]
    assert in_order == [segment.parameter for segment in layout.segments if segment.size]
    # Few, and none so small that it is hardly worth a message, but the front-most.
    assert len(groups) <= 8 + np.log2(max(1, len(slices)))
    for group in groups[1:]:
        held, left = (sum(slices[k].size for k in range(begin, group.stop)) for begin in (group.start, 0))
        assert len(group) >= 2
        assert 8 * held >= layout.size or 2 * held >= left


def test_groups_have_an_eighth_each_and_halve_in_front() -> None:
    layout = _layout([10] * 64)
    assert norm_groups(layout, fused(layout, 10)) == (0, 2, 4, 8, 16, 24, 32, 40, 48, 56)


def test_the_slices_of_one_layer_are_one_group() -> None:
    layout = _layout([800, 10, 10])
    assert norm_groups(layout, cut(layout, fused(layout, 10), 100)) == (0,)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_schedule_covers_every_slice_once(strategy: str) -> None:
    for norms in NormsNeeded:
        schedule = _planned_schedule(strategy, norms)
        if any(operation.kind is OperationKind.ALLREDUCE for operation in schedule.operations):
            assert not covered_slices(schedule)  # whole sums are everywhere, and so are norms
            continue
        covered = [k for slices in covered_slices(schedule).values() for k in slices]
        assert covered == (list(range(len(schedule.slices))) if norms is not NormsNeeded.NONE else [])


def _in_slices(kind: type[Strategy], norms: NormsNeeded, size: int, exchange: str = "never") -> ReduceScatterStrategy:
    """The strategy on three ranks; size: of slices, in bytes or elements."""
    sizes = {"bucket_bytes" if kind is Sharded else "slice_parameters": size}
    strategy = planned(kind, make_group(), 3, norms_needed=norms, fc_exchange=exchange, **sizes)
    assert isinstance(strategy, ReduceScatterStrategy)
    return strategy


@pytest.mark.parametrize("kind", [Sharded, Priority])
def test_orders_from_other_times_have_the_same_groups(kind: type[ReduceScatterStrategy]) -> None:
    """So the lengths of messages, which decide what is added first, repeat in every run."""
    strategy = _in_slices(kind, NormsNeeded.LAYER, 8)
    first = strategy.plan(None)
    assert len(covered_slices(first)) > 1
    random = np.random.default_rng(3)
    for _ in range(5):
        ready = {name: float(random.random()) for name, parameter in make_group().parameters.items() if parameter.size}
        again = strategy.replan(first, Times(ready, {name: at + 0.1 for name, at in ready.items()}, ready, 1.1), None)
        assert covered_slices(again) == covered_slices(first)


def test_norms_that_overlap_are_refused() -> None:
    layout = _layout([8, 8])
    slices = cut(layout, fused(layout, 1), 4)

    def schedule(*starts: int) -> CollectiveSchedule:
        operations = tuple(Operation(OperationKind.NORMS, start, Stream.NORMS) for start in starts)
        return CollectiveSchedule("x", 2, slices, operations)

    assert covered_slices(schedule(2, 0)) == {0: range(2), 2: range(2, 4)}
    assert covered_slices(schedule(ALL_SLICES)) == {ALL_SLICES: range(4)}
    for starts in ((0, 1), (0, 0), (ALL_SLICES, 0)):
        with pytest.raises(AssertionError):
            covered_slices(schedule(*starts))
    alike = replace(schedule(0), operations=())
    assert not covered_slices(alike)


KINDS: dict[str, tuple[type[AllreduceStrategy], dict[str, object]]] = {
    "overlap": (Overlap, {}),
    "bucketed": (Bucketed, {"bucket_bytes": 100}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_element_is_summed_once_and_late_layers_go_first(kind: str) -> None:
    strategy, options = KINDS[kind]
    schedule = planned(strategy, make_group(), 3, **options).plan(None)
    assert schedule is not None
    assert {operation.kind for operation in schedule.operations} == {OperationKind.ALLREDUCE}
    assert [operation.slice for operation in schedule.operations] == list(reversed(range(len(schedule.slices))))
    covered = sorted((piece.start, piece.stop) for piece in schedule.slices)
    assert [i for start, stop in covered for i in range(start, stop)] == list(range(make_group().size))


def test_sizes_by_rule_follow_from_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slicing, "_LEAST_BUCKET_BYTES", 64)
    slow, fast = LinkModel(1e-3, 1e-8), LinkModel(1e-9, 1e-8)
    strategy = planned(Bucketed, make_group(), 2)
    assert strategy.plan(slow) == strategy.plan(fast) == strategy.plan(None)
    assert not strategy.needs_link(None)


LINK = LinkModel(1e-6, 1e-8)


@pytest.mark.parametrize("norms", NormsNeeded)
@pytest.mark.parametrize("kind", [Sharded, Priority])
def test_an_order_from_measured_times_keeps_slices_and_operations(kind: type[ReduceScatterStrategy], norms: NormsNeeded) -> None:
    group = make_group()
    strategy = _in_slices(kind, norms, 16, "always")
    first = strategy.plan(LINK)
    at = {name: float(place) for place, (name, parameter) in enumerate(group.parameters.items()) if parameter.size}
    again = strategy.replan(first, Times(at, {name: 1 + seconds for name, seconds in at.items()}, at, 12.0), LINK)
    assert (first.timed, again.timed) == (False, True)
    assert (again.slices, again.request, again.ranks) == (first.slices, first.request, first.ranks)
    assert sorted(again.operations, key=str) == sorted(first.operations, key=str)
    assert strategy.accepts(again)
    assert (strategy.replans(first), strategy.replans(again)) == (True, False)


def test_a_schedule_with_norms_is_for_an_optimiser_that_needs_them() -> None:
    """Norms of everything fit updates that need those of their layers; those of a group of layers do not fit clipping."""
    strategies = {norms: planned(Sharded, make_group(), 3, norms_needed=norms, bucket_bytes=8) for norms in NormsNeeded}
    fits = {(norms, norms) for norms in NormsNeeded} | {(NormsNeeded.LAYER, NormsNeeded.GLOBAL)}
    for one, other in product(NormsNeeded, NormsNeeded):
        assert strategies[one].accepts(strategies[other].plan(None)) == ((one, other) in fits)


@pytest.mark.parametrize(("ranks", "several_groups"), [(3, True), (1, False)])
def test_norms_of_several_groups_of_parameters_and_of_one_rank_are_one_operation(ranks: int, several_groups: bool) -> None:
    strategy = planned(
        Sharded, make_group(), ranks, norms_needed=NormsNeeded.LAYER, several_groups=several_groups, bucket_bytes=8
    )
    schedule = strategy.plan(None)
    assert schedule is not None
    norms = [operation for operation in schedule.operations if operation.kind is OperationKind.NORMS]
    assert norms == [Operation(OperationKind.NORMS, ALL_SLICES, Stream.GRADIENTS)]
    assert Stream.NORMS not in strategy.posted_streams
    assert not strategy.accepts(planned(Sharded, make_group(), 3, norms_needed=NormsNeeded.LAYER, bucket_bytes=8).plan(None))


@pytest.mark.parametrize("kind", [Sharded, Priority])
def test_norms_of_layers_let_gathers_go_under_backward(kind: type[ReduceScatterStrategy]) -> None:
    """Each gather stands after the norms of its parameters; those of everything stand before all gathers."""
    under_backward = {}
    for norms in NormsNeeded:
        strategy = _in_slices(kind, norms, 8)
        names = [name for name, parameter in make_group().parameters.items() if parameter.size]
        ready = {name: float(len(names) - place) for place, name in enumerate(names)}
        free = {name: at + 0.1 for name, at in ready.items()}
        needed = {name: 0.1 * place for place, name in enumerate(names)}
        schedule = strategy.replan(strategy.plan(LINK), Times(ready, free, needed, 10.0), LINK)
        kinds = [operation.kind for operation in schedule.operations]
        last = len(kinds) - kinds[::-1].index(OperationKind.REDUCE_SCATTER)
        under_backward[norms] = kinds[:last].count(OperationKind.ALLGATHER)
    assert under_backward[NormsNeeded.GLOBAL] == 0
    assert under_backward[NormsNeeded.LAYER] > len(kinds) // 5


# -- VGG-16 by the schedule alone ----------------------------------------------------------------------------------------------
@cache
def _vgg16() -> GroupLayout:
    model = vgg.build()
    specs, _ = declared(model, Lowering(model).graph(1, vgg.IMAGE_SHAPE))
    return GroupLayout(specs, "float32")


def _vgg16_schedule(ranks: int, fc_exchange: str) -> CollectiveSchedule:
    options = {"fc_exchange": fc_exchange, "bucket_bytes": 1 << 22, "replan": False}
    schedule = planned(Sharded, _vgg16(), ranks, nominal_batch=256, **options).plan(None)
    assert schedule is not None
    return schedule


@pytest.mark.parametrize("kind", [Sharded, Priority])
def test_arrays_of_a_device_are_exchanged_only_where_it_is_asked_for(kind: type[ReduceScatterStrategy]) -> None:
    """The exchange has the host take inputs and errors within a step."""

    def exchanging(*, on_host: bool, choice: str) -> bool:
        group = PlannedGroup(_vgg16(), 4, nominal_batch=32, on_host=on_host)
        return bool(kind(group, kind.Options(fc_exchange=choice)).exchanging)

    cases = [(on_host, choice) for on_host in (True, False) for choice in ("auto", "always", "never")]
    assert [exchanging(on_host=on_host, choice=choice) for on_host, choice in cases] == [True, True, False, False, True, False]


@pytest.mark.parametrize("ranks", [64, 256])
def test_vgg16_moves_what_an_allreduce_moves(ranks: int) -> None:
    schedule, n = _vgg16_schedule(ranks, "never"), 138_357_544
    samples = (256 // ranks,) * ranks
    moved = [exchanged(schedule, rank, samples) for rank in range(ranks)]
    assert sum(sum(each.values()) for each in moved) == 2 * (ranks - 1) * n
    own = [sum(end - begin for begin, end in (each.part(rank, ranks) for each in schedule.slices)) for rank in range(ranks)]
    for rank, each in enumerate(moved):
        assert each == {OperationKind.REDUCE_SCATTER: n - own[rank], OperationKind.ALLGATHER: n - own[rank]}
    assert max(own) - min(own) <= len(schedule.slices)


@pytest.mark.parametrize("ranks", [64, 256])
def test_vgg16_moves_less_where_linear_layers_exchange_inputs_and_errors(ranks: int) -> None:
    """(P - 1) / P (K b + M B + K M) a linear layer, its bias for nothing; 2 (P - 1) / P n all others."""
    schedule, batch = _vgg16_schedule(ranks, "auto"), 256
    b = batch // ranks
    linear = ((25088, 4096), (4096, 4096), (4096, 1000))
    n = 138_357_544 - sum(k * m + m for k, m in linear)
    moved = [sum(exchanged(schedule, rank, (b,) * ranks).values()) for rank in range(ranks)]
    # Over all ranks, in integers: the inputs' term needs no rounding, as P divides every K.
    expected = (ranks - 1) * (2 * n + sum(k * b + m * batch + k * m for k, m in linear))
    assert sum(moved) == expected
    if ranks == 256:
        assert round(expected / ranks / 1e6, 2) == 154.84


def test_another_order_on_one_rank_is_named_on_every_rank() -> None:
    schedule = _planned_schedule("sharded", NormsNeeded.GLOBAL)
    operations = list(schedule.operations)
    operations[1], operations[2] = operations[2], operations[1]
    wrong = replace(schedule, operations=tuple(operations))
    first = schedule.slices[schedule.operations[1].slice].name

    def program(comm: Communicator) -> str:
        with pytest.raises(CollectiveMismatchError) as caught:
            check_same_schedule(comm, wrong if comm.rank == 2 else schedule)
        return str(caught.value)

    for message in run_virtual(3, program):
        assert f"operation 1: rank 0 has reduce-scatter of {first}" in message
        assert "but rank 2 has" in message


def test_other_options_and_other_slices_on_one_rank_are_named_too() -> None:
    schedule = _planned_schedule("bucketed", NormsNeeded.GLOBAL)
    moved = list(schedule.slices)
    moved[-1] = replace(moved[-1], order=99)
    for wrong, words in (
        (replace(schedule, request="other"), "the request"),
        (replace(schedule, operations=schedule.operations[:-1]), "nothing more"),
        (replace(schedule, slices=tuple(moved)), "slices"),
    ):

        def program(comm: Communicator, wrong: CollectiveSchedule = wrong) -> str:
            with pytest.raises(CollectiveMismatchError) as caught:
                check_same_schedule(comm, schedule if comm.rank else wrong)
            return str(caught.value)

        assert all(words in message for message in run_virtual(3, program))


def test_a_model_that_differs_on_one_rank_is_refused_when_averagers_agree() -> None:
    def program(comm: Communicator) -> None:
        engine = virtual_engine(comm)  # type: ignore[arg-type]
        options = {"bucket_bytes": 100 if comm.rank else 300, "replan": False}
        with pytest.raises(CollectiveMismatchError, match=r"bucket_bytes 300.*bucket_bytes 100"):
            averaged(Sharded, make_group(), Sgd(), comm, engine, **options)

    run_virtual(3, program)


def test_a_stored_schedule_is_used_for_the_same_request_only() -> None:
    comm, engine = lone_rank()

    first = planned(Sharded, make_group(), bucket_bytes=100, replan=False).plan(None)
    assert first is not None
    stored = replace(first, timed=True)
    for bucket_bytes, used in ((100, True), (400, False)):
        second = averaged(Sharded, make_group(), Sgd(), comm, engine, stored=stored, bucket_bytes=bucket_bytes, replan=False)
        assert (second.schedule == stored) is used


def _group(shards: int | None = 8, **facts: Any) -> PlannedGroup:
    return PlannedGroup(GroupLayout({}), 2, shards=shards, **facts)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sharded", {}),
        ("sharded", {"fc_exchange": "never", "bucket_bytes": 100, "two_level": True}),
        ("priority", {}),
        ("bucketed", {}),
        ("overlap", {}),
        ("blocking", {}),
    ],
)
def test_strategies_that_sum_gradients_are_accepted_for_exact_runs(name: str, options: dict[str, Any]) -> None:
    AveragerChoice(name, options).strategy(_group())


def test_sums_have_one_level() -> None:
    assert AveragerChoice("sharded", {}).strategy(_group(None, nodes=(0, 0))).levels is None
    group = PlannedGroup(GroupLayout({}), 4, nodes=(0, 0, 1, 1))
    assert AveragerChoice("sharded", {}).strategy(group).levels is not None
    assert AveragerChoice("sharded", {}).strategy(PlannedGroup(GroupLayout({}), 4, nodes=(0, 0, 1, 1), shards=8)).levels is None


def test_a_stored_schedule_is_one_of_as_many_shards() -> None:
    requests = [
        AveragerChoice(name, {}).strategy(_group(shards)).request() for name in ("sharded", "bucketed") for shards in (None, 8, 4)
    ]
    assert len(set(requests)) == 6
