"""The grids that are looked at, and what is fixed."""

import pytest

from hpctrain.errors import ConfigError
from hpctrain.planner.averaging_costs import AveragerChoice
from hpctrain.planner.search_space import AVERAGERS, SearchSpace, grid_shapes
from tests.support.nets import narrow
from tests.support.planner_jobs import job_of

GRAPH = job_of("resnet20", (32, 32, 3), 4).graph_of(1)


def test_grids_are_all_divisors_that_leave_every_split_group_a_sample() -> None:
    assert grid_shapes(SearchSpace(), GRAPH, 12, 64) == ((1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1))
    assert grid_shapes(SearchSpace(), GRAPH, 12, 4) == ((3, 4), (4, 3), (6, 2), (12, 1))


def test_no_layer_is_split_into_more_parts_than_it_has() -> None:
    assert [rows for rows, _ in grid_shapes(SearchSpace(), GRAPH, 128, 999)] == [1, 2, 4, 8, 16, 32, 64]


def test_ranks_that_no_grid_serves_are_refused_with_the_nearest_number() -> None:
    graph = job_of(narrow(), (5, 5, 3), 4).graph_of(1)
    with pytest.raises(ConfigError) as caught:
        grid_shapes(SearchSpace(), graph, 23, 4)
    assert "batch is 4, fewer samples than the 23 ranks" in str(caught.value)
    assert "the nearest number of ranks that has a grid is 20." in str(caught.value)
    assert "\n" not in str(caught.value)
    assert grid_shapes(SearchSpace(), graph, 20, 4)


def test_nothing_is_proposed_that_changes_the_optimisation() -> None:
    assert not {choice.name for choice in AVERAGERS} & {"lazy", "sparse"}
    assert not {option for choice in AVERAGERS for option in choice.options} & {"wire", "wire_parameters"}
    named = AveragerChoice("sharded", {"wire": "bfloat16"})
    assert SearchSpace(fixed_averager=named).averager_choices == (named,)
