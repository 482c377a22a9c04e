"""Simulated scaling: efficiency as `bench scaling` defines it, the trace as a viewer reads it, curves that are labelled."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from hpctrain.experiment.simulated_scaling import SimulatedPoint, by_averager, plot, write_trace
from tests.support import predictions


def points(averager: str = "sharded", seconds: tuple[float, ...] = (0.5, 0.6, 0.9), batch: int = 32) -> list[SimulatedPoint]:
    """Weak scaling over 1, 2 and 4 ranks."""
    return [
        SimulatedPoint(averager, 2**k, batch * 2**k, (1, 2**k), predictions.prediction(value, 0.1 * k))
        for k, value in enumerate(seconds)
    ]


def test_efficiency_is_that_of_bench_scaling() -> None:
    weak = points()
    assert [point.efficiency(weak[0]) for point in weak] == pytest.approx([1.0, 0.5 / 0.6, 0.5 / 0.9])
    strong = [
        SimulatedPoint("a", ranks, 64, (1, ranks), predictions.prediction(seconds)) for ranks, seconds in ((2, 0.4), (8, 0.2))
    ]
    assert strong[1].efficiency(strong[0]) == pytest.approx(2 * 0.4 / (8 * 0.2))


def test_facts_are_plain_and_whole() -> None:
    base, point = points()[:2]
    facts = json.loads(json.dumps(point.facts(base)))
    assert facts["efficiency"] == pytest.approx(0.5 / 0.6)
    assert facts["images_per_second"] == pytest.approx(64 / 0.6)
    assert (facts["ranks"], facts["grid"], facts["exposed_seconds"]) == (2, [1, 2], pytest.approx(0.1))


def test_points_stay_with_their_averager_in_order() -> None:
    lines = by_averager([*points("priority"), *points("blocking")])
    assert list(lines) == ["priority", "blocking"]
    assert [point.ranks for point in lines["blocking"]] == [1, 2, 4]


def test_the_trace_begins_at_0_and_says_that_it_is_simulated(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.json", points()[-1], "simulated: small on a machine")
    content = json.loads(path.read_text())
    assert content["otherData"] == {
        "simulated": True,
        "title": "simulated: small on a machine",
        "averager": "sharded",
        "ranks": 4,
    }
    names = [event["args"]["name"] for event in content["traceEvents"] if event["name"] == "process_name"]
    assert names == ["simulated: first split rank", "simulated: second split rank"]
    times = [event["ts"] for event in content["traceEvents"] if event["ph"] != "M"]
    assert min(times) == 0.0
    assert max(times) == pytest.approx(4001.0)


def test_curves_are_a_picture_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = plot(tmp_path / "curves.png", [*points(), *points("blocking", (0.5, 0.8, 1.4))], "simulated: small")
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true_import = builtins.__import__

    def without(name: str, *rest: Any, **keywords: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return true_import(name, *rest, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    assert plot(tmp_path / "curves.png", points(), "simulated: small") is None
    assert not list(tmp_path.iterdir())
