"""`hpctrain bench engine` on a small model: what it reports adds up, and mistakes are one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpctrain.backend.kernels.onednn.kernel_set import available

pytestmark = pytest.mark.job


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hpctrain", "bench", "engine", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def _measured(tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    out = tmp_path / "engine.json"
    done = _run("--model", "small", "--batch", "3", "--px", "29", "--steps", "2", "--out", str(out), *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout


@pytest.mark.parametrize("backend", ["numpy", "onednn"])
def test_reports_every_operator(tmp_path: Path, backend: str) -> None:
    if backend == "onednn" and available() is not None:
        pytest.skip(str(available()))
    found, printed = _measured(tmp_path, "--backend", backend, "--threads", "1")
    assert (found["backend"], found["batch"], found["pixels"], found["threads"]) == (backend, 3, 29, 1)
    names = [layer["name"] for layer in found["layers"]]
    wanted = ["stage1.conv", "stage1.bn", "stage2.conv", "classifier.fc1", "classifier.fc2", "loss", "update"]
    assert [name for name in names if name in wanted] == wanted
    assert all(name in printed for name in names)
    assert (f"all {found['own_operators']} operators run on onednn" in printed) == (backend == "onednn")
    assert found["images_per_second"] == pytest.approx(3 / found["step_seconds"])
    assert found["peak_gflops"] > 0 < found["arena_bytes"] < found["peak_bytes"]


def test_operations_are_those_of_the_shapes(tmp_path: Path) -> None:
    """Forward 2 N Ho Wo K R S C; backward as much for the weights and, behind the first layer, for the input."""
    found, _ = _measured(tmp_path, "--backend", "numpy")
    layers = {layer["name"]: layer for layer in found["layers"]}
    first, second = 2 * 3 * 29 * 29 * 16 * 9, 2 * 3 * 14 * 14 * 32 * 9 * 16
    assert (layers["stage1.conv"]["forward_flops"], layers["stage1.conv"]["flops"]) == (first, 2 * first)
    assert (layers["stage2.conv"]["forward_flops"], layers["stage2.conv"]["flops"]) == (second, 3 * second)


def test_the_reorders_have_an_account_of_their_own(tmp_path: Path) -> None:
    if available() is not None:
        pytest.skip(str(available()))
    found, printed = _measured(tmp_path, "--backend", "onednn")
    assert found["reorders"] > 0
    assert 0 < found["reorder_seconds"] < found["kernel_seconds"]
    assert f"in {found['reorders']} reorders" in printed
    assert "onednn_verbose" not in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "smal"], 'the nearest is "small"'),
        (["--model", "small", "--threads", "100000"], "threads: 100000 does not fit"),
        (["--model", "small", "--batch", "2", "--steps", "1", "--vs", "torch", "--peer-python", "/bin/false"], "no PyTorch ran"),
    ],
)
def test_mistakes_are_sentences(arguments: list[str], said: str) -> None:
    done = _run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
