"""Processes that step in turn: order, failures, and the screening of those that only the best counts of."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpctrain.bench.interleaved import Rounds, SteppingError, interleave

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
