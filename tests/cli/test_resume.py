"""`hpctrain train --resume` with other values than before: what may change, what is mapped, what is refused, what is kept."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.data import format as data_format
from hpctrain.data.sampler import Sampler
from hpctrain.testing.jobs import Outcome
from hpctrain.train import checkpoint
from hpctrain.train.run_directory import RunDirectory, latest

Job = Callable[..., Outcome]

SAMPLES = 75
CONFIG = """
name: tiny
seed: 7
backend: numpy
progress: test
model: {{name: small, channels: [3], hidden: 5}}
data:
  train: {folder}/train.h5
  test: {folder}/test.h5
batch: 16
epochs: 2
optimizer: {{name: sgd, lr: 0.05, momentum: 0.9}}
schedule: {{name: cosine, warmup_epochs: 0.5}}
metrics: {{interval_seconds: 1.0e-9}}
deadline_seconds: 60
output: {folder}/runs
"""

# The program; each rank appends the samples of each training step of its own to a file of its own.
SEEN = """
import json, os, runpy
from hpctrain.train.step import TrainingStep
run = TrainingStep.run
def noted(self, batch, global_step, lr):
    with open(f"seen-{os.environ.get('PMI_RANK', 0)}.jsonl", "a") as file:
        file.write(json.dumps([global_step, batch.epoch, lr, batch.sample_ids.tolist()]) + "\\n")
    run(self, batch, global_step, lr)
TrainingStep.run = noted
runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)
"""


def write_images(path: Path, count: int, seed: int = 0, names: tuple[str, ...] = ("a", "b", "c")) -> None:
    """A data file of small images, the same for the same seed."""
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (count, 7, 6, 1), dtype=np.uint8)
    data_format.write(path, count, (7, 6, 1), list(names), [(images, random.integers(0, len(names), count))])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration and two small data files: 75 images to train on (the last batch has 11), 21 to test on."""
    write_images(tmp_path / "train.h5", SAMPLES)
    write_images(tmp_path / "test.h5", 21, seed=1)
    (tmp_path / "tiny.yaml").write_text(CONFIG.format(folder=tmp_path))
    (tmp_path / "seen.py").write_text(SEEN)
    return tmp_path


def _train(job: Job, folder: Path, *more: str, ranks: int = 0, program: tuple[str, ...] = ("-m", "hpctrain")) -> Outcome:
    return job(ranks, [*program, "train", "tiny.yaml", *more], cwd=folder)


def _trains(job: Job, folder: Path, *more: str, ranks: int = 0, program: tuple[str, ...] = ("-m", "hpctrain")) -> Outcome:
    outcome = _train(job, folder, *more, ranks=ranks, program=program)
    assert outcome.code == 0, outcome.output
    return outcome


def _run(folder: Path) -> RunDirectory:
    run = latest(folder / "runs", "tiny")
    assert run is not None
    return run


def _position(folder: Path) -> dict[str, Any]:
    newest = checkpoint.read_newest(_run(folder).checkpoints)
    assert newest is not None
    return dict(newest[1].meta["position"])  # type: ignore[call-overload]


def _seen(folder: Path, epoch: int) -> list[list[int]]:
    """Samples of each step of an epoch, over all ranks, in order."""
    steps: dict[int, list[int]] = {}
    for path in sorted(folder.glob("seen-*.jsonl")):
        for line in path.read_text().splitlines():
            number, its_epoch, _, ids = json.loads(line)
            if its_epoch == epoch:
                steps.setdefault(number, []).extend(ids)
    return [steps[number] for number in sorted(steps)]


def test_another_batch_goes_on_with_the_next_sample(job: Job, folder: Path) -> None:
    """Batches of 16, then 5 on two ranks in micro-batches, then 30: every sample of the epoch once, in its order."""
    seen = ("seen.py",)
    _trains(job, folder, "--steps", "2", program=seen)
    assert _position(folder)["sums"]["count"] == 32
    _trains(job, folder, "--resume", "auto", "--steps", "3", "batch=5", "micro_batches=2", ranks=2, program=seen)
    position = _position(folder)
    assert (position["samples"], position["sums"]["count"], position["global_step"]) == (47, 47, 5)
    _trains(job, folder, "--resume", "auto", "batch=30", program=seen)
    order = Sampler(SAMPLES, 16, seed=7)
    for epoch, sizes in ((0, [16, 16, 5, 5, 5, 28]), (1, [30, 30, 15])):
        steps = _seen(folder, epoch)
        assert [len(step) for step in steps] == sizes
        assert [sample for step in steps for sample in step] == order.order(epoch).tolist()
    assert [record["step"] for record in _run(folder).metrics() if record["kind"] == "epoch"] == [6, 9]
