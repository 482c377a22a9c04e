"""A candidate and its ranks."""

import pytest

from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.planner.job import Candidate


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (1, 8192), (3, 5)])
def test_ranks_are_those_of_the_grid(rows: int, cols: int) -> None:
    assert Candidate(ParallelPlan(rows, cols)).ranks == rows * cols
