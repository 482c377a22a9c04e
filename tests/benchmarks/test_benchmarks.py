"""Medians of pairs with their intervals, tables and pictures made of them, faults, and the comparison of two trees."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import before_after, engine_report, faults
from benchmarks.pairs import interval, paired, ratio
from benchmarks.step_picture import StepPicture, picture, step_picture_lanes
from hpctrain_testing.faults import FAULTS

_VALUES = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=15)


@settings(max_examples=30)
@given(_VALUES)
def test_interval_holds_the_median_and_lies_among_the_values(values: list[float]) -> None:
    found = interval(values)
    assert found.median == pytest.approx(np.median(values))
    assert min(values) <= found.low <= found.median * (1 + 1e-12)
    assert found.median * (1 - 1e-12) <= found.high <= max(values)


@settings(max_examples=30)
@given(_VALUES, st.floats(0.5, 4.0))
def test_interval_scales_with_the_values(values: list[float], factor: float) -> None:
    once, scaled = interval(values), interval([factor * value for value in values])
    assert (scaled.low, scaled.high) == pytest.approx((factor * once.low, factor * once.high))


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


def test_paired_takes_any_function_of_a_round() -> None:
    found = paired(lambda compute, cost, step: max(compute + cost, 2.0) / step, [1.0, 3.0, 3.0], [0.5, 1.0, 1.0], [4.0, 5.0, 8.0])
    assert found.median == 0.5


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_values_that_have_no_median_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        interval(values)


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ratio([1.0, 2.0], [1.0])


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


def test_the_table_tells_everything() -> None:
    text = engine_report.report({"machine": {"cpu": "x"}, "runs": [_run()]})
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "200.00" in lines["onednn"]  # ms a step
    assert "20.00" in lines["onednn"]  # images a second
    assert "2.000 [1.500, 3.000]" in lines["onednn"]
    assert "stopped early" in lines["torch"]
    assert "LOSS NOT FINITE" in lines["torch last"]
    assert lines["torch compiled"].endswith("failed: no compiler")
    assert engine_report.peak_bytes(_run()["variants"]["onednn"]) == 10**8 + 2


def _work(category: str, begin: float, length: float) -> dict[str, Any]:
    return {"ph": "X", "pid": 0, "tid": 0, "name": category, "cat": category, "ts": begin * 1e6, "dur": length * 1e6}


def _operation(track: int, name: str, begin: float, end: float) -> list[dict[str, Any]]:
    shared = {"pid": 0, "tid": track, "name": name, "cat": "communication", "id": f"{track}.{name}"}
    return [{**shared, "ph": "b", "ts": begin * 1e6}, {**shared, "ph": "e", "ts": end * 1e6}]


def _trace() -> dict[str, Any]:
    """A step from 10 s to 20 s: 3 s forward, 4 s backward, 2 s waiting, 1 s update; a gather that began in the step before."""
    names = {0: "program", 1: "all gradients", 2: "all parameters", 3: "step message"}
    tracks = [{"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": name}} for tid, name in names.items()]
    work = [_work("step", 10, 10), _work("forward", 9, 4), _work("input", 13, 3), _work("parameters", 16, 1)]
    work += [_work("wait", 17, 2), _work("update", 19, 1), {**_work("wait", 12, 5), "pid": 1}]
    messages = [*_operation(1, "first", 14, 18), *_operation(1, "second", 17, 19), *_operation(2, "gather", 5, 11)]
    return {"traceEvents": [*tracks, *work, *messages, *_operation(3, "flags", 10, 20)]}


def test_lanes_are_what_the_first_process_did_in_its_step() -> None:
    step = step_picture_lanes(_trace())
    assert step.seconds == pytest.approx(10)
    assert step.waiting_seconds == pytest.approx(2)
    lengths = {kind: sum(end - begin for begin, end in spans) for kind, spans in step.lanes.items()}
    assert lengths == pytest.approx({"forward": 3, "backward": 4, "update": 1, "waiting": 2, "gradients": 5, "parameters": 1})
    assert len(step.lanes["gradients"]) == 1, "operations that overlap are one bar"


def test_a_trace_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="no step"):
        step_picture_lanes({"traceEvents": [_work("forward", 0, 1)]})


def test_bars_have_one_scale() -> None:
    lanes = dict.fromkeys(("backward", "update", "waiting", "gradients", "parameters"), ())
    steps = {f"a<{seconds:g}": StepPicture(seconds, {**lanes, "forward": ((0.0, seconds),)}) for seconds in (1.0, 4.0)}
    root = ElementTree.fromstring(picture("one & two", steps))
    bars = [float(bar.get("width", 0)) for bar in root.iter("{http://www.w3.org/2000/svg}rect") if bar.get("fill") == "#3f7fbf"]
    assert bars[1] == pytest.approx(4 * bars[0], rel=1e-3)
    assert bars[2] == 14, "the legend"


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
@pytest.mark.slow
@pytest.mark.thorough
def test_without_a_fault_no_rank_is_blamed() -> None:
    fault = next(fault for fault in FAULTS if fault.name == "SIGKILL")
    sound = type(fault)("none", "pass", fault.words)
    values = faults.measure(sound)
    assert not values["named"], values
    assert values["code"] == 0


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
