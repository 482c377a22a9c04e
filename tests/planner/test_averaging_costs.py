"""Averaging costs: against the collectives' own costs, the rule of the exchange, and what hides."""

import pytest

from hpctrain.averaging.collective_schedule import OperationKind
from hpctrain.planner.averaging_costs import AveragedParts, AveragerChoice, AveragingCosts, LinearSize
from hpctrain.planner.collective_costs import stages, unhindered_seconds
from hpctrain.planner.grid_placements import grid_placements
from hpctrain.planner.machine import Machine
from hpctrain.planner.rate_costs import RateCosts
from tests.support.planner_jobs import NoCompute, machine_of

MACHINE = machine_of(alpha_seconds=2e-6)
ELEMENTS = 1 << 20


def costs_of(choice: AveragerChoice, rows: int, cols: int, batch: int = 64, machine: Machine = MACHINE) -> AveragingCosts:
    placements = grid_placements(machine, rows, cols)
    return AveragingCosts(
        machine, NoCompute(), placements, choice, total_bytes=4 * ELEMENTS, batch=batch, item_bytes=4, exchange=True
    )


def test_blocking_takes_one_allreduce_of_everything() -> None:
    seconds = costs_of(AveragerChoice("blocking"), 1, 8).seconds(AveragedParts(ELEMENTS, 1), split=False)
    placement = grid_placements(MACHINE, 1, 8).all_ranks
    expected = unhindered_seconds(stages(MACHINE, OperationKind.ALLREDUCE, 4 * ELEMENTS, placement))
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
    placements = grid_placements(MACHINE, 1, 8)
    seconds = {
        name: AveragingCosts(
            MACHINE,
            RateCosts(MACHINE),
            placements,
            AveragerChoice(name),
            total_bytes=4 * ELEMENTS,
            batch=8,
            item_bytes=4,
            exchange=False,
        )
        .seconds(AveragedParts(ELEMENTS), split=False)
        .program
        for name in ("sharded", "bucketed")
    }
    assert seconds["bucketed"] == pytest.approx(8 * seconds["sharded"])


def test_a_step_is_no_shorter_than_what_cannot_hide() -> None:
    for program, wire in ((3.0, 1.0), (3.0, 2.9), (3.0, 10.0)):
        sharded, bucketed, blocking = (
            AveragerChoice(name).step_seconds(program, wire) for name in ("sharded", "bucketed", "blocking")
        )
        assert max(program, wire) == sharded <= bucketed <= blocking == program + wire
    for name in ("sharded", "bucketed", "blocking"):
        choice = AveragerChoice(name)
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
    assert "averages all layers" in str(AveragerChoice("lazy").note)
    assert "warmed up" in str(AveragerChoice("sparse", {"warmup_steps": 100}).note)
    alike = [AveragerChoice("lazy", {"max_interval": 1}), AveragerChoice("sparse"), AveragerChoice("sharded")]
    assert [choice.note for choice in alike] == [None, None, None]
