"""The best checkpoint as users meet it: real ranks, real evaluations, `best` as a source, and ranks killed while old ones go."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data import format as data_format
from hpctrain.storage import best_record, checkpoint
from hpctrain.storage.best_record import BestRecord
from hpctrain.storage.run_directory import RunDirectory, latest
from tests.support.jobs import Outcome

pytestmark = [pytest.mark.job, pytest.mark.slow]
Job = Callable[..., Outcome]

#: so high a learning rate that accuracies rise and fall
CONFIG = """
name: tiny
seed: 7
backend: numpy
progress: test
model: {{name: small, channels: [4], hidden: 9}}
data: {{train: {folder}/train.h5, test: {folder}/test.h5}}
batch: 16
epochs: 5
optimizer: {{name: sgd, lr: 0.5, momentum: 0.9}}
schedule: constant
checkpoint: {{keep: 1}}
deadline_seconds: 60
output: {folder}/runs
"""

#: the program; the process of rank 0 ends as after SIGKILL where a deletion of old checkpoints, number LAST, begins
KILLED = """
import os, runpy, signal
from hpctrain.storage import checkpoint
prune, calls = checkpoint.prune, []
def pruned(*arguments):
    calls.append(1)
    if len(calls) == int(os.environ["LAST"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return prune(*arguments)
checkpoint.prune = pruned
runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    for name, count in (("train", 75), ("test", 40)):
        images = random.integers(0, 256, (count, 9, 8, 1), dtype=np.uint8)
        labels = random.integers(0, 3, count)
        data_format.write(tmp_path / f"{name}.h5", count, (9, 8, 1), ["a", "b", "c"], [(images, labels)])
    (tmp_path / "tiny.yaml").write_text(CONFIG.format(folder=tmp_path))
    (tmp_path / "killed.py").write_text(KILLED)
    return tmp_path


def _hpctrain(job: Job, ranks: int, folder: Path, command: str, *more: str) -> Outcome:
    outcome = job(ranks, ["-m", "hpctrain", command, "tiny.yaml", *more], cwd=folder)
    assert outcome.code == 0, outcome.output
    return outcome


def _run(folder: Path, output: str = "runs") -> RunDirectory:
    run = latest(folder / output, "tiny")
    assert run is not None
    return run


def _best(run: RunDirectory) -> BestRecord:
    best = best_record.read(run.checkpoints)
    assert best is not None
    return best


def _evaluations(run: RunDirectory) -> dict[int, float]:
    """Steps and accuracies, as the metrics have them."""
    return {int(str(each["step"])): float(str(each["top1"])) for each in run.metrics() if each["kind"] == "evaluation"}


def test_eval_and_resume_take_the_best(job: Job, folder: Path) -> None:
    trained = _hpctrain(job, 2, folder, "train")
    run = _run(folder)
    best, accuracies = _best(run), _evaluations(run)
    assert best.step == max(accuracies, key=lambda step: (accuracies[step], -step))
    assert best.step < 25, "the last is not the best, or this test shows nothing"
    path = run.checkpoints / best.checkpoint
    assert f"\nbest test accuracy {best.value:.2%} after epoch {best.epoch}: {path}\n" in trained.stdout
    evaluated = _hpctrain(job, 3, folder, "eval", "--checkpoint", "best")
    assert f"{path}: 40 samples, " in evaluated.stdout
    assert f"top1 {best.value:.2%}," in evaluated.stdout
    before = path.read_bytes()
    resumed = _hpctrain(job, 2, folder, "train", "--resume", "best")
    assert f"resumed at epoch {best.epoch + 1}, step {best.step}\n" in resumed.stdout
    assert _evaluations(run) == accuracies, "the same bits again"
    assert (_best(run), path.read_bytes()) == (best, before)


@pytest.mark.parametrize("layout", ["single", "sharded"])
@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_run_killed_before_it_deletes_keeps_both_and_ends_alike(job: Job, folder: Path, layout: str, asynchronous: str) -> None:
    """Each checkpoint is written, and rank 0 killed before the deletion of old ones; the run goes on, and is killed again."""
    options = (f"checkpoint.layout={layout}", f"checkpoint.asynchronous={asynchronous}")
    _hpctrain(job, 2, folder, "train", *options, f"output={folder}/whole")
    whole = _run(folder, "whole")
    written: list[int] = []
    for _ in range(3):
        killed = job(
            2,
            ["killed.py", "train", "tiny.yaml", *options, "--resume", "auto"],
            cwd=folder,
            env={"LAST": str(1 + len(written) % 2)},
        )
        assert killed.code != 0
        run = _run(folder)
        there = [step for step, _ in checkpoint.checkpoints(run.checkpoints)]
        written.append(there[-1])
        accuracies = _evaluations(whole)
        until = [step for step in accuracies if step <= there[-1]]
        best = max(until, key=lambda step: (accuracies[step], -step))
        assert best in there
        assert (
            max([step for step in until if step < there[-1]], default=best, key=lambda step: (accuracies[step], -step)) in there
        )
    assert written == sorted(set(written)), "each attempt came to another checkpoint"
    _hpctrain(job, 2, folder, "train", *options, "--resume", "auto")
    names = [sorted(path.name for path in each.checkpoints.iterdir()) for each in (_run(folder), whole)]
    assert names[0] == names[1]
    assert _best(_run(folder)) == _best(whole)
    assert json.dumps(checkpoint.read(whole.checkpoints / _best(whole).checkpoint).meta["evaluations"])
