"""The benchmark of crops: all ways run, and figures are of pairs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks.augmentations import images_of
from benchmarks.crops import OURS, PEERS, main, of_ours, table


def test_ours_runs_and_draws_anew_in_each_round() -> None:
    work = of_ours(images_of(40, 2), 16)
    first, second = work().copy(), work().copy()  # type: ignore[attr-defined]
    assert first.shape == (2, 16, 16, 3)
    assert (first != second).any()


def test_rates_and_ratios_are_of_rounds() -> None:
    lines = table(10, {OURS: [0.5, 0.5], "other": [1.0, 2.0]}).splitlines()
    assert lines[2:] == ["| hpctrain | 20 |  |", "| other | 8 | 3.000 [2.000, 4.000] |"]


@pytest.mark.slow
@pytest.mark.torch
def test_torchvision_is_measured_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if any(importlib.util.find_spec(name) is None for name in ("torch", "torchvision")):
        pytest.skip("torchvision is not installed (make parity-install installs it)")
    assert main(["--rounds", "1", "--count", "2", "--out", str(tmp_path / "rounds.json")]) == 0
    assert set(json.loads((tmp_path / "rounds.json").read_text())["seconds"]) == {OURS, *PEERS}
    assert capsys.readouterr().out.count("| torchvision") == len(PEERS)
