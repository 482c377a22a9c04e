"""Our engine, stepping in a process of its own when it is told to."""

from __future__ import annotations

import os

import pytest

from hpctrain.bench.interleaved import Rounds, Turn, interleave, ours, with_threads

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


@pytest.mark.job
def test_our_engine_steps_in_a_process() -> None:
    settings = {"model": "small", "batch": 3, "pixels": 29, "options": {}, "backend": "numpy"}
    one = interleave({"ours": (ours(settings), with_threads(os.environ, 1))}, Rounds(2, 3))["ours"]
    assert [type(turn) for turn in one.turns] == [Turn, Turn]
    assert all(turn.finite and turn.wall_seconds > 0 < turn.peak_bytes for turn in one.turns)
    assert one.facts["parameters"] == 206_922 + 48
