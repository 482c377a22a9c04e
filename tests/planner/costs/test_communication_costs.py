"""What communication costs: collectives, rounded and compressed messages, averagers, moves; and where groups lie on nodes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.averaging.averagers import AveragerChoice
from hpctrain.averaging.collective_schedule import CollectiveSchedule, Operation, OperationKind, Stream
from hpctrain.averaging.sixteen_bits import Rounding
from hpctrain.averaging.slicing import Compression, Slice
from hpctrain.backend.specs import TensorSpec
from hpctrain.comm.groups import Levels, levels
from hpctrain.comm.link import LinkModel
from hpctrain.comm.sums import Wire
from hpctrain.core.intervals import even_intervals, intersect, shape_of, size_of
from hpctrain.nn.compile.plan import Action
from hpctrain.parallel import layout
from hpctrain.parallel.layout import Layout
from hpctrain.parallel.moves import RedistributeSpec, ReduceScatterSpec, moved, moved_back
from hpctrain.planner.costs.collective_costs import (
    CollectiveStage,
    GroupPlacement,
    Kind,
    MessageCosts,
    grid_placements,
    stages,
    unhindered_seconds,
)
from hpctrain.planner.costs.machine import Link, LinkSegment, Machine
from hpctrain.planner.costs.operator_work import is_move, move_traffic
from hpctrain.planner.search.averaging_costs import AveragedParts, AveragingCosts, LinearSize
from tests.support.averaging import exchanged
from tests.support.simulated import machine_of

ALPHA, BETA = 3e-6, 1 / 5e9
LONG = 1 << 20
ONE_LINK = LinkModel(ALPHA, BETA)
KINDS: tuple[Kind, ...] = (*OperationKind, "exchange", "merge", "message")


def machine(ranks_per_node: int = 1, ranks_per_card: int = 1, within: Link | None = None, between: Link | None = None) -> Machine:
    plain = Link((LinkSegment(0, ALPHA, BETA),))
    links = within or plain, between or plain
    return Machine("test", 64, ranks_per_node, 1.0, 1 << 30, *links, ranks_per_card, {}, sources={"all": "made up"})


def wire_bytes(found: tuple[CollectiveStage, ...]) -> float:
    return sum(stage.wire_bytes for stage in found)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 32])
@pytest.mark.parametrize("nodes", ["one", "each"])
def test_long_messages_on_one_level_cost_what_the_one_link_model_says(ranks: int, nodes: str) -> None:
    placement = GroupPlacement(ranks, 1, ranks) if nodes == "one" else GroupPlacement(ranks, ranks, 1)
    host = machine(ranks_per_node=ranks if nodes == "one" else 1)
    for kind, expected in [
        (OperationKind.REDUCE_SCATTER, ONE_LINK.reduce_scatter_seconds(LONG, ranks)),
        (OperationKind.ALLGATHER, ONE_LINK.allgather_seconds(LONG, ranks)),
        (OperationKind.INPUTS, ONE_LINK.reduce_scatter_seconds(LONG, ranks)),
    ]:
        assert unhindered_seconds(stages(host, kind, LONG, placement)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("ranks", [2, 4, 16, 128])
@pytest.mark.parametrize("n_bytes", [1 << 14, 1 << 22])
def test_bytes_are_those_that_the_schedule_counts(ranks: int, n_bytes: int) -> None:
    piece = Slice("s", 0, n_bytes // 4, 0, ("p",))
    kinds = (OperationKind.REDUCE_SCATTER, OperationKind.ALLGATHER, OperationKind.ALLREDUCE)
    schedule = CollectiveSchedule("r", ranks, (piece,), tuple(Operation(kind, 0, Stream.GRADIENTS) for kind in kinds))
    counted = exchanged(schedule, 0, [1] * ranks)
    for kind in kinds:
        found = stages(machine(), kind, n_bytes, GroupPlacement(ranks, ranks, 1))
        assert wire_bytes(found) == 4 * counted[kind]


@pytest.mark.parametrize(("ranks", "rounds"), [(2, 1), (4, 2), (8, 3), (1024, 10)])
def test_short_messages_take_a_logarithm_of_rounds(ranks: int, rounds: int) -> None:
    placement = GroupPlacement(ranks, ranks, 1)
    for kind in (OperationKind.REDUCE_SCATTER, OperationKind.ALLGATHER, "message", "merge", OperationKind.NORMS):
        (stage,) = stages(machine(), kind, 1024, placement)
        assert stage.rounds == rounds
        assert stage.latency_seconds == pytest.approx(rounds * ALPHA)
    (stage,) = stages(machine(), OperationKind.ALLREDUCE, LONG, placement)
    assert stage.rounds == 2 * rounds


@pytest.mark.parametrize("ranks", [3, 5, 6, 12])
def test_ranks_that_are_no_power_of_two_are_folded_into_one(ranks: int) -> None:
    placement = GroupPlacement(ranks, ranks, 1)
    power = 1 << (ranks.bit_length() - 1)
    (stage,) = stages(machine(), "message", 8, placement)
    assert (stage.rounds, stage.wire_bytes) == (power.bit_length() - 1 + 2, 8 * stage.rounds)
    (halved,) = stages(machine(), OperationKind.REDUCE_SCATTER, 6000, placement)
    assert halved.wire_bytes == pytest.approx(6000 + 6000 * (power - 1) / power + 6000 / ranks)
    (gathered,) = stages(machine(), OperationKind.ALLGATHER, 6000, placement)
    assert gathered.wire_bytes == pytest.approx(6000 * (ranks - 1) / ranks)
    assert gathered.rounds == (ranks - 1).bit_length()


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_and_empty_operations_cost_nothing(kind: Kind) -> None:
    assert stages(machine(), kind, 1 << 20, GroupPlacement(1, 1, 1)) == ()
    assert stages(machine(), kind, 0, GroupPlacement(8, 8, 1)) == ()
    assert stages(machine(), "exchange", 100, GroupPlacement(8, 8, 1), peers=0) == ()
    assert unhindered_seconds(()) == 0.0


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (4, 8), (3, 2)])
def test_two_levels_are_a_collective_within_and_one_across(nodes: int, per_node: int) -> None:
    two = levels([node for node in range(nodes) for _ in range(per_node)])
    assert two is not None
    host = machine(per_node, per_node)
    placement = GroupPlacement(nodes * per_node, nodes, per_node)
    for kind in (OperationKind.REDUCE_SCATTER, OperationKind.ALLGATHER):
        found = stages(host, kind, 8 * LONG, placement, two)
        across, within = sorted(found, key=lambda stage: not stage.between)
        assert (found[0].between, found[1].between) == ((False, True) if kind is OperationKind.REDUCE_SCATTER else (True, False))
        # As if a node were one rank: (N - 1) / N n over each card.
        assert across.wire_bytes * across.sharers == pytest.approx((nodes - 1) / nodes * 8 * LONG)
        assert within.wire_bytes == pytest.approx((per_node - 1) / per_node * 8 * LONG)


def test_only_a_boundary_of_a_ring_crosses_nodes() -> None:
    ranks, per_node = 32, 8
    (stage,) = stages(machine(per_node, per_node), OperationKind.ALLGATHER, LONG, GroupPlacement(ranks, 4, per_node))
    assert stage.between
    assert stage.wire_bytes * stage.sharers == pytest.approx((ranks - 1) / ranks * LONG)
    # In a pairwise reduce-scatter all that is for other nodes crosses.
    (pairwise,) = stages(machine(per_node, per_node), OperationKind.REDUCE_SCATTER, LONG, GroupPlacement(ranks, 4, per_node))
    assert pairwise.wire_bytes * pairwise.sharers == pytest.approx(per_node * (ranks - per_node) / ranks * LONG)


def test_a_ring_is_held_up_by_slow_copies_within_its_nodes() -> None:
    slow = Link((LinkSegment(0, ALPHA, 100 * BETA),))
    (stage,) = stages(machine(8, 8, within=slow), OperationKind.ALLGATHER, LONG, GroupPlacement(32, 4, 8))
    assert not stage.between
    assert stage.wire_seconds == pytest.approx(100 * BETA * 7 / 8 * 31 / 32 * LONG)


def test_doubling_stays_within_a_node_while_partners_are_near() -> None:
    found = stages(machine(4, 4), OperationKind.ALLREDUCE, 1 << 16, GroupPlacement(16, 4, 4))
    assert [stage.between for stage in found] == [False, True, False]
    assert sum(stage.rounds for stage in found) == 8
    across = found[1]
    assert across.wire_bytes * across.sharers == pytest.approx(2 * (1 << 16) * 3 / 4)
    far_first = stages(machine(4, 4), OperationKind.REDUCE_SCATTER, 1 << 16, GroupPlacement(16, 4, 4))
    assert [stage.between for stage in far_first] == [True, False]
    assert [stage.wire_bytes for stage in far_first] == [(1 << 16) * 3 / 4, (1 << 16) * 3 / 16]


def test_norms_in_the_order_of_levels_meet_other_nodes_first() -> None:
    two = Levels((0, 2, 1, 3), 2, 2)
    found = stages(machine(2, 2), OperationKind.NORMS, 4096, GroupPlacement(4, 2, 2), two)
    assert [stage.between for stage in found] == [True, False, True]


@pytest.mark.parametrize(("alike", "ranks_per_card", "load"), [(1, 4, 2), (2, 4, 4), (2, 2, 2), (2, 1, 1), (1, 1, 1)])
def test_groups_alike_share_the_cards_of_their_nodes(alike: int, ranks_per_card: int, load: float) -> None:
    host = machine(4, ranks_per_card)
    (stage,) = stages(host, "exchange", 1000, GroupPlacement(4, 2, 2, alike), peers=3)
    assert stage.wire_bytes == pytest.approx(1000 * 2 / 3)
    assert stage.wire_seconds == pytest.approx(1000 * 2 / 3 * load * BETA)


@pytest.mark.parametrize("peers", [1, 2, 3])
def test_neighbours_that_exchange_cross_at_the_boundary_of_a_node(peers: int) -> None:
    (stage,) = stages(machine(4, 4), "exchange", 1200, GroupPlacement(8, 2, 4), peers=peers)
    assert stage.between
    assert stage.rounds == 1
    assert stage.wire_bytes == pytest.approx(1200 * ({1: 1, 2: 1, 3: 1.5}[peers] / 4))
    (inside,) = stages(machine(8, 8), "exchange", 1200, GroupPlacement(8, 1, 8), peers=peers)
    assert (inside.between, inside.wire_bytes) == (False, 1200)


def test_processor_time_counts_what_is_sent_and_received_and_one_posting() -> None:
    within = Link((LinkSegment(0, ALPHA, BETA),), operation_seconds=1e-4, byte_seconds=1e-9)
    between = replace(within, operation_seconds=2e-4, byte_seconds=3e-9)
    host = machine(4, 4, within, between)
    found = stages(host, OperationKind.ALLREDUCE, 1 << 16, GroupPlacement(16, 4, 4))
    bytes_between = 2 * (1 << 16) / 4 * 3 / 4
    bytes_within = 2 * (1 << 16) * 3 / 4
    expected = 1e-4 + 2 * (bytes_within * 1e-9 + bytes_between * 3e-9)
    assert sum(stage.cpu_seconds for stage in found) == pytest.approx(expected)
    busy = replace(found[0], cpu_seconds=1.0)
    assert busy.seconds == 1.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "placement", [GroupPlacement(8, 1, 8), GroupPlacement(8, 8, 1), GroupPlacement(12, 3, 4, 2), GroupPlacement(8192, 256, 32)]
)
def test_more_bytes_never_cost_less(kind: Kind, placement: GroupPlacement) -> None:
    host = machine(32, 32)
    large = [unhindered_seconds(stages(host, kind, n_bytes, placement)) for n_bytes in (LONG, 2 * LONG, 64 * LONG)]
    assert large == sorted(large)
    assert large[0] > 0


def test_messages_are_priced_by_the_segment_of_their_own_size() -> None:
    link = Link((LinkSegment(0, 1e-6, 1e-9), LinkSegment(1000, 5e-6, 1e-10)))
    host = machine(between=link)
    (stage,) = stages(
        host, OperationKind.ALLGATHER, 4000, GroupPlacement(4, 4, 1)
    )  # 1000 to the neighbour, 2000 to the farther one
    assert stage.seconds == pytest.approx(10e-6 + 3000e-10)
    (short,) = stages(host, OperationKind.ALLGATHER, 3000, GroupPlacement(4, 4, 1))
    assert short.seconds == pytest.approx(6e-6 + 750e-9 + 1500e-10)


def test_what_a_reduction_adds_up_takes_the_core_and_delays_it() -> None:
    link = Link((LinkSegment(0, ALPHA, BETA),), sum_seconds=1e-9)
    placement = GroupPlacement(4, 4, 1)
    plain, summing = (stages(machine(between=one), OperationKind.REDUCE_SCATTER, LONG, placement) for one in (None, link))
    added = 1e-9 * LONG * 3 / 4
    assert unhindered_seconds(summing) == pytest.approx(unhindered_seconds(plain) + added)
    assert summing[0].cpu_seconds == pytest.approx(added)
    assert stages(machine(between=link), OperationKind.ALLGATHER, LONG, placement) == stages(
        machine(), OperationKind.ALLGATHER, LONG, placement
    )
    (both,) = stages(machine(between=link), OperationKind.ALLREDUCE, LONG, placement)
    assert both.cpu_seconds == pytest.approx(added)


def test_the_largest_message_says_how_much_moves_between_polls() -> None:
    link = Link((LinkSegment(0, ALPHA, BETA), LinkSegment(1000, ALPHA, BETA, unattended_bytes=500, polls=2)))
    host = machine(between=link)
    (short,) = stages(host, OperationKind.ALLGATHER, 1998, GroupPlacement(2, 2, 1))
    assert (short.unattended_bytes, short.polls) == (None, 0)
    (long,) = stages(host, OperationKind.ALLGATHER, 2000, GroupPlacement(2, 2, 1))
    assert (long.unattended_bytes, long.polls) == (500, 2)
    (several,) = stages(host, "exchange", 3000, GroupPlacement(4, 4, 1), peers=3)
    assert several.unattended_bytes == 1500


def test_a_pause_saves_time_on_cards_and_nothing_else() -> None:
    link = Link((LinkSegment(0, ALPHA, BETA),), byte_seconds=BETA / 100, burst_bytes=300_000)
    host = machine(between=link)
    found = stages(host, OperationKind.ALLGATHER, LONG, GroupPlacement(2, 2, 1))
    whole = unhindered_seconds(found)
    assert unhindered_seconds(found, host.between.burst_seconds) == pytest.approx(whole - 300_000 * BETA)
    assert unhindered_seconds(found, 1.0) == pytest.approx(ALPHA)  # all of it passes at once
    inside = stages(machine(2, 2), OperationKind.ALLGATHER, LONG, GroupPlacement(2, 1, 2))
    assert unhindered_seconds(inside, 1.0) == unhindered_seconds(inside)


MACHINE = machine_of(ranks_per_node=2)
WITHOUT_WORK = replace(MACHINE, rates={})
FOUR = GroupPlacement(4, 4, 1)
TWO_BY_TWO = GroupPlacement(4, 2, 2)
TWO_LEVELS = levels([0, 0, 1, 1])
N_BYTES = 1 << 20


def costs(placement: GroupPlacement = FOUR, rounding: Rounding | None = None, *, in_levels: bool = False) -> MessageCosts:
    return MessageCosts(WITHOUT_WORK, placement, TWO_LEVELS if in_levels else None, 4, rounding)


def bytes_across(priced: tuple[CollectiveStage, ...], *, between: bool) -> float:
    return sum(stage.wire_bytes for stage in priced if stage.between is between)


@pytest.mark.parametrize("kind", [OperationKind.REDUCE_SCATTER, OperationKind.ALLGATHER, OperationKind.ALLREDUCE])
def test_whole_messages_cost_what_collectives_do(kind: OperationKind) -> None:
    assert costs().stages(kind, N_BYTES) == stages(WITHOUT_WORK, kind, N_BYTES, FOUR)
    whole = Rounding("float32", "float32")
    assert costs(TWO_BY_TWO, whole, in_levels=True).stages(kind, N_BYTES) == stages(
        WITHOUT_WORK, kind, N_BYTES, TWO_BY_TWO, TWO_LEVELS
    )


def test_rounded_messages_have_half_of_the_bytes() -> None:
    rounded, whole = costs(FOUR, Rounding("bfloat16", "bfloat16")), costs()
    for kind in (OperationKind.REDUCE_SCATTER, OperationKind.ALLGATHER, OperationKind.ALLREDUCE):
        half, full = (bytes_across(one.stages(kind, N_BYTES), between=True) for one in (rounded, whole))
        assert half == pytest.approx(full / 2)


@pytest.mark.parametrize("kind", [OperationKind.NORMS, OperationKind.INPUTS, OperationKind.ERRORS, OperationKind.ALLGATHER])
def test_norms_factors_and_parameters_without_a_wire_of_their_own_stay_whole(kind: OperationKind) -> None:
    parameters: Wire = "float32" if kind is OperationKind.ALLGATHER else "bfloat16"
    assert costs(FOUR, Rounding("bfloat16", parameters)).stages(kind, 4096) == costs().stages(kind, 4096)


def test_sums_within_a_node_stay_whole() -> None:
    whole = costs(TWO_BY_TWO, in_levels=True).stages(OperationKind.REDUCE_SCATTER, N_BYTES)
    rounded = costs(TWO_BY_TWO, Rounding("bfloat16", "float32", 2), in_levels=True).stages(OperationKind.REDUCE_SCATTER, N_BYTES)
    assert bytes_across(rounded, between=False) == bytes_across(whole, between=False)
    assert bytes_across(rounded, between=True) == pytest.approx(bytes_across(whole, between=True) / 2)


def test_an_allreduce_in_levels_crosses_as_a_reduction_and_a_gather_do() -> None:
    """Within the node, too, but for numbers that stay whole."""
    rounding = Rounding("bfloat16", "bfloat16", 2)
    of_group, whole = costs(TWO_BY_TWO, rounding, in_levels=True), costs(TWO_BY_TWO, in_levels=True)
    priced = of_group.stages(OperationKind.ALLREDUCE, N_BYTES)
    pair = (OperationKind.REDUCE_SCATTER, OperationKind.ALLGATHER)
    of_pair = [stage for kind in pair for stage in of_group.stages(kind, N_BYTES)]
    whole_pair = [stage for kind in pair for stage in whole.stages(kind, N_BYTES)]
    assert bytes_across(priced, between=True) == pytest.approx(bytes_across(tuple(of_pair), between=True))
    assert bytes_across(priced, between=False) == pytest.approx(bytes_across(tuple(whole_pair), between=False))
    flat = costs(TWO_BY_TWO, Rounding("bfloat16", "bfloat16")).stages(OperationKind.ALLREDUCE, N_BYTES)
    assert bytes_across(priced, between=True) < bytes_across(flat, between=True)


def test_rounding_takes_time_of_a_core() -> None:
    def cpu_seconds(wire: Wire) -> float:
        rounding = Rounding(wire, wire)
        priced = MessageCosts(MACHINE, FOUR, None, 4, rounding).stages(OperationKind.REDUCE_SCATTER, N_BYTES)
        return sum(stage.cpu_seconds for stage in priced)

    assert cpu_seconds("float32") < cpu_seconds("bfloat16")


@pytest.mark.parametrize("density", [0.001, 0.01, 1.0])
def test_the_largest_elements_cross_between_nodes_with_their_positions(density: float) -> None:
    compression = Compression(4, density)
    priced = costs().stages(OperationKind.SPARSE, N_BYTES, compression)
    assert bytes_across(priced, between=True) == pytest.approx(3 * 8 * compression.kept(N_BYTES // 4))
    for kind in (OperationKind.REDUCE_SCATTER, OperationKind.ALLGATHER):  # every rank is a node
        assert costs().stages(kind, N_BYTES, compression) == ()


def test_with_several_ranks_a_node_sums_and_parameters_stay_within_it() -> None:
    compression, of_group = Compression(2, 0.01), costs(TWO_BY_TWO, in_levels=True)
    sent = of_group.stages(OperationKind.SPARSE, N_BYTES, compression)
    assert bytes_across(sent, between=True) == pytest.approx(8 * compression.kept(N_BYTES // 8))
    for kind in (OperationKind.REDUCE_SCATTER, OperationKind.ALLGATHER):
        priced = of_group.stages(kind, N_BYTES, compression)
        assert bytes_across(priced, between=True) == 0
        assert bytes_across(priced, between=False) == pytest.approx(N_BYTES / 2)


def test_choosing_takes_as_long_for_each_element_and_adding_for_each_pair() -> None:
    of_group = MessageCosts(MACHINE, FOUR, None, 4)
    few, many = Compression(4, 0.001), Compression(4, 0.1)
    assert of_group.selection_seconds(2e6) == pytest.approx(2 * of_group.selection_seconds(1e6))
    assert of_group.scatter_seconds(1e6, few) < of_group.scatter_seconds(1e6, many)
    assert MessageCosts(WITHOUT_WORK, FOUR, None, 4).scatter_seconds(1e6, few) == 0.0


EVEN_MACHINE = machine_of(alpha_seconds=2e-6)
ELEMENTS = 1 << 20


def costs_of(choice: AveragerChoice, rows: int, cols: int, batch: int = 64, machine: Machine = EVEN_MACHINE) -> AveragingCosts:
    placements = grid_placements(machine, rows, cols)
    return AveragingCosts(machine, 0.0, placements, choice, total_bytes=4 * ELEMENTS, batch=batch, item_bytes=4, exchange=True)


def test_blocking_takes_one_allreduce_of_everything() -> None:
    seconds = costs_of(AveragerChoice("blocking"), 1, 8).seconds(AveragedParts(ELEMENTS, 1), split=False)
    placement = grid_placements(EVEN_MACHINE, 1, 8).all_ranks
    expected = unhindered_seconds(stages(EVEN_MACHINE, OperationKind.ALLREDUCE, 4 * ELEMENTS, placement))
    assert seconds.wire == pytest.approx(expected)


@pytest.mark.parametrize("name", ["sharded", "bucketed", "priority", "overlap", "blocking"])
def test_costs_add_up_and_parts_of_a_data_group_cost_less(name: str) -> None:
    costs = costs_of(AveragerChoice(name), 4, 4)
    half, whole = (costs.seconds(AveragedParts(ELEMENTS // share, 2 // share), split=False) for share in (2, 1))
    assert whole.wire == pytest.approx(2 * half.wire)
    assert costs.seconds(AveragedParts(ELEMENTS // 4, 1), split=True).wire < whole.wire


def test_the_exchange_is_taken_where_it_moves_less() -> None:
    """8 ranks, K = 512, M = 256: it moves less where B < K M / (M + K / P) = 409.6."""
    parts = AveragedParts(512 * 256 + 256, 2, (LinearSize(512, 256),))
    for batch, less in ((400, True), (420, False)):
        with_it = costs_of(AveragerChoice("sharded"), 1, 8, batch).seconds(parts, split=False)
        without = costs_of(AveragerChoice("sharded", {"fc_exchange": "never"}), 1, 8, batch).seconds(parts, split=False)
        assert (with_it != without) is less
    assert costs_of(AveragerChoice("bucketed"), 1, 8, 8)._exchange is False


def test_owners_update_a_part_only() -> None:
    placements, sizes = grid_placements(EVEN_MACHINE, 1, 8), {"total_bytes": 4 * ELEMENTS, "batch": 8, "item_bytes": 4}
    sharded, bucketed = (
        AveragingCosts(EVEN_MACHINE, 1e-9, placements, AveragerChoice(name), **sizes, exchange=False)
        .seconds(AveragedParts(ELEMENTS), split=False)
        .program
        for name in ("sharded", "bucketed")
    )
    assert bucketed == pytest.approx(8 * sharded)


def test_a_step_is_no_shorter_than_what_cannot_hide() -> None:
    for program, wire in ((3.0, 1.0), (3.0, 2.9), (3.0, 10.0)):
        sharded, bucketed, blocking = (
            AveragerChoice(name).costs.step_seconds(program, wire) for name in ("sharded", "bucketed", "blocking")
        )
        assert max(program, wire) == sharded <= bucketed <= blocking == program + wire
    for name in ("sharded", "bucketed", "blocking"):
        choice = AveragerChoice(name).costs
        hidden = choice.hidden_seconds(3.0)
        assert choice.step_seconds(3.0, hidden) == pytest.approx(3.0)
        assert choice.step_seconds(3.0, hidden + 1e-3) > 3.0


@pytest.mark.parametrize(("name", "options"), [("sharded", {}), ("bucketed", {"wire": "bfloat16"})])
def test_sums_in_two_levels_cross_a_nodes_link_once(name: str, options: dict[str, str]) -> None:
    slow = machine_of(ranks_per_node=4, within=None)
    flat = costs_of(AveragerChoice(name, {**options, "two_level": False}), 1, 16, machine=slow)
    levels = costs_of(AveragerChoice(name, options), 1, 16, machine=slow)
    parts = AveragedParts(ELEMENTS, 1)
    assert levels.seconds(parts, split=False).wire < flat.seconds(parts, split=False).wire


@pytest.mark.parametrize("name", ["sharded", "bucketed", "priority", "blocking"])
def test_rounded_gradients_take_less_of_a_link(name: str) -> None:
    slow = machine_of(bytes_per_second=1e6)
    whole, rounded = (
        costs_of(AveragerChoice(name, options), 1, 4, machine=slow).seconds(AveragedParts(ELEMENTS), split=False).wire
        for options in ({}, {"wire": "bfloat16"})
    )
    both = 2 if name in ("bucketed", "blocking") else 4 / 3  # owners send their parameters whole
    assert rounded == pytest.approx(whole / both, rel=0.02)


@pytest.mark.parametrize(("density", "share"), [(0.01, 0.04), (0.1, 0.4), (1.0, 1.0)])
def test_sparse_averaging_costs_no_more_than_dense(density: float, share: float) -> None:
    slow = machine_of(bytes_per_second=1e6)
    options = {"density": density, "two_level": False}
    sparse, dense = (
        costs_of(choice, 1, 4, machine=slow).seconds(AveragedParts(ELEMENTS), split=False).wire
        for choice in (AveragerChoice("sparse", options), AveragerChoice("sharded", {"fc_exchange": "never"}))
    )
    # m rho (b_v + b_i) / (2 b_v) of the dense bytes between m nodes.
    assert sparse == pytest.approx(share * dense, rel=0.02)


def test_averagers_whose_steps_are_not_alike_say_so() -> None:
    assert "averages all layers" in str(AveragerChoice("lazy").costs.note)
    assert "after the warm-up" in str(AveragerChoice("sparse", {"warmup_steps": 100}).costs.note)
    alike = [AveragerChoice("lazy", {"max_interval": 1}), AveragerChoice("sparse"), AveragerChoice("sharded")]
    assert [choice.costs.note for choice in alike] == [None, None, None]


OWN_STRATEGIES = """
from dataclasses import replace

from hpctrain.averaging.allreduce import AllreduceStrategy
from hpctrain.averaging.slicing import fused, whole_bytes


class Halves(AllreduceStrategy):
    def words(self):
        return "halves"

    def slices(self, link):
        return fused(self.group.layout, (self.group.layout.size + 1) // 2)


class Whole(Halves):
    @classmethod
    def costs(cls, options):
        return replace(super().costs(options), slice_bytes=whole_bytes, exposed_share=1.0)
"""


def test_a_strategy_of_a_users_own_has_a_price(tmp_path: Path) -> None:
    """By default that of its base; that of its method `costs`, where it has one."""
    file = tmp_path / "own_strategies.py"
    file.write_text(OWN_STRATEGIES)
    parts = AveragedParts(ELEMENTS, 1)
    prices = [
        (costs_of(choice, 1, 8).seconds(parts, split=False), choice.costs.step_seconds(3.0, 1.0))
        for choice in map(AveragerChoice, (f"{file}:Halves", "bucketed", f"{file}:Whole", "blocking"))
    ]
    assert prices[0] == prices[1] != prices[2] == prices[3]


SHAPE = (6, 8, 4, 5)
ITEM = 4


def _halo(ranks: int) -> Layout:
    boxes = []
    for start, stop in even_intervals(SHAPE[1], ranks):
        boxes.append(((0, 6), (start - 1, stop + 1), (0, 4), (0, 5)))
    return layout.needed(SHAPE, boxes)


LAYOUTS = {
    "samples": lambda ranks: layout.samples(SHAPE, [3, 2, 1, 0] if ranks == 4 else [4, 2]),
    "channels": lambda ranks: layout.channels(SHAPE, even_intervals(SHAPE[-1], ranks)),
    "tiles": lambda ranks: layout.tiles(SHAPE, (ranks, 1)),
    "everything": lambda ranks: layout.everything(SHAPE, ranks),
    "halo": _halo,
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("target", sorted(LAYOUTS))
@pytest.mark.parametrize("source", ["samples", "channels", "tiles"])
def test_what_is_packed_is_sent_and_what_arrives_is_unpacked(source: str, target: str, ranks: int) -> None:
    from_layout, to_layout = LAYOUTS[source](ranks), LAYOUTS[target](ranks)
    sent, returned = moved(from_layout, to_layout), moved_back(from_layout, to_layout)
    for rank in range(ranks):
        spec = RedistributeSpec(from_layout, to_layout, rank, "move", None)  # type: ignore[arg-type]
        operator = spec.operator((TensorSpec(shape_of(from_layout.boxes[rank])),), training=True)
        assert is_move(operator)
        common = intersect(from_layout.boxes[rank], to_layout.boxes[rank])
        local = 0 if common is None else size_of(common)
        there, back = move_traffic(operator, Action.FORWARD), move_traffic(operator, Action.INPUT, accumulate=True)
        assert there.packing == 2 * ITEM * sent[rank]
        assert back.packing == 2 * ITEM * returned[rank]
        keeps = 2 if operator.saved_bytes else 1
        assert there.unpacking == 2 * keeps * ITEM * returned[rank]
        assert back.unpacking == 3 * ITEM * sent[rank]
        assert back.copying == 3 * ITEM * local
        gaps = local + returned[rank] < operator.output.size
        assert there.copying == ITEM * (2 * local + gaps * operator.output.size)
        again = move_traffic(operator, Action.RECOMPUTE)
        assert (again.packing, again.copying, again.unpacking) == (0, there.copying, 2 * ITEM * returned[rank])
        assert move_traffic(operator, Action.BEGIN).total == move_traffic(operator, Action.FREE).total == 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sum_is_the_adjoint_of_a_move_to_everybody(ranks: int) -> None:
    owners, summands = LAYOUTS["channels"](ranks), LAYOUTS["everything"](ranks)
    for rank in range(ranks):
        move = RedistributeSpec(owners, summands, rank, "move", None)  # type: ignore[arg-type]
        total = ReduceScatterSpec(owners, summands, rank, "sum", None)  # type: ignore[arg-type]
        forth = move.operator((TensorSpec(shape_of(owners.boxes[rank])),), training=False)
        back = total.operator((TensorSpec(SHAPE),), training=False)
        assert move_traffic(back, Action.FORWARD) == move_traffic(forth, Action.INPUT)
        assert move_traffic(back, Action.INPUT) == move_traffic(forth, Action.FORWARD)


def counted(groups: list[list[int]], per_node: int) -> GroupPlacement:
    nodes = [Counter(rank // per_node for rank in group) for group in groups]
    alike = Counter(node for of_group in nodes for node in of_group)
    return GroupPlacement(len(groups[0]), max(map(len, nodes)), max(max(of.values()) for of in nodes), max(alike.values()))


@pytest.mark.parametrize(
    ("rows", "cols", "per_node"),
    [(1, 1, 4), (1, 8, 4), (2, 4, 4), (4, 4, 4), (8, 2, 4), (4, 2, 16), (2, 2, 1), (4, 3, 2), (2, 3, 3)],
)
def test_placements_are_those_of_the_ranks(rows: int, cols: int, per_node: int) -> None:
    placements = grid_placements(machine_of(ranks_per_node=per_node), rows, cols)
    assert placements.all_ranks == counted([list(range(rows * cols))], per_node)
    assert placements.split == counted([[c * rows + r for r in range(rows)] for c in range(cols)], per_node)
    assert placements.data == counted([[c * rows + r for c in range(cols)] for r in range(rows)], per_node)
