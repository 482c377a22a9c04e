"""Points become configurations with their grid, plan and averager."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.planner_jobs import configuration, image_shape, made_up_batch, planned_run
from benchmarks.planner_points import AVERAGERS, NETWORKS, POINTS, Point
from hpctrain.data.loader import Place


@pytest.mark.parametrize("averager", AVERAGERS)
def test_configurations_have_what_the_point_says(averager: str) -> None:
    for point in (one for one in POINTS if one.averager == averager):
        config = configuration(point)
        assert (config.grid.rows, config.grid.cols) == (point.rows, point.cols)
        assert (config.plan.default, config.plan.patterns) == (point.default, point.use)
        assert (config.averager.name, config.averager.options) == AVERAGERS[averager]
        assert config.batch == NETWORKS[point.network].batch
        assert configuration(point, trace=True).trace


def test_a_planned_run_needs_no_data() -> None:
    point = next(one for one in POINTS if one.plan == "mixed" and one.ranks == 4)
    task = planned_run(point)
    assert (task.plan.rows, task.plan.cols) == (2, 2)
    assert task.image_shape == image_shape(point)
    assert sum(task.counts) == NETWORKS[point.network].batch


def test_ranks_share_the_same_made_up_images() -> None:
    point = Point("resnet20", "1gbit", 2, 1, "batch", "sharded")
    places: list[Place] = [{"rank": rank, "ranks": 2, "split_size": 1, "tiles": None, "shards": None} for rank in range(2)]
    batches = [made_up_batch(point, place) for place in places]
    count = NETWORKS["resnet20"].batch
    assert [len(batch.x) for batch in batches] == [count // 2, count // 2]
    assert not np.array_equal(batches[0].x, batches[1].x)
    assert batches[0].global_count == count
