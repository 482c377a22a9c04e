"""Placements of groups are those that counting ranks by node gives."""

import pytest

from hpctrain.planner import placements
from hpctrain.planner.tasks import GroupPlacement
from tests.support.planned import machine


@pytest.mark.parametrize(
    ("per_node", "rows", "cols", "split", "data"),
    [
        (4, 2, 4, GroupPlacement(2, 1, 2, 2), GroupPlacement(4, 2, 2, 2)),  # split groups inside of nodes
        (2, 4, 3, GroupPlacement(4, 2, 2, 1), GroupPlacement(3, 3, 1, 2)),  # a split group takes two nodes
        (3, 2, 3, GroupPlacement(2, 2, 2, 2), GroupPlacement(3, 2, 2, 2)),  # ... one of them lies across two
        (8, 1, 8, GroupPlacement(1, 1, 1, 8), GroupPlacement(8, 1, 8, 1)),  # one node
        (1, 1, 8, GroupPlacement(1, 1, 1, 1), GroupPlacement(8, 8, 1, 1)),  # a rank on each
    ],
)
def test_groups_lie_where_consecutive_ranks_fill_nodes(
    per_node: int, rows: int, cols: int, split: GroupPlacement, data: GroupPlacement
) -> None:
    assert placements.split_groups(machine(per_node), rows, cols) == split
    assert placements.data_groups(machine(per_node), rows, cols) == data


@pytest.mark.parametrize(("ranks", "nodes", "most"), [(1, 1, 1), (3, 1, 3), (4, 1, 4), (5, 2, 4), (8192, 2048, 4)])
def test_all_ranks_fill_nodes(ranks: int, nodes: int, most: int) -> None:
    assert placements.all_ranks(machine(4), ranks) == GroupPlacement(ranks, nodes, most)
