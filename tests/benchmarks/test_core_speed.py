"""How many times a core was slowed follows from yardsticks beside turns."""

from __future__ import annotations

import pytest

from benchmarks.core_speed import Yardstick, slowed, slowed_ranks
from benchmarks.planner_points import POINTS


def _turn(seconds: float, least: float) -> dict[str, float]:
    return {"yardstick_seconds": seconds, "yardstick_least_seconds": least}


def test_yardsticks_are_compared_with_the_least_of_their_network() -> None:
    turns = {"a": [_turn(2.0, 1.5), _turn(1.0, 1.0)], "b": [_turn(3.0, 3.0)], "c": [_turn(6.0, 4.0)]}
    of_rank = slowed(turns, {"a": "vgg16", "b": "vgg16", "c": "resnet20"})
    assert of_rank == {"a": pytest.approx([2.0, 1.0]), "b": pytest.approx([3.0]), "c": pytest.approx([1.5])}


def test_a_turn_has_the_slowness_of_each_rank() -> None:
    assert slowed_ranks([{"a": [1.0, 1.5]}, {"a": [1.2, 1.0]}], "a") == [{0: 1.0, 1: 1.2}, {0: 1.5, 1: 1.0}]


@pytest.mark.slow
def test_a_yardstick_is_a_step_of_the_network_without_other_ranks() -> None:
    point = next(point for point in POINTS if point.network == "resnet20")
    assert Yardstick(point).seconds() > 0
