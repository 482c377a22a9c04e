"""The places of a grid's groups on nodes that hold consecutive ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from hpctrain.planner.machine import Machine
from hpctrain.planner.tasks import GroupPlacement


def all_ranks(machine: Machine, ranks: int) -> GroupPlacement:
    """The placement of all ranks of a job."""
    return GroupPlacement(ranks, machine.nodes_of(ranks), min(ranks, machine.ranks_per_node))


def split_groups(machine: Machine, rows: int, cols: int) -> GroupPlacement:
    """The placement of the split groups, whose ranks are neighbours: the one that is spread most stands for all."""
    return _placement(machine, [range(column * rows, (column + 1) * rows) for column in range(cols)])


def data_groups(machine: Machine, rows: int, cols: int) -> GroupPlacement:
    """The placement of the data groups, one for each rank of a split group: the one that is spread most stands for all."""
    return _placement(machine, [range(row, rows * cols, rows) for row in range(rows)])


def _placement(machine: Machine, groups: Sequence[Iterable[int]]) -> GroupPlacement:
    """The placement of groups alike, of which each rank is in one."""
    alike: Counter[int] = Counter()
    ranks = nodes = most = 0
    for members in groups:
        on_node = Counter(position // machine.ranks_per_node for position in members)
        alike.update(on_node.keys())
        ranks, nodes, most = sum(on_node.values()), max(nodes, len(on_node)), max(most, *on_node.values())
    return GroupPlacement(ranks, nodes, most, max(alike.values()))
