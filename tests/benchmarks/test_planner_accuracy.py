"""The sweep's choice of points, and means over ranks."""

from __future__ import annotations

import pytest

from benchmarks.planner_accuracy import chosen_points, parse, traced, without_needless_tables
from benchmarks.planner_accuracy_ranks import core_of, mean_over_ranks
from benchmarks.planner_points import POINTS, SHARED_MEMORY, TRACED


def test_all_points_are_swept_unless_some_are_asked_for() -> None:
    assert chosen_points(parse([])) == list(POINTS)
    chosen = chosen_points(parse(["--links", f"1gbit,{SHARED_MEMORY}", "--ranks", "4", "--networks", "resnet18"]))
    assert chosen
    assert all(point.link in ("1gbit", SHARED_MEMORY) and point.ranks == 4 and point.network == "resnet18" for point in chosen)
    assert chosen_points(parse(["--averagers", "priority", "--plans", "domain"])) == []


@pytest.mark.parametrize(("which", "count"), [("named", len(TRACED)), ("all", len(POINTS)), ("none", 0)])
def test_traces_are_of_three_points_unless_others_are_asked_for(which: str, count: int) -> None:
    assert sum(traced(which, point) for point in POINTS) == count


def test_ranks_are_averaged_turn_by_turn() -> None:
    first = {"a": [{"seconds": 1.0}, {"seconds": 2.0}], "b": [{"seconds": 4.0}]}
    second = {"a": [{"seconds": 3.0}, {"seconds": 4.0}], "b": [{"seconds": 0.0}]}
    assert mean_over_ranks([first, second]) == {"a": [{"seconds": 2.0}, {"seconds": 3.0}], "b": [{"seconds": 2.0}]}


def test_only_traced_points_keep_their_tables() -> None:
    predictions: dict[str, dict[str, object]] = {name: {"step_seconds": 1.0, "table": {}} for name in "ab"}
    without_needless_tables(predictions, {"b": {}})
    assert predictions == {"a": {"step_seconds": 1.0}, "b": {"step_seconds": 1.0, "table": {}}}


def test_neighbours_and_ranks_across_hosts_have_different_cores() -> None:
    assert [core_of(rank, 2) for rank in range(4)] == [0, 1, 1, 0]
