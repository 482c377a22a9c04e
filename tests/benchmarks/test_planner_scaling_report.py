"""Speed-ups and tables of the simulated scaling study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.planner_scaling_report import markdown, plot, speedups


def _curve(network: str, scaling: str, series: str, points: list[tuple[int, int, float]]) -> dict[str, Any]:
    names = ("cores", "batch", "step_seconds")
    return {
        "network": network,
        "scaling": scaling,
        "series": series,
        "points": [dict(zip(names, point, strict=True)) for point in points],
    }


def _result() -> dict[str, Any]:
    strong = [(1, 256, 100.0), (32, 256, 4.0), (8192, 256, 0.05)]
    weak = [(1, 1, 1.0), (32, 32, 1.0), (8192, 8192, 2.0)]
    sensitivity = {"network": "VGG-16", "series": "sharded", "cores": 8192, "speedup": 2000.0, "numbers": {"rate": [1500, 2200]}}
    curves = [_curve("VGG-16", scaling, "sharded", points) for scaling, points in (("strong", strong), ("weak", weak))]
    return {"curves": curves, "sensitivity": [sensitivity]}


def test_speedups_are_of_samples_a_second() -> None:
    strong, weak = _result()["curves"]
    assert speedups(strong) == pytest.approx({1: 1.0, 32: 25.0, 8192: 2000.0})
    assert speedups(weak) == pytest.approx({1: 1.0, 32: 32.0, 8192: 4096.0})


def test_a_curve_that_begins_above_one_core_counts_from_there_as_if_it_had_scaled() -> None:
    curve = _curve("VGG-16", "strong", "sharded", [(32, 256, 4.0), (64, 256, 2.5)])
    assert speedups(curve) == pytest.approx({32: 32.0, 64: 51.2})


def test_every_table_says_that_it_is_simulated() -> None:
    text = markdown(_result())
    titles = [line for line in text.splitlines() if line and not line.startswith(("|", "Lee"))]
    assert len(titles) == 3
    assert all(title.startswith("Simulated ") for title in titles)
    assert "2516x on 8192 cores" in text
    assert "| rate | 1500 (-25.0%) | 2200 (+10.0%) |" in text


def test_the_plot_has_a_panel_for_each_scaling(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(_result(), tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").stat().st_size > 1000
