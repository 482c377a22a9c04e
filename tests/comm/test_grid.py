"""The grid without ranks: legal shapes and placement."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm.grid import GridAxis, ProcessGrid, check_grid, coordinates
from hpctrain.comm.single import SingleCommunicator
from hpctrain.errors import ShapeError


@given(st.integers(1, 12), st.integers(1, 12), st.randoms(use_true_random=False))
def test_every_place_is_taken_once(rows: int, cols: int, chance) -> None:
    node_of = tuple(chance.randrange(4) for _ in range(rows * cols))
    places = coordinates(node_of, rows)
    assert sorted(places) == [(r, c) for r in range(rows) for c in range(cols)]


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_a_split_group_lies_inside_a_node_where_ranks_divide(rows: int, groups_per_node: int, nodes: int, cyclic: bool) -> None:
    ranks = rows * groups_per_node * nodes
    node_of = tuple(rank % nodes if cyclic else rank // (rows * groups_per_node) for rank in range(ranks))
    places = coordinates(node_of, rows)
    for c in range(groups_per_node * nodes):
        assert len({node_of[rank] for rank in range(ranks) if places[rank][1] == c}) == 1
    assert places[0] == (0, 0)
    if not cyclic:
        assert places == [(rank % rows, rank // rows) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("rows", "cols", "size", "nearest"),
    [(2, 2, 3, "1 x 3"), (4, 4, 6, "3 x 2"), (1, 4, 5, "1 x 5"), (0, 7, 7, "1 x 7"), (-2, -2, 4, "1 x 4"), (5, 1, 8, "4 x 2")],
)
def test_a_grid_that_does_not_fit_is_refused_with_the_nearest(rows: int, cols: int, size: int, nearest: str) -> None:
    with pytest.raises(ShapeError, match=f"{rows} x {cols} .*{size} ranks.* nearest legal grid is {nearest}"):
        check_grid(rows, cols, size)


@given(st.integers(1, 40), st.integers(1, 40))
def test_grids_that_multiply_are_legal(rows: int, cols: int) -> None:
    check_grid(rows, cols, rows * cols)


def test_one_process_is_a_grid() -> None:
    grid = ProcessGrid(SingleCommunicator(), 1, 1)
    assert (grid.row, grid.col, grid.node_of) == (0, 0, (0,))
    assert [grid.along(axis).name for axis in GridAxis] == ["split", "data"]
    assert [grid.along(axis).size for axis in GridAxis] == [1, 1]
    with pytest.raises(ShapeError):
        ProcessGrid(SingleCommunicator(), 1, 2)
