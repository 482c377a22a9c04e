"""The planner's points are as many and as varied as its bars ask for, and each one is a job that trains."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.planner_points import AVERAGERS, NETWORKS, POINTS, TRACED, Point, machines_of_points
from hpctrain.backend.kernels.graph import GraphBuilder
from hpctrain.backend.kernels.specs import TensorSpec
from hpctrain.models import catalogue
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.parallel.partition_graph import partition_graph


def test_there_are_enough_points_and_enough_named_ones() -> None:
    assert len(POINTS) >= 40
    assert sum(point.named for point in POINTS) >= 12
    assert len({point.name for point in POINTS}) == len(POINTS)
    assert set(TRACED) <= {point.name for point in POINTS}


def test_all_networks_links_grids_and_averagers_have_points_and_named_ones() -> None:
    for points in (POINTS, [point for point in POINTS if point.named]):
        assert {point.network for point in points} == set(NETWORKS)
        assert {point.averager for point in points} == set(AVERAGERS)
        assert len({point.link for point in points}) == 4
        assert {(point.rows, point.cols) for point in points} == {(1, 2), (2, 1), (1, 4), (2, 2)}
        assert {point.plan for point in points} == {"batch", "domain", "model", "head", "mixed"}


def test_six_jobs_and_more_have_candidates_to_choose_among() -> None:
    assert sum(count >= 3 for count in Counter(point.job for point in POINTS).values()) >= 6
    assert {(point.link, point.ranks) for point in POINTS} == set(machines_of_points())


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name.replace(" ", "_"))
def test_every_point_is_a_plan_of_its_network(point: Point) -> None:
    network = NETWORKS[point.network]
    builder = GraphBuilder(TensorSpec((1, network.pixels, network.pixels, 3), "float32"))
    options = {**network.options, "classes": network.classes}
    graph = builder.build(catalogue.build(network.model, options).lower(builder, 0, ""))
    plan = ParallelPlan(point.rows, point.cols, point.default, point.use)  # type: ignore[arg-type]
    plan.check([node.name for node in graph.nodes])
    if point.rows > 1:
        assert partition_graph(graph, plan, (1, *(0,) * (point.rows - 1))).steps
    assert network.batch % point.ranks == 0
