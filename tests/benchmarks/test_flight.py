"""The benchmark of flight records: kinds of events, and the share that follows from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import flight


def test_events_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "_EVENTS", 20)
    turns = flight.costs(tmp_path)
    assert all(len(of_event) == 9 and min(of_event) > 0 for of_event in turns.values())


def test_the_report_has_the_share() -> None:
    results = {
        "event_seconds": {"operation": [2e-6, 1e-6, 3e-6]},
        "job": "a job",
        "step": {"operations": 50.0, "seconds": 0.1},
        "seconds_of_a_step": 1e-4,
        "share": 1e-3,
    }
    text = flight.markdown(results)
    assert "| operation | 2.00 [1.00, 3.00] |" in text
    assert "a job: 50 operations in a step of 100.0 ms: at most 100 microseconds, 0.100% of it." in text
