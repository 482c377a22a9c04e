"""Costs of operations that are rounded or compressed: bytes on the wire, levels, and work beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.averaging.collective_schedule import OperationKind
from hpctrain.averaging.rounding import Rounding
from hpctrain.averaging.slices import Compression
from hpctrain.comm.sixteen_bit import Wire
from hpctrain.comm.two_level import levels
from hpctrain.planner.collective_costs import Stage, stages
from hpctrain.planner.message_costs import MessageCosts
from hpctrain.planner.tasks import GroupPlacement
from tests.support.planner_jobs import machine_of

MACHINE = machine_of(ranks_per_node=2)
WITHOUT_WORK = replace(MACHINE, rates={})
FOUR = GroupPlacement(4, 4, 1)
TWO_BY_TWO = GroupPlacement(4, 2, 2)
TWO_LEVELS = levels([0, 0, 1, 1])
N_BYTES = 1 << 20


def costs(placement: GroupPlacement = FOUR, rounding: Rounding | None = None, *, in_levels: bool = False) -> MessageCosts:
    return MessageCosts(WITHOUT_WORK, placement, TWO_LEVELS if in_levels else None, 4, rounding)


def wire_bytes(priced: tuple[Stage, ...], *, between: bool) -> float:
    return sum(stage.wire_bytes for stage in priced if stage.between is between)


@pytest.mark.parametrize("kind", [OperationKind.REDUCE_SCATTER, OperationKind.ALLGATHER, OperationKind.ALLREDUCE])
def test_whole_messages_cost_what_collectives_do(kind: OperationKind) -> None:
    assert costs().stages(kind, N_BYTES) == stages(WITHOUT_WORK, kind, N_BYTES, FOUR)
    whole = Rounding("float32", "float32")
    assert costs(TWO_BY_TWO, whole, in_levels=True).stages(kind, N_BYTES) == stages(
        WITHOUT_WORK, kind, N_BYTES, TWO_BY_TWO, TWO_LEVELS
    )


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_rounded_messages_have_half_of_the_bytes(wire: Wire) -> None:
    rounded, whole = costs(FOUR, Rounding(wire, wire)), costs()
    for kind in (OperationKind.REDUCE_SCATTER, OperationKind.ALLGATHER, OperationKind.ALLREDUCE):
        ratio = wire_bytes(rounded.stages(kind, N_BYTES), between=True) / wire_bytes(whole.stages(kind, N_BYTES), between=True)
        assert ratio == pytest.approx(0.5)


def test_parameters_are_whole_where_gradients_alone_are_rounded() -> None:
    rounded = costs(FOUR, Rounding("bfloat16", "float32"))
    assert rounded.stages(OperationKind.ALLGATHER, N_BYTES) == costs().stages(OperationKind.ALLGATHER, N_BYTES)


@pytest.mark.parametrize("kind", [OperationKind.NORMS, OperationKind.INPUTS, OperationKind.ERRORS])
def test_norms_and_factors_are_never_rounded(kind: OperationKind) -> None:
    assert costs(FOUR, Rounding("bfloat16", "bfloat16")).stages(kind, 4096) == costs().stages(kind, 4096)


def test_sums_within_a_node_stay_whole() -> None:
    whole = costs(TWO_BY_TWO, in_levels=True).stages(OperationKind.REDUCE_SCATTER, N_BYTES)
    rounded = costs(TWO_BY_TWO, Rounding("bfloat16", "float32", 2), in_levels=True).stages(OperationKind.REDUCE_SCATTER, N_BYTES)
    assert wire_bytes(rounded, between=False) == wire_bytes(whole, between=False)
    assert wire_bytes(rounded, between=True) == pytest.approx(wire_bytes(whole, between=True) / 2)


def test_an_allreduce_in_levels_crosses_as_a_reduction_and_a_gather_do() -> None:
    """Within the node, too, but for numbers that stay whole."""
    rounding = Rounding("bfloat16", "bfloat16", 2)
    of_group, whole = costs(TWO_BY_TWO, rounding, in_levels=True), costs(TWO_BY_TWO, in_levels=True)
    priced = of_group.stages(OperationKind.ALLREDUCE, N_BYTES)
    pair = (OperationKind.REDUCE_SCATTER, OperationKind.ALLGATHER)
    of_pair = [stage for kind in pair for stage in of_group.stages(kind, N_BYTES)]
    whole_pair = [stage for kind in pair for stage in whole.stages(kind, N_BYTES)]
    assert wire_bytes(priced, between=True) == pytest.approx(wire_bytes(tuple(of_pair), between=True))
    assert wire_bytes(priced, between=False) == pytest.approx(wire_bytes(tuple(whole_pair), between=False))
    flat = costs(TWO_BY_TWO, Rounding("bfloat16", "bfloat16")).stages(OperationKind.ALLREDUCE, N_BYTES)
    assert wire_bytes(priced, between=True) < wire_bytes(flat, between=True)


def test_rounding_takes_time_of_a_core_and_float16_more_of_it() -> None:
    def cpu_seconds(wire: Wire) -> float:
        rounding = Rounding(wire, wire)
        priced = MessageCosts(MACHINE, FOUR, None, 4, rounding).stages(OperationKind.REDUCE_SCATTER, N_BYTES)
        return sum(stage.cpu_seconds for stage in priced)

    assert cpu_seconds("float32") < cpu_seconds("bfloat16") < cpu_seconds("float16")


@pytest.mark.parametrize("density", [0.001, 0.01, 1.0])
def test_the_largest_elements_cross_between_nodes_with_their_positions(density: float) -> None:
    compression = Compression(4, density)
    priced = costs().stages(OperationKind.SPARSE, N_BYTES, compression)
    assert wire_bytes(priced, between=True) == pytest.approx(3 * 8 * compression.kept(N_BYTES // 4))
    for kind in (OperationKind.REDUCE_SCATTER, OperationKind.ALLGATHER):  # every rank is a node
        assert costs().stages(kind, N_BYTES, compression) == ()


def test_with_several_ranks_a_node_sums_and_parameters_stay_within_it() -> None:
    compression, of_group = Compression(2, 0.01), costs(TWO_BY_TWO, in_levels=True)
    sent = of_group.stages(OperationKind.SPARSE, N_BYTES, compression)
    assert wire_bytes(sent, between=True) == pytest.approx(8 * compression.kept(N_BYTES // 8))
    for kind in (OperationKind.REDUCE_SCATTER, OperationKind.ALLGATHER):
        priced = of_group.stages(kind, N_BYTES, compression)
        assert wire_bytes(priced, between=True) == 0
        assert wire_bytes(priced, between=False) == pytest.approx(N_BYTES / 2)


def test_choosing_takes_as_long_for_each_element_and_adding_for_each_pair() -> None:
    of_group = MessageCosts(MACHINE, FOUR, None, 4)
    few, many = Compression(4, 0.001), Compression(4, 0.1)
    assert of_group.selection_seconds(2e6) == pytest.approx(2 * of_group.selection_seconds(1e6))
    assert of_group.scatter_seconds(1e6, few) < of_group.scatter_seconds(1e6, many)
    both = of_group.selection_seconds(1e6) + of_group.scatter_seconds(1e6, few)
    assert of_group.choice_seconds(1e6, few) == pytest.approx(both)
    assert MessageCosts(WITHOUT_WORK, FOUR, None, 4).choice_seconds(1e6, few) == 0.0


def test_one_rank_sends_nothing() -> None:
    alone = MessageCosts(MACHINE, GroupPlacement(1, 1, 1), None, 4, Rounding("bfloat16", "bfloat16"))
    for kind in (OperationKind.REDUCE_SCATTER, OperationKind.ALLGATHER, OperationKind.ALLREDUCE):
        assert alone.stages(kind, N_BYTES) == ()
