"""The tables of the engine's benchmark: pairs of one round, the best peer by its median, and what went wrong said aloud."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.engine_report import best_peer, peak_bytes, report, speedup


def _variant(seconds: list[float], *, steps: int = 2, finite: bool = True, **more: Any) -> dict[str, Any]:
    turns = [
        {"wall_seconds": 9.0 * one, "cpu_seconds": steps * one, "finite": finite, "peak_bytes": 10**8 + i}
        for i, one in enumerate(seconds)
    ]
    base = {"turns": turns, "steps": steps, "dropped": False, "failure": None, "idle_cpu_seconds": 0.0, "first_seconds": 0.0}
    return {**base, **more}


def _run() -> dict[str, Any]:
    return {
        "network": "small",
        "batch": 4,
        "pixels": 28,
        "threads": 1,
        "clock": "cpu",
        "steps": 2,
        "seconds": 100.0,
        "load_before": [0.5],
        "load_after": [1.5],
        "ours": ["onednn"],
        "peers": ["torch", "torch last", "torch compiled"],
        "variants": {
            "onednn": _variant([0.1, 0.2, 0.4]),
            "torch": _variant([0.5, 0.6, 0.5], dropped=True),
            "torch last": _variant([0.2, 0.3, 1.2], finite=False),
            "torch compiled": _variant([], failure="first line\nno compiler"),
        },
    }


def test_the_best_peer_has_the_lowest_median() -> None:
    assert best_peer(_run()) == "torch last"


def test_without_peers_there_is_none_and_still_a_table() -> None:
    run = {**_run(), "peers": []}
    assert best_peer(run) is None
    assert "onednn" in report({"machine": {}, "runs": [run]})


def test_speed_is_the_median_of_pairs_by_the_runs_clock() -> None:
    found = speedup(_run(), "onednn", "torch last")
    assert (found.median, found.low, found.high) == pytest.approx((2.0, 1.5, 3.0))


def test_a_variant_that_stopped_early_is_paired_with_the_rounds_it_ran() -> None:
    run = _run()
    run["variants"]["torch"]["turns"].pop()
    assert speedup(run, "torch", "torch last").median == pytest.approx((0.2 / 0.5 + 0.3 / 0.6) / 2)


def test_the_table_tells_everything() -> None:
    text = report({"machine": {"cpu": "x"}, "runs": [_run()]})
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "200.00" in lines["onednn"]  # ms a step
    assert "20.00" in lines["onednn"]  # images a second
    assert "2.000 [1.500, 3.000]" in lines["onednn"]
    assert "stopped early" in lines["torch"]
    assert "LOSS NOT FINITE" in lines["torch last"]
    assert lines["torch compiled"].endswith("failed: no compiler")
    assert peak_bytes(_run()["variants"]["onednn"]) == 10**8 + 2
