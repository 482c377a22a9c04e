"""The grid over ranks: its groups share samples or weights, and every rank is in one of each."""

import numpy as np
import pytest

from hpctrain.comm.base import Communicator
from hpctrain.comm.grid import GridAxis, ProcessGrid
from hpctrain.comm.progress import ProgressEngine
from hpctrain.errors import ShapeError


def _sum(progress: ProgressEngine, comm: Communicator, value: float) -> float:
    buffer = np.array([value])
    progress.wait(progress.queue(comm).post(lambda: comm.iallreduce(buffer), "test"))
    return float(buffer[0])


@pytest.mark.parallel([1, 2, 3, 4])
def test_every_rank_is_in_a_split_group_and_a_data_group(world: Communicator, progress: ProgressEngine) -> None:
    for rows in (n for n in range(1, world.size + 1) if world.size % n == 0):
        cols = world.size // rows
        grid = ProcessGrid(world, rows, cols)
        assert world.rank == grid.col * rows + grid.row  # one node: split group after split group
        split, data = grid.along(GridAxis.SPLIT), grid.along(GridAxis.DATA)
        assert (split.size, split.rank, data.size, data.rank) == (rows, grid.row, cols, grid.col)
        sums = _sum(progress, split, 10.0**grid.row), _sum(progress, data, 10.0**grid.col)
        assert sums[0] == sum(10.0**r for r in range(rows))
        assert sums[1] == sum(10.0**c for c in range(cols))


@pytest.mark.parallel([2, 3, 4])
def test_a_wrong_grid_is_refused_on_every_rank(world: Communicator) -> None:
    with pytest.raises(ShapeError, match=f"nearest legal grid is 1 x {world.size}"):
        ProcessGrid(world, 1, world.size + 1)
