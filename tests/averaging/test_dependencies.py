"""What operations start after: laws that hold for the schedule of every strategy."""

from __future__ import annotations

import pytest

from hpctrain.averaging.collective_schedule import CollectiveSchedule, Operation, OperationKind, Stream
from hpctrain.averaging.dependencies import EventKind, LocalEventKey, dependencies
from hpctrain.averaging.norm_groups import covered_slices
from hpctrain.averaging.slices import Compression, Slice, layer_slices
from hpctrain.optim.base import NormsNeeded
from tests.support.averaging import STRATEGIES, make_group, planned

SUMS = (OperationKind.REDUCE_SCATTER, OperationKind.SPARSE, OperationKind.INPUTS, OperationKind.ERRORS)


def _schedule(strategy: str, norms: NormsNeeded) -> CollectiveSchedule:
    kind, options = STRATEGIES[strategy]
    schedule = planned(kind, make_group(), 3, norms_needed=norms, **options).plan(None)
    assert schedule is not None
    return schedule


@pytest.mark.parametrize("norms", NormsNeeded)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_operation_comes_after_earlier_ones_only(strategy: str, norms: NormsNeeded) -> None:
    """So the order of posting can always be kept: no operation holds up one that it waits for."""
    needs = dependencies(_schedule(strategy, norms))
    assert all(other < position for position, each in enumerate(needs) for other in each.operations)


@pytest.mark.parametrize("norms", NormsNeeded)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sums_need_their_gradients_and_gathers_need_sums_and_free_data(strategy: str, norms: NormsNeeded) -> None:
    schedule = _schedule(strategy, norms)
    sums = {k: set() for k in range(len(schedule.slices))}
    for position, operation in enumerate(schedule.operations):
        if operation.kind in SUMS:
            for k in layer_slices(schedule.slices, operation.slice):
                sums[k].add(position)
    norms_at = {operation.slice: i for i, operation in enumerate(schedule.operations) if operation.kind is OperationKind.NORMS}
    norms_of = {k: {norms_at[first]} for first, slices in covered_slices(schedule).items() for k in slices}
    for operation, needs in zip(schedule.operations, dependencies(schedule), strict=True):
        if operation.kind is OperationKind.NORMS:
            slices = [k for k, positions in norms_of.items() if norms_at[operation.slice] in positions]
            assert set(needs.operations) == set().union(*(sums[k] for k in slices))
            assert not needs.events
            assert set(needs.gathers_before) == set(slices)  # a step may leave their sums out, which else say so
            continue
        piece = schedule.slices[operation.slice]
        if operation.kind is OperationKind.ALLGATHER:
            assert set(needs.operations) == sums[operation.slice] | norms_of.get(operation.slice, set())
            names, kind = (*piece.parameters, *piece.replicated), EventKind.LAST_READ
            assert not needs.gathers_before
        else:
            names = piece.parameters
            kind = EventKind.INPUTS if operation.kind is OperationKind.INPUTS else EventKind.GRADIENT
            gathers = operation.kind is not OperationKind.ALLREDUCE
            assert needs.gathers_before == (layer_slices(schedule.slices, operation.slice) if gathers else ())
        assert set(needs.events) == {LocalEventKey(kind, name) for name in names}


def test_every_parameter_is_let_go_before_it_is_written() -> None:
    group, schedule = make_group(), _schedule("sharded, exchange", NormsNeeded.GLOBAL)
    events = {event for each in dependencies(schedule) for event in each.events}
    names = {name for name, parameter in group.parameters.items() if parameter.size}
    assert {event.parameter for event in events if event.kind is EventKind.LAST_READ} == names


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
