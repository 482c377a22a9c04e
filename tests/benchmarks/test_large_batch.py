"""Curves of trainings are read from metrics; the table says when they got where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.large_batch import Curve, markdown, read


def test_a_curve_is_read_from_metrics(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: large\nbatch: 2048\n")
    records = [
        {"kind": "interval", "epoch": 1, "loss": 9.0},
        {"kind": "epoch", "epoch": 1, "loss": 2.5},
        {"kind": "evaluation", "epoch": 1, "top1": 0.25},
        {"kind": "epoch", "epoch": 2, "loss": 2.0},
        {"kind": "evaluation", "epoch": 2, "top1": 0.1},
        {"kind": "evaluation", "epoch": 2, "top1": 0.5},  # again, after a resume
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert read(tmp_path) == Curve("large", {1: 2.5, 2: 2.0}, {1: 0.25, 2: 0.5})


def test_the_table_says_when_accuracies_were_reached() -> None:
    fast = Curve("fast", {1: 2.0, 2: 1.0, 3: 0.5}, {1: 0.45, 2: 0.75, 3: 0.8})
    slow = Curve("slow", {1: 2.2, 2: 2.0, 3: 1.5}, {1: 0.1, 2: 0.5, 3: 0.45})
    head, _, first, second = markdown([fast, slow]).splitlines()
    assert head.endswith("| epochs to 40.0% | to 72.0% |")
    assert first == "| fast | 3 | 0.500 | 80.00% | 80.00% | 1 | 2 |"
    assert second == "| slow | 3 | 1.500 | 45.00% | 50.00% | 2 | never |"


def test_a_run_without_a_test_is_refused() -> None:
    with pytest.raises(SystemExit, match="has tested no epoch"):
        markdown([Curve("new", {}, {})])
