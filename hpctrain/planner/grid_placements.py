"""The places of all groups of a grid on a machine."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.planner import placements
from hpctrain.planner.machine import Machine
from hpctrain.planner.tasks import GroupPlacement


@dataclass(frozen=True)
class GridPlacements:
    """all_ranks: of the whole grid. split: of the Pr ranks that share samples. data: of the Pc ranks with the same weights."""

    all_ranks: GroupPlacement
    split: GroupPlacement
    data: GroupPlacement


def grid_placements(machine: Machine, rows: int, cols: int) -> GridPlacements:
    """The placements of a grid of Pr x Pc."""
    return GridPlacements(
        placements.all_ranks(machine, rows * cols),
        placements.split_groups(machine, rows, cols),
        placements.data_groups(machine, rows, cols),
    )
