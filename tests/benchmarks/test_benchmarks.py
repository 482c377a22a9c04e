"""Medians of pairs with their intervals, tables and pictures made of them, faults, and the comparison of two trees."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import auto, before_after, engine_report, faults
from benchmarks.interleaved import Rounds, SteppingError, interleave, ours, peer, with_threads
from benchmarks.pairs import interval, ratio
from hpctrain.bench.engine_step import Turn
from hpctrain.models import catalogue
from hpctrain.testing.layers import parameter_count
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


def _variant(seconds: list[float]) -> dict[str, Any]:
    return {"turns": [{"wall_seconds": 9.0 * one, "cpu_seconds": 2 * one} for one in seconds], "steps": 2}


def test_the_best_peer_has_the_lowest_median_and_speed_is_that_of_pairs_by_the_runs_clock() -> None:
    seconds = {"onednn": [0.1, 0.2, 0.4], "torch": [0.5, 0.6, 0.5], "torch last": [0.2, 0.3, 1.2], "torch compiled": []}
    variants = {name: _variant(values) for name, values in seconds.items()}
    run = {"clock": "cpu", "peers": ["torch", "torch last", "torch compiled"], "variants": variants}
    assert engine_report.best_peer(run) == "torch last"
    found = engine_report.speedup(run, "onednn", "torch last")
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


@pytest.mark.job
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_our_engine_steps_in_a_process(precision: str) -> None:
    settings = {"model": "small", "batch": 3, "pixels": 29, "options": {}, "backend": "numpy", "precision": precision}
    one = interleave({"ours": (ours(settings), with_threads(os.environ, 1))}, Rounds(2, 3))["ours"]
    assert [type(turn) for turn in one.turns] == [Turn, Turn]
    assert all(turn.finite and turn.wall_seconds > 0 < turn.peak_bytes for turn in one.turns)
    assert one.facts["parameters"] == 206_922 + 48


PEER = {"batch": 2, "pixels": 32, "threads": 1, "last": True, "fused": True, "compiled": False}


@pytest.mark.torch
@pytest.mark.job
def test_the_peer_in_pytorch_steps_in_a_process() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed (make parity installs it)")
    imported = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, text=True)
    if imported.returncode:
        pytest.skip(f"torchvision does not run here: {imported.stderr.splitlines()[-1]}")
    command = peer(sys.executable, {**PEER, "model": "resnet18"})
    series = interleave({"peer": (command, with_threads(os.environ, 1))}, Rounds(2, 1))["peer"]
    assert [type(turn) for turn in series.turns] == [Turn, Turn]
    assert all(turn.finite and turn.wall_seconds > 0 < turn.peak_bytes for turn in series.turns)
    assert series.facts["parameters"] == parameter_count(catalogue.build("resnet18", {}))


@pytest.mark.torch
@pytest.mark.job
def test_a_peer_without_the_model_ends_with_one_line() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed (make parity installs it)")
    command = peer(sys.executable, {**PEER, "model": "resnet20"})
    with pytest.raises(SteppingError, match=r"its output: .*torchvision") as raised:
        interleave({"peer": (command, with_threads(os.environ, 1))}, Rounds(1, 1))
    assert "Traceback" not in str(raised.value)


# a stand-in that says its seconds instead of taking them, and writes each turn down
_CHILD = """
import json, sys
name, seconds, dies, log = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
print(json.dumps({"version": name}), flush=True)
for turn, line in enumerate(sys.stdin):
    if turn == dies:
        sys.exit("out of luck")
    steps = json.loads(line)["steps"]
    open(log, "a").write(f"{name}{steps} ")
    print(json.dumps(dict(wall_seconds=seconds * steps, cpu_seconds=seconds, finite=True, loss=1.0,
        cpu_before_seconds=0.5 * turn, cpu_after_seconds=0.5 * turn + 0.25, peak_bytes=turn)), flush=True)
"""

_NEVER = 1000


def _command(log: Path, name: str, seconds: float, dies: int = _NEVER) -> tuple[Sequence[str], dict[str, str]]:
    return [sys.executable, "-c", _CHILD, name, str(seconds), str(dies), str(log)], dict(os.environ)


@pytest.mark.job
def test_turns_rotate_and_are_of_single_steps(tmp_path: Path) -> None:
    log = tmp_path / "log"
    commands = {name: _command(log, name, seconds) for name, seconds in (("a", 1.0), ("b", 2.0), ("c", 3.0))}
    series = interleave(commands, Rounds(4, 5, warm_up=3))
    assert log.read_text() == "a1 a2 b1 b2 c1 c2 a5 b5 c5 b5 c5 a5 c5 a5 b5 a5 b5 c5 "
    assert series["b"].seconds("wall") == [2.0] * 4
    assert series["b"].seconds("cpu") == [0.4] * 4
    assert series["c"].peak_bytes == 5
    assert series["a"].idle_cpu_seconds == pytest.approx(0.25 * 5)
    assert series["a"].facts == {"version": "a"}


@pytest.mark.job
def test_only_the_hopeless_of_the_screened_stop(tmp_path: Path) -> None:
    speeds = {"ours": 9.0, "best": 1.0, "near": 1.2, "far": 1.3}
    commands = {name: _command(tmp_path / "log", name, seconds) for name, seconds in speeds.items()}
    series = interleave(commands, Rounds(5, 1), ["best", "near", "far"])
    assert {name: len(one.turns) for name, one in series.items()} == {"ours": 5, "best": 5, "near": 5, "far": 3}
    assert [name for name, one in series.items() if one.dropped] == ["far"]


@pytest.mark.job
@pytest.mark.parametrize("dies", [0, 3])
def test_a_screened_failure_is_noted_another_raised(tmp_path: Path, dies: int) -> None:
    commands = {"good": _command(tmp_path / "log", "good", 1.0), "bad": _command(tmp_path / "log", "bad", 1.0, dies)}
    series = interleave(commands, Rounds(4, 1), ["good", "bad"])
    assert len(series["good"].turns) == 4
    assert len(series["bad"].turns) == max(0, dies - 2)
    assert "out of luck" in str(series["bad"].failure)
    with pytest.raises(SteppingError, match=r"'bad' ended with code 1.*out of luck"):
        interleave(commands, Rounds(4, 1), ["good"])


def test_drawn_jobs_are_those_of_the_seed_and_cover_all_values_evenly() -> None:
    """Else jobs could change once they are measured, or the easy ones could be drawn more often."""
    jobs = auto.draw(auto.OFFICIAL_SEED)
    assert jobs == auto.draw(auto.OFFICIAL_SEED) != auto.draw(3)
    for some in (jobs[:24], jobs[24:]):
        for values in zip(*((job.model, job.batch, job.rate) for job in some), strict=True):
            counts = Counter(values).values()
            assert max(counts) - min(counts) <= 1
    assert all(job.possible for job in jobs)


def test_a_choice_slower_than_the_default_misses_its_bars() -> None:
    steps = {"sharded": 1.0, "split": 1.06, "ddp": 2.0}
    rounds = {words: [{"step_seconds": drift * seconds} for drift in (1, 2, 3)] for words, seconds in steps.items()}
    names = {"default": "sharded", "auto": "split"}
    found = {"name": "a job", "job": {"rate": "700mbit"}, "start_seconds": 1.0, "names": names, "rounds": rounds}
    found["predicted"] = {"sharded": {"seconds": 2.4}, "split": {"seconds": 2.12}}
    lines: list[str] = []
    auto.report({"seed": 1, "machine": {}, "jobs": {"0": found}}, lines.append)
    missed = [line.partition(", at least")[0] for line in lines if line.startswith("MISSED")]
    predictions = ["MISSED accuracy of predictions, mean", "MISSED accuracy of each prediction"]
    assert missed == ["MISSED auto over the default", *predictions]
