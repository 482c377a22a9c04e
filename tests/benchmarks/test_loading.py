"""The benchmark of whole loaders: all ways run, on the same images."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks.augmentations import images_of
from benchmarks.loading import KINDS, OURS, PEERS, PIXELS, STORED, encoded, main, of_file, of_jpeg, written


def test_ours_reads_all_images_of_both_kinds(tmp_path: Path) -> None:
    images = images_of(STORED, 18)
    for works in (of_jpeg(encoded(images)), of_file(written(images, tmp_path / "train.h5"))):
        assert set(works) == {OURS, PIXELS}
    loaded = {name: work() for name, work in works.items()}
    assert loaded == {OURS: [16, 2], PIXELS: [16, 2]}


@pytest.mark.slow
@pytest.mark.torch
def test_torchvision_is_measured_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if any(importlib.util.find_spec(name) is None for name in ("torch", "torchvision")):
        pytest.skip("torchvision is not installed (make parity-install installs it)")
    assert main(["--rounds", "1", "--count", "4", "--out", str(tmp_path / "rounds.json")]) == 0
    seconds = json.loads((tmp_path / "rounds.json").read_text())["seconds"]
    assert {kind: set(of_kind) for kind, of_kind in seconds.items()} == {kind: {OURS, PIXELS, *PEERS} for kind in KINDS}
    assert capsys.readouterr().out.count("| torchvision") == len(KINDS) * len(PEERS)
