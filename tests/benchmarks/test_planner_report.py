"""The report on predictions: accuracies, picks and traces from rounds and tables."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.planner_points import POINTS, Point
from benchmarks.planner_report import compared, picks, report, traces

_JOB = [point for point in POINTS if point.job == ("resnet50", "2gbit", 2)]


def _turns(*seconds: float) -> list[dict[str, float]]:
    return [{"step_seconds": one, "waited_seconds": one / 10, "cpu_seconds": one} for one in seconds]


def _prediction(seconds: float, exposed: dict[str, float] | None = None) -> dict[str, Any]:
    rows = [{"name": name, "exposed_seconds": value} for name, value in (exposed or {}).items()]
    return {"step_seconds": seconds, "exposed_seconds": seconds / 20, "table": {"rows": rows}}


def _result(predicted: dict[Point, float], measured: dict[Point, tuple[float, ...]]) -> dict[str, Any]:
    run = {
        "predictions": {point.name: _prediction(seconds) for point, seconds in predicted.items()},
        "rounds": {point.name: _turns(*seconds) for point, seconds in measured.items()},
        "traces": {},
    }
    return {"runs": [run]}


def test_accuracy_is_that_of_the_less_disturbed_turns_at_the_speed_that_cores_had() -> None:
    first, second, *_ = _JOB
    result = _result({first: 0.9, second: 3.0}, {first: (1.5, 2.0, 1.0), second: (2.0, 2.0, 2.0)})
    result["runs"][0]["at_speed"] = {
        first.name: {"slowed": [[1.0, 1.6], [1.0, 1.1], [1.0, 1.0]], "step_seconds": [9.0, 1.6, 1.0]}
    }
    rows = compared(result)
    assert [row.point for row in rows] == [first, second]
    assert [row.accuracy for row in rows] == pytest.approx([0.9, 0.5])
    assert rows[0].measured_seconds == pytest.approx(1.0)
    assert rows[0].measured_waited_seconds == pytest.approx(0.1)
    assert (rows[0].least_seconds, rows[0].median_seconds, rows[0].slowed) == (1.0, 1.5, 1.1)
    assert rows[1].slowed == 1


def test_points_without_a_prediction_or_a_measurement_are_left_out() -> None:
    first, second, third, *_ = _JOB
    rows = compared(_result({first: 1.0, third: 1.0}, {first: (1.0,), second: (1.0,)}))
    assert [row.point for row in rows] == [first]


def test_a_pick_is_the_lowest_prediction_and_is_judged_by_its_measured_time() -> None:
    first, second, third, *_ = _JOB
    measured = {first: (1.0,), second: (1.04,), third: (2.0,)}
    (near,) = picks(compared(_result({first: 0.8, second: 0.7, third: 0.9}, measured)))
    assert (near.picked.point, near.best.point, near.candidates) == (second, first, 3)
    assert near.ratio == pytest.approx(1.04)
    assert near.good
    (far,) = picks(compared(_result({first: 0.8, second: 0.9, third: 0.7}, measured)))
    assert far.ratio == pytest.approx(2.0)
    assert not far.good


def test_jobs_pick_among_their_own_candidates() -> None:
    others = [point for point in POINTS if point.job == ("resnet20", "1gbit", 2)]
    points = [*_JOB, *others]
    result = _result(dict.fromkeys(points, 1.0), dict.fromkeys(points, (1.0,)))
    assert [pick.candidates for pick in picks(compared(result))] == [len(others), len(_JOB)]  # in the order of the list


def test_traces_compare_exposed_seconds_row_by_row() -> None:
    name = _JOB[0].name
    result = _result({_JOB[0]: 1.0}, {_JOB[0]: (1.0,)})
    run = result["runs"][0]
    run["predictions"][name] = _prediction(1.0, {"fc": 0.1, "conv1": 0.3, "norm": 0.0})
    rows = [{"name": row, "exposed_seconds": value} for row, value in (("fc", 0.2), ("layer1", 0.1), ("bn", 0.0))]
    run["traces"] = {name: {"step_seconds": 2.0, "rows": rows}}
    (comparison,) = traces(result)
    assert {row[0] for row in comparison.rows} == {"fc", "conv1", "layer1"}
    assert comparison.largest == ("conv1", pytest.approx(0.15))
    assert comparison.summed == pytest.approx((0.1 + 0.3 + 0.1) / 2)
    assert comparison.total == pytest.approx((0.4 - 0.3) / 2)
    text = report(result)
    assert "| conv1 | 0.3000 | 0.0000 |" in text


def test_the_report_tells_named_points_by_themselves() -> None:
    named = next(point for point in _JOB if point.named)
    other = next(point for point in _JOB if not point.named)
    text = report(_result({named: 1.0, other: 0.5}, {named: (1.0, 1.0, 1.0), other: (1.0, 1.0, 1.0)}))
    assert "2 points: accuracy 75.0% on average" in text
    assert "1 points: accuracy 100.0% on average" in text
    assert "1 below 80%" in text


def test_a_run_without_predictions_is_a_table_of_medians() -> None:
    text = report(_result({}, {_JOB[0]: (1.0, 3.0, 2.0)}))
    assert f"| {_JOB[0].name} | 2.000 | 0.200 | 2.000 |" in text
