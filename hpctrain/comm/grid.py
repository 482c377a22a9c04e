"""The Pr x Pc grid of processes.

Rank (r, c) of a grid of Pr (`grid.rows`) by Pc (`grid.cols`) ranks belongs to two groups. The Pr ranks of equal c are a split
group: they share samples and exchange activations, on the critical path. The Pc ranks of equal r are a data group: they hold the
same weights and exchange gradients, which hide. So the ranks of a split group are neighbours: position = c * Pr + r, over the
ranks ordered by node, and a split group lies inside a node where Pr divides the node's ranks.
"""

from __future__ import annotations

from enum import StrEnum

from hpctrain.comm.base import Communicator
from hpctrain.comm.groups import node_numbers
from hpctrain.core.errors import ShapeError


class GridAxis(StrEnum):
    """The axis of the grid along which a group runs, and the name of the group's communicator.

    SPLIT: the Pr ranks of equal c, r = 0 .. Pr-1: they share samples and split layers (model, domain).
    DATA: the Pc ranks of equal r, c = 0 .. Pc-1: they hold the same weights and split the batch.
    """

    SPLIT = "split"
    DATA = "data"


class ProcessGrid:
    """This rank's place in the grid and its groups. Making it is collective, over all ranks of `world`.

    Attributes:
        row, col: this rank's r and c. node: the ranks of this rank's node. node_of: for each world rank, the number of its node,
            nodes counted by their lowest rank.

    Raises:
        ShapeError: `rows` times `cols` is not the world's size; on every rank alike, before any communication.
    """

    def __init__(self, world: Communicator, rows: int, cols: int) -> None:
        check_grid(rows, cols, world.size)
        self.world = world
        self.rows = rows
        self.cols = cols
        self.node = world.split_shared_memory("node")
        self.node_of = node_numbers(world, self.node)
        self.row, self.col = coordinates(self.node_of, rows)[world.rank]
        split = world.split(self.col, self.row, GridAxis.SPLIT.value)
        data = world.split(self.row, self.col, GridAxis.DATA.value)
        assert split is not None
        assert data is not None
        self._along = {GridAxis.SPLIT: split, GridAxis.DATA: data}

    def along(self, axis: GridAxis) -> Communicator:
        """This rank's group along an axis; its rank in it is r (SPLIT) or c (DATA)."""
        return self._along[axis]


def check_grid(rows: int, cols: int, size: int) -> None:
    """Refuse a grid that does not multiply to `size` ranks.

    Raises:
        ShapeError: the message gives the nearest legal grid.
    """
    if rows >= 1 and cols >= 1 and rows * cols == size:
        return
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    nearest = min(divisors, key=lambda n: (abs(n - rows), n))
    raise ShapeError(
        f"A grid of {rows} x {cols} has {rows * cols} places, the world has {size} ranks; grid.rows * grid.cols must be {size}, "
        f"the nearest legal grid is {nearest} x {size // nearest}."
    )


def coordinates(node_of: tuple[int, ...], rows: int) -> list[tuple[int, int]]:
    """(r, c) of each world rank: split group after split group of `rows` ranks, over the ranks ordered by (node, rank).

    World rank c * rows + r is (r, c) where nodes hold consecutive ranks; rank 0 is always (0, 0).
    """
    order = sorted(range(len(node_of)), key=lambda rank: (node_of[rank], rank))
    by_rank = [(0, 0)] * len(order)
    for position, rank in enumerate(order):
        by_rank[rank] = (position % rows, position // rows)
    return by_rank
