"""The peer in PyTorch, stepping in a process of its own when it is told to."""

from __future__ import annotations

import os
import sys

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (make parity installs it)")

from hpctrain.bench.interleaved import Rounds, Turn, interleave, peer, with_threads
from hpctrain.models import catalogue
from hpctrain.testing.models import parameter_count

pytestmark = [pytest.mark.torch, pytest.mark.job]


def test_the_peer_steps_in_a_process() -> None:
    settings = {"model": "small", "batch": 3, "pixels": 28, "threads": 1, "last": True, "fused": True, "compiled": False}
    series = interleave({"peer": (peer(sys.executable, settings), with_threads(os.environ, 1))}, Rounds(2, 3))["peer"]
    assert [type(turn) for turn in series.turns] == [Turn, Turn]
    assert all(turn.finite and turn.wall_seconds > 0 < turn.peak_bytes for turn in series.turns)
    assert series.facts["parameters"] == parameter_count(catalogue.build("small", {}))
