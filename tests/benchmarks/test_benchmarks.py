"""Medians of pairs with their intervals, tables and pictures made of them, faults, and the comparison of two trees."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import before_after, engine_report, faults
from benchmarks.pairs import interval, ratio
from hpctrain_testing.faults import FAULTS

_VALUES = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=15)


@settings(max_examples=30)
@given(_VALUES)
def test_interval_holds_the_median_and_lies_among_the_values(values: list[float]) -> None:
    found = interval(values)
    assert found.median == pytest.approx(np.median(values))
    assert min(values) <= found.low <= found.median * (1 + 1e-12)
    assert found.median * (1 - 1e-12) <= found.high <= max(values)


@pytest.mark.slow
def test_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(7)
    hits = 0
    for seed in range(100):
        found = interval(random.standard_normal(25).tolist(), seed=seed)
        hits += found.low <= 0.0 <= found.high
    assert 88 <= hits <= 100


def test_ratios_are_those_of_pairs() -> None:
    """A drift that both sides share cancels, as it would not in a ratio of medians."""
    drift = np.array([1.0, 9.0, 2.0, 7.0, 1.5, 30.0, 4.0])
    found = ratio(1.25 * drift, drift[:].tolist())
    assert (found.low, found.median, found.high) == pytest.approx((1.25, 1.25, 1.25))


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_values_that_have_no_median_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        interval(values)


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
    assert engine_report.best_peer(_run()) == "torch last"


def test_speed_is_the_median_of_pairs_by_the_runs_clock() -> None:
    found = engine_report.speedup(_run(), "onednn", "torch last")
    assert (found.median, found.low, found.high) == pytest.approx((2.0, 1.5, 3.0))


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["SIGKILL", "a wrong dtype", "a rank that is too slow", "a flipped bit of a parameter"])
def test_a_fault_is_named(name: str) -> None:
    fault = next(fault for fault in FAULTS if fault.name == name)
    values = faults.measure(fault)
    assert values["named"], values
    assert values["code"] not in (0, None)


@pytest.mark.job
def test_a_commit_and_the_working_tree_run_each_their_own_files(capsys: pytest.CaptureFixture[str]) -> None:
    """Else a change would be compared with itself."""
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, check=False).returncode:
        pytest.skip("These files are in no clone.")
    with before_after.checked_out("HEAD") as base:
        assert before_after.environment_of(base, 1)["PYTHONPATH"] == str(base)
        with pytest.raises(RuntimeError, match="instead of hpctrain in"):
            before_after.environment_of(base / "docs", 1)
    assert not base.exists()
    assert before_after.main(["--base", "HEAD", "--only", "small-28", "--threads", "1", "--rounds", "1"]) == 0
    assert re.search(r"^small-28 +1 +\d+\.\d\d  \d+\.\d{3} \[", capsys.readouterr().out, re.MULTILINE)
