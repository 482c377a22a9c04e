"""Tables and plots of the papers' comparisons: ratios of pairs, and empty cells for what was not measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper_overlap_report import Run, markdown, plot, speed, step
from benchmarks.slow_links_cases import ALONE


def _run(model: str, rate: str, **seconds: tuple[float, ...]) -> Run:
    rounds: dict[str, Any] = {name: [{"step_seconds": one} for one in column] for name, column in seconds.items()}
    rounds[ALONE] = [{"step_seconds": 1.0}, {"step_seconds": 1.0}]
    facts = {"ranks": 2, "link_bytes_per_second": 125e6}
    return model, rate, {"rounds": rounds, "facts": facts, "machine": {"date": "then"}, "refused": {"new": "No."}}


RUNS = [
    _run("vgg16", "1gbit", slow=(4.0, 8.0), fast=(2.0, 4.0)),
    _run("vgg16", "2gbit", slow=(3.0, 3.0)),
    _run("resnet18", "1gbit", slow=(2.0, 2.0), fast=(1.0, 1.0), gone=()),
]


def test_speed_is_of_steps_of_the_same_round() -> None:
    value = speed(RUNS[0][2], "fast", "slow")
    assert value is not None
    assert (value.median, value.low, value.high) == (2.0, 2.0, 2.0)
    assert speed(RUNS[1][2], "fast", "slow") is None
    assert step(RUNS[1][2], "fast") is None


def test_a_network_has_a_table_with_two_columns_for_each_rate() -> None:
    first, second = markdown("slow", RUNS).split("resnet18 (")
    assert "| variant | 1gbit: step, s | over slow | 2gbit: step, s | over slow |" in first
    assert "| slow | 6.000 [4.000, 8.000] |  | 3.000 [3.000, 3.000] |  |" in first
    assert "| fast | 3.000 [2.000, 4.000] | 2.000 [2.000, 2.000] |  |  |" in first
    assert "| gone |  |  |" in second
    assert first.count("Left out: new (No.)") == 1
    assert "1.000 Gb/s measured" in first


def test_a_plot_is_an_image(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot("slow", RUNS, tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").read_bytes().startswith(b"\x89PNG")
