"""Runs from start to end, on virtual ranks: what they find beside them at their start."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from hpctrain.data import format as data_format
from hpctrain.storage.run_directory import latest
from tests.experiment.test_checkpoints import CONFIG
from tests.support.unmarked_run import make_unmarked
from tests.support.virtual_runs import train_virtual


def test_a_new_run_removes_what_killed_runs_of_its_name_have_left(tmp_path: Path) -> None:
    """Once it is old, and of its name only."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (30, 7, 6, 1), dtype=np.uint8)
    data_format.write(tmp_path / "train.h5", 30, (7, 6, 1), ["a", "b", "c"], [(images, random.integers(0, 3, 30))])
    (tmp_path / "tiny.yaml").write_text(CONFIG.replace("train.h5", f"{tmp_path}/train.h5"))
    output = tmp_path / "runs"
    left = {}
    for name, stamp in (("tiny", "20200101-000000"), ("tiny", "20200101-000001"), ("other", "20200101-000000")):
        checkpoints = output / f"{name}-{stamp}" / "checkpoints"
        make_unmarked(checkpoints.parent, f"name: {name}\n")
        left[name, stamp] = checkpoints / "checkpoint-00000002.h5.partial"
        left[name, stamp].write_bytes(b"half")
    for key in (("tiny", "20200101-000000"), ("other", "20200101-000000")):
        os.utime(left[key], (1e9, 1e9))
    train_virtual(2, tmp_path / "tiny.yaml", f"output={output}", steps=1)
    run = latest(output, "tiny")
    assert run is not None
    assert run.path.parent == output
    assert [key for key, path in left.items() if not path.exists()] == [("tiny", "20200101-000000")]
