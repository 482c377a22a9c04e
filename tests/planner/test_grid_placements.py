"""Placements of a grid's groups are those of consecutive ranks on nodes."""

from collections import Counter

import pytest

from hpctrain.planner.grid_placements import grid_placements
from hpctrain.planner.tasks import GroupPlacement
from tests.support.planner_jobs import machine_of


def counted(groups: list[list[int]], per_node: int) -> GroupPlacement:
    nodes = [Counter(rank // per_node for rank in group) for group in groups]
    alike = Counter(node for of_group in nodes for node in of_group)
    return GroupPlacement(len(groups[0]), max(map(len, nodes)), max(max(of.values()) for of in nodes), max(alike.values()))


@pytest.mark.parametrize(
    ("rows", "cols", "per_node"), [(1, 1, 4), (1, 8, 4), (2, 4, 4), (4, 4, 4), (8, 2, 4), (4, 2, 16), (2, 2, 1), (4, 3, 2), (2, 3, 3)]
)
def test_placements_are_those_of_the_ranks(rows: int, cols: int, per_node: int) -> None:
    placements = grid_placements(machine_of(ranks_per_node=per_node), rows, cols)
    assert placements.all_ranks == counted([list(range(rows * cols))], per_node)
    assert placements.split == counted([[c * rows + r for r in range(rows)] for c in range(cols)], per_node)
    assert placements.data == counted([[c * rows + r for c in range(cols)] for r in range(rows)], per_node)
