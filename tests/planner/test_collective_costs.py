"""Costs of collectives: against the one-link model, against bytes counted elsewhere, and laws."""

from dataclasses import replace

import pytest

from hpctrain.averaging.collective_schedule import CollectiveSchedule, Operation, OperationKind, Stream
from hpctrain.averaging.slices import Slice
from hpctrain.comm.link import LinkModel
from hpctrain.comm.two_level import Levels, levels
from hpctrain.planner.collective_costs import Kind, Stage, stages, unhindered_seconds
from hpctrain.planner.machine import Link, LinkSegment, Machine
from hpctrain.planner.tasks import GroupPlacement

ALPHA, BETA = 3e-6, 1 / 5e9
LONG = 1 << 20
ONE_LINK = LinkModel(ALPHA, BETA)
KINDS: tuple[Kind, ...] = (*OperationKind, "exchange", "merge", "message")


def machine(ranks_per_node: int = 1, ranks_per_card: int = 1, within: Link | None = None, between: Link | None = None) -> Machine:
    plain = Link((LinkSegment(0, ALPHA, BETA),))
    return Machine(
        "test",
        64,
        ranks_per_node,
        1.0,
        1 << 30,
        within or plain,
        between or plain,
        ranks_per_card,
        {},
        sources={"all": "made up"},
    )


def wire_bytes(found: tuple[Stage, ...]) -> float:
    return sum(stage.wire_bytes for stage in found)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 32])
@pytest.mark.parametrize("nodes", ["one", "each"])
def test_long_messages_on_one_level_cost_what_the_one_link_model_says(ranks: int, nodes: str) -> None:
    placement = GroupPlacement(ranks, 1, ranks) if nodes == "one" else GroupPlacement(ranks, ranks, 1)
    host = machine(ranks_per_node=ranks if nodes == "one" else 1)
    for kind, expected in [
        (OperationKind.REDUCE_SCATTER, ONE_LINK.reduce_scatter_seconds(LONG, ranks)),
        (OperationKind.ALLGATHER, ONE_LINK.allgather_seconds(LONG, ranks)),
        (OperationKind.INPUTS, ONE_LINK.alltoall_seconds(LONG, ranks)),
    ]:
        assert unhindered_seconds(stages(host, kind, LONG, placement)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("ranks", [2, 4, 16, 128])
@pytest.mark.parametrize("n_bytes", [1 << 14, 1 << 22])
def test_bytes_are_those_that_the_schedule_counts(ranks: int, n_bytes: int) -> None:
    piece = Slice("s", 0, n_bytes // 4, 0, ("p",))
    kinds = (OperationKind.REDUCE_SCATTER, OperationKind.ALLGATHER, OperationKind.ALLREDUCE)
    schedule = CollectiveSchedule("r", ranks, (piece,), tuple(Operation(kind, 0, Stream.GRADIENTS) for kind in kinds))
    counted = schedule.exchanged(0, [1] * ranks)
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


def test_messages_are_priced_by_the_segment_of_their_own_size() -> None:
    link = Link((LinkSegment(0, 1e-6, 1e-9), LinkSegment(1000, 5e-6, 1e-10)))
    host = machine(between=link)
    (stage,) = stages(
        host, OperationKind.ALLGATHER, 4000, GroupPlacement(4, 4, 1)
    )  # 1000 to the neighbour, 2000 to the farther one
    assert stage.seconds == pytest.approx(10e-6 + 3000e-10)
    (short,) = stages(host, OperationKind.ALLGATHER, 3000, GroupPlacement(4, 4, 1))
    assert short.seconds == pytest.approx(6e-6 + 750e-9 + 1500e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "placement", [GroupPlacement(8, 1, 8), GroupPlacement(8, 8, 1), GroupPlacement(12, 3, 4, 2), GroupPlacement(8192, 256, 32)]
)
def test_more_bytes_never_cost_less(kind: Kind, placement: GroupPlacement) -> None:
    host = machine(32, 32)
    large = [unhindered_seconds(stages(host, kind, n_bytes, placement)) for n_bytes in (LONG, 2 * LONG, 64 * LONG)]
    assert large == sorted(large)
    assert large[0] > 0


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
