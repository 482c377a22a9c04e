"""Checkpoints of whole jobs in the background: killed while they are written, on disks that are full or hang."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.data import format as data_format
from hpctrain.storage import checkpoint
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.storage.run_directory import RunDirectory, latest
from tests.support.jobs import Outcome, run_job
from tests.support.virtual_runs import train_virtual

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
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a configuration and 75 small images."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (75, 7, 6, 1), dtype=np.uint8)
    data_format.write(tmp_path / "train.h5", 75, (7, 6, 1), ["a", "b", "c"], [(images, random.integers(0, 3, 75))])
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    return tmp_path


def train(folder: Path, ranks: int, *more: str, fault: str = "pass") -> Outcome:
    (folder / "program.py").write_text(PROGRAM.replace("@FAULT@", fault))
    return run_job(ranks, ["program.py", "train", "tiny.yaml", *more], cwd=folder, timeout_seconds=240)


def run_of(output: str) -> RunDirectory:
    run = latest(Path(output), "tiny")
    assert run is not None
    return run


def newest(output: str) -> tuple[Path, CheckpointContent]:
    found = checkpoint.read_newest(run_of(output).checkpoints)
    assert found is not None
    return found


def assert_same(here: CheckpointContent, expected: CheckpointContent, place: str) -> None:
    assert here.meta["position"] == expected.meta["position"], place
    assert set(here.tensors) == set(expected.tensors), place
    for key, values in expected.tensors.items():
        assert here.tensors[key].tobytes() == values.tobytes(), f"{key}, {place}"


def faulty(ranks: int, fault: Callable[[int], None], *overrides: str) -> None:
    """Train on virtual ranks; the fault is called with the number of each write in the background, before it."""
    write, calls = os.pwrite, []

    def pwrite(*arguments: Any) -> int:
        if threading.current_thread().name == "hpctrain-checkpoint":
            calls.append(1)
            fault(len(calls))
        return write(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        train_virtual(ranks, Path("tiny.yaml"), *overrides)


def test_a_run_whose_directory_is_removed_can_be_resumed_all_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A resume recognises a run directory by its small files; the next checkpoint writes them again."""

    def remove(number: int) -> None:
        if number == 1:
            shutil.rmtree(run_of("runs").path)

    faulty(1, remove, "checkpoint.every_steps=1")
    train_virtual(1, Path("tiny.yaml"), "epochs=3", resume="auto")
    assert re.search(r"resumed at .* step 10\b", capsys.readouterr().out)


@pytest.mark.job
@pytest.mark.slow
def test_ranks_killed_in_a_background_write_go_on_and_end_with_the_same_bits(folder: Path) -> None:
    """Two ranks write shards, one is killed in its second checkpoint; virtual ranks, which wait for single files, end alike."""
    killed = train(
        folder, 2, "checkpoint.layout=sharded", fault="if rank == 1 and NUMBER > 40: os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert killed.code != 0
    directory = run_of("runs").checkpoints
    assert checkpoint.checkpoints(directory), "one checkpoint was whole"
    resumed = train(folder, 2, "checkpoint.layout=sharded", "--resume", "auto")
    assert resumed.code == 0, resumed.output
    assert "resumed at" in resumed.stdout
    assert not list(directory.glob("*.partial"))
    assert all(path.suffix == ".shards" for _, path in checkpoint.checkpoints(directory))
    train_virtual(2, Path("tiny.yaml"), "output=others", "checkpoint.layout=single", "checkpoint.asynchronous=false")
    (path, expected), (_, state) = newest("others"), newest("runs")
    assert path.suffix == ".h5"
    assert_same(state, expected, "resumed")


def test_a_full_disk_is_told_and_the_run_goes_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def full(number: int) -> None:
        if number in (3, 4):
            raise OSError(28, "No space left on device")

    faulty(2, full)
    said = capsys.readouterr().out
    assert "warning: The checkpoint" in said
    assert "No space left on device" in said
    warnings = [str(record["warning"]) for record in run_of("runs").metrics() if record["kind"] == "checkpoint"]
    assert any("It is tried again while the run goes on." in warning for warning in warnings)
    assert newest("runs")[1].meta["position"]["global_step"] == 10  # type: ignore[index]


@pytest.mark.job
@pytest.mark.slow
def test_a_disk_that_hangs_does_not_end_the_training_and_is_told_at_its_end(folder: Path) -> None:
    more = ("deadline_seconds=3", "checkpoint.every_steps=0", "checkpoint.every_epochs=1")
    outcome = train(folder, 0, *more, fault="time.sleep(1000)")
    assert outcome.code == 2, outcome.output
    assert "epoch 2/2" in outcome.stdout
    assert "is left out, as that of step 5 is still being written" in outcome.output
