"""Checkpoints of whole jobs in the background: killed while they are written, on disks that are full or hang."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data import format as data_format
from hpctrain.storage import checkpoint
from hpctrain.storage.run_directory import latest
from tests.support.jobs import Outcome, run_job

CONFIG = """
name: tiny
seed: 7
backend: numpy
progress: test
model: {name: small, channels: [3], hidden: 5}
data: {train: train.h5}
batch: 15
epochs: 2
optimizer: {name: sgd, lr: 0.05, momentum: 0.9}
schedule: constant
deadline_seconds: 60
checkpoint: {every_steps: 2}
"""

#: the program, in which writes in the background do something else; NUMBER counts those of the process
PROGRAM = """
import os, runpy, signal, threading, time
rank = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
original, calls = os.pwrite, []
def pwrite(*arguments):
    if threading.current_thread().name == "hpctrain-checkpoint":
        calls.append(1)
        NUMBER = len(calls)
        @FAULT@
    return original(*arguments)
os.pwrite = pwrite
runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration and 75 small images."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (75, 7, 6, 1), dtype=np.uint8)
    data_format.write(tmp_path / "train.h5", 75, (7, 6, 1), ["a", "b", "c"], [(images, random.integers(0, 3, 75))])
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    return tmp_path


def train(folder: Path, ranks: int, *more: str, fault: str = "pass") -> Outcome:
    (folder / "program.py").write_text(PROGRAM.replace("@FAULT@", fault))
    return run_job(ranks, ["program.py", "train", "tiny.yaml", *more], cwd=folder, timeout_seconds=240)


def warnings_of(folder: Path) -> list[str]:
    run = latest(folder / "runs", "tiny")
    assert run is not None
    return [str(record["warning"]) for record in run.metrics() if record["kind"] == "checkpoint"]


def final_state(folder: Path) -> checkpoint.CheckpointContent:
    run = latest(folder / "runs", "tiny")
    assert run is not None
    found = checkpoint.read_newest(run.checkpoints)
    assert found is not None
    return found[1]


@pytest.mark.job
@pytest.mark.slow
def test_a_run_whose_directory_is_removed_can_be_resumed_all_the_same(folder: Path) -> None:
    """A resume recognises a run directory by its small files; the next checkpoint writes them again."""
    remove = 'if NUMBER == 1: import shutil, glob; [shutil.rmtree(run) for run in glob.glob("runs/tiny-*")]'
    done = train(folder, 0, "checkpoint.every_steps=1", fault=remove)
    assert done.code == 0, done.output
    resumed = train(folder, 0, "epochs=3", "--resume", "auto")
    assert resumed.code == 0, resumed.output
    assert re.search(r"resumed at .* step 10\b", resumed.stdout)


@pytest.mark.job
@pytest.mark.slow
def test_ranks_killed_in_a_background_write_go_on_and_end_with_the_same_bits(folder: Path, tmp_path: Path) -> None:
    """Three ranks write shards, one is killed in its second checkpoint; and single files, synchronous, give the same."""
    killed = train(
        folder, 3, "checkpoint.layout=sharded", fault="if rank == 1 and NUMBER > 40: os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert killed.code != 0
    run = latest(folder / "runs", "tiny")
    assert run is not None
    steps = [step for step, _ in checkpoint.checkpoints(run.checkpoints)]
    assert steps, "one checkpoint was whole"
    resumed = train(folder, 3, "checkpoint.layout=sharded", "--resume", "auto")
    assert resumed.code == 0, resumed.output
    assert "resumed at" in resumed.stdout
    assert not list(run.checkpoints.glob("*.partial"))
    assert all(path.suffix == ".shards" for _, path in checkpoint.checkpoints(run.checkpoints))
    state = final_state(folder)
    whole = train(folder, 3, "output=others", "checkpoint.layout=single", "checkpoint.asynchronous=false")
    assert whole.code == 0, whole.output
    other = latest(folder / "others", "tiny")
    assert other is not None
    expected = checkpoint.read_newest(other.checkpoints)
    assert expected is not None
    assert expected[0].suffix == ".h5"
    assert expected[1].meta["position"] == state.meta["position"]
    assert set(expected[1].tensors) == set(state.tensors)
    for key, values in expected[1].tensors.items():
        assert state.tensors[key].tobytes() == values.tobytes(), key


@pytest.mark.job
@pytest.mark.slow
def test_a_full_disk_is_told_and_the_run_goes_on(folder: Path) -> None:
    outcome = train(folder, 2, fault='if NUMBER in (3, 4): raise OSError(28, "No space left on device")')
    assert outcome.code == 0, outcome.output
    assert "warning: The checkpoint" in outcome.stdout
    assert "No space left on device" in outcome.stdout
    assert any("It is tried again while the run goes on." in warning for warning in warnings_of(folder))
    position: object = final_state(folder).meta["position"]
    assert json.loads(json.dumps(position))["global_step"] == 10


@pytest.mark.job
@pytest.mark.slow
def test_a_disk_that_hangs_does_not_end_the_training_and_is_told_at_its_end(folder: Path) -> None:
    more = ("deadline_seconds=3", "checkpoint.every_steps=0", "checkpoint.every_epochs=1")
    outcome = train(folder, 2, *more, fault="rank == 0 and time.sleep(1000)")
    assert outcome.code == 2, outcome.output
    assert "epoch 2/2" in outcome.stdout
    assert "is left out, as that of step 5 is still being written" in outcome.output
