"""Our engine, stepping in a process of its own when it is told to."""

from __future__ import annotations

import os

import pytest

from hpctrain.bench.interleaved import Rounds, Turn, interleave, ours, with_threads


@pytest.mark.job
def test_our_engine_steps_in_a_process() -> None:
    settings = {"model": "small", "batch": 3, "pixels": 29, "options": {}, "backend": "numpy"}
    one = interleave({"ours": (ours(settings), with_threads(os.environ, 1))}, Rounds(2, 3))["ours"]
    assert [type(turn) for turn in one.turns] == [Turn, Turn]
    assert all(turn.finite and turn.wall_seconds > 0 < turn.peak_bytes for turn in one.turns)
    assert one.facts["parameters"] == 206_922 + 48
