"""Schedules of owners' updates, without ranks: what VGG-16 moves, and that an order from measured times keeps every slice."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest

from hpctrain.averaging.collective_schedule import ALL_SLICES, CollectiveSchedule, Operation, OperationKind, Stream
from hpctrain.averaging.compute_times import Times
from hpctrain.averaging.reduce_scatter_strategy import ReduceScatterStrategy
from hpctrain.averaging.strategies.priority import Priority
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.averaging.strategy import PlannedGroup
from hpctrain.backend.kernels.graph import GraphBuilder
from hpctrain.backend.kernels.specs import TensorSpec
from hpctrain.comm.link import LinkModel
from hpctrain.errors import OptionError
from hpctrain.models.families import vgg
from hpctrain.nn.network import declared
from hpctrain.nn.parameter import GroupLayout
from hpctrain.optim.base import NormsNeeded
from tests.support.averaging import make_group, planned

LINK = LinkModel(1e-6, 1e-8)


@pytest.mark.parametrize("norms", NormsNeeded)
@pytest.mark.parametrize("kind", [Sharded, Priority])
def test_an_order_from_measured_times_keeps_slices_and_operations(kind: type[ReduceScatterStrategy], norms: NormsNeeded) -> None:
    group = make_group()
    size = "bucket_bytes" if kind is Sharded else "slice_parameters"
    strategy = planned(kind, group, 3, norms_needed=norms, fc_exchange="always", **{size: 16})
    assert isinstance(strategy, ReduceScatterStrategy)
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
    """And each stands behind the norms of its parameters; those of everything stand before all gathers."""
    under_backward = {}
    for norms in NormsNeeded:
        size = {"bucket_bytes" if kind is Sharded else "slice_parameters": 8}
        strategy = planned(kind, make_group(), 3, norms_needed=norms, fc_exchange="never", **size)
        assert isinstance(strategy, ReduceScatterStrategy)
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


@pytest.mark.parametrize("kind", [Sharded, Priority])
def test_the_exchange_needs_one_micro_batch(kind: type[ReduceScatterStrategy]) -> None:
    with pytest.raises(OptionError, match="fc_exchange is always, but micro_batches is 2") as caught:
        planned(kind, make_group(), 2, micro_batches=2, fc_exchange="always")
    assert caught.value.option == "fc_exchange"


# -- VGG-16 by the schedule alone ----------------------------------------------------------------------------------------------


@cache
def _vgg16() -> GroupLayout:
    model = vgg.build()
    builder = GraphBuilder(TensorSpec((1, *vgg.IMAGE_SHAPE), "float32"))
    specs, _ = declared(model, builder.build(model.lower(builder, 0, "")))
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
    moved = [schedule.exchanged(rank, samples) for rank in range(ranks)]
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
    moved = [sum(schedule.exchanged(rank, (b,) * ranks).values()) for rank in range(ranks)]
    # Over all ranks, in integers: the inputs' term needs no rounding, as P divides every K.
    expected = (ranks - 1) * (2 * n + sum(k * b + m * batch + k * m for k, m in linear))
    assert sum(moved) == expected
    if ranks == 256:
        assert round(expected / ranks / 1e6, 2) == 154.84
