"""The benchmark of random operations: all of them run, and figures are of pairs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.augmentations import OURS, images_of, main, of_ours, table


def test_images_are_neither_plain_nor_noise_alone() -> None:
    images = images_of(16, 3)
    assert images.shape == (3, 16, 16, 3)
    assert images.dtype == np.uint8
    assert 20 < images.std() < 120
    for work in of_ours(images).values():
        work()


def test_rates_and_ratios_are_of_rounds() -> None:
    seconds = {"randaugment": [0.5, 0.5], "RandAugment": [1.0, 2.0]}
    seconds |= {"trivial_augment_wide": [1.0, 1.0], "TrivialAugmentWide": [1.0, 1.0]}
    lines = table(32, 10, seconds).splitlines()
    assert "| randaugment | 20 | 8 | 3.000 [2.000, 4.000] |" in lines
    assert "| trivial_augment_wide | 10 | 10 | 1.000 [1.000, 1.000] |" in lines


@pytest.mark.slow
@pytest.mark.torch
def test_torchvision_is_measured_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed (make parity-install installs it)")
    assert main(["--rounds", "1", "--out", str(tmp_path / "rounds.json")]) == 0
    seconds = json.loads((tmp_path / "rounds.json").read_text())["seconds"]
    assert all(set(of_size) == {*OURS, *OURS.values()} for of_size in seconds.values())
    assert capsys.readouterr().out.count("| randaugment |") == len(seconds)
