"""The peer in PyTorch runs steps of a torchvision network in a separate process on request."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (make parity installs it)")

from benchmarks.interleaved import Rounds, SteppingError, Turn, interleave, peer, with_threads
from hpctrain.models import catalogue
from hpctrain.testing.layers import parameter_count

pytestmark = [pytest.mark.torch, pytest.mark.job]

SETTINGS = {"batch": 2, "pixels": 32, "threads": 1, "last": True, "fused": True, "compiled": False}


def test_the_peer_steps_in_a_process() -> None:
    imported = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, text=True)
    if imported.returncode:
        pytest.skip(f"torchvision does not run here: {imported.stderr.splitlines()[-1]}")
    command = peer(sys.executable, {**SETTINGS, "model": "resnet18"})
    series = interleave({"peer": (command, with_threads(os.environ, 1))}, Rounds(2, 1))["peer"]
    assert [type(turn) for turn in series.turns] == [Turn, Turn]
    assert all(turn.finite and turn.wall_seconds > 0 < turn.peak_bytes for turn in series.turns)
    assert series.facts["parameters"] == parameter_count(catalogue.build("resnet18", {}))


def test_a_peer_without_the_model_ends_with_one_line() -> None:
    command = peer(sys.executable, {**SETTINGS, "model": "resnet20"})
    with pytest.raises(SteppingError, match=r"its output: .*torchvision") as raised:
        interleave({"peer": (command, with_threads(os.environ, 1))}, Rounds(1, 1))
    assert "Traceback" not in str(raised.value)
