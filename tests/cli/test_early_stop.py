"""Early stop and averaged weights as users meet them: runs that end early, go on, and are evaluated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data import format as data_format
from hpctrain.storage.run_directory import RunDirectory, latest
from tests.support.jobs import Outcome

pytestmark = [pytest.mark.job, pytest.mark.slow]
Job = Callable[..., Outcome]

#: so high a learning rate that losses fall and rise
CONFIG = """
name: tiny
seed: 7
backend: numpy
progress: test
model: {{name: small, channels: [4], hidden: 9}}
data: {{train: {folder}/train.h5, test: {folder}/test.h5}}
batch: 16
epochs: 9
optimizer: {{name: adamw, lr: 0.005, clip_norm: 1.0}}
schedule: constant
ema: {{decay: 0.9}}
early_stop: {{metric: ema_loss, patience: 2}}
checkpoint: {{keep: 1, best: ema_loss}}
deadline_seconds: 60
output: {folder}/runs
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    for name, count in (("train", 75), ("test", 40)):
        images = random.integers(0, 256, (count, 9, 8, 1), dtype=np.uint8)
        data_format.write(tmp_path / f"{name}.h5", count, (9, 8, 1), ["a", "b", "c"], [(images, random.integers(0, 3, count))])
    (tmp_path / "tiny.yaml").write_text(CONFIG.format(folder=tmp_path))
    return tmp_path


def _hpctrain(job: Job, ranks: int, folder: Path, command: str, *more: str) -> Outcome:
    outcome = job(ranks, ["-m", "hpctrain", command, "tiny.yaml", *more], cwd=folder)
    assert outcome.code == 0, outcome.output
    return outcome


def _run(folder: Path, output: str = "runs") -> RunDirectory:
    run = latest(folder / output, "tiny")
    assert run is not None
    return run


def _evaluations(run: RunDirectory) -> list[dict[str, object]]:
    return [
        {key: value for key, value in each.items() if key != "time"} for each in run.metrics() if each["kind"] == "evaluation"
    ]


def test_a_run_ends_where_evaluations_do_not_get_better_and_so_does_one_that_is_resumed(job: Job, folder: Path) -> None:
    trained = _hpctrain(job, 2, folder, "train")
    run = _run(folder)
    evaluations = _evaluations(run)
    losses = [float(str(each["ema_loss"])) for each in evaluations]
    best = int(np.argmin(losses))
    assert len(losses) == best + 3 < 9, "it ends two evaluations behind the best one"
    assert f"early stop after epoch {best + 3}: 2 evaluations since epoch {best + 1} with ema_loss" in trained.stdout
    assert f"best test loss of the averaged weights {losses[best]:.4f} after epoch {best + 1}" in trained.stdout

    _hpctrain(job, 2, folder, "train", "--steps", str(5 * (best + 2) + 2), "output=parts", "checkpoint.layout=sharded")
    resumed = _hpctrain(job, 2, folder, "train", "--resume", "auto", "output=parts")
    assert _evaluations(_run(folder, "parts")) == evaluations, "the same bits"
    assert f"early stop after epoch {best + 3}" in resumed.stdout

    again = _hpctrain(job, 1, folder, "train", "--resume", "auto")
    assert f"early stop after epoch {best + 3}" in again.stdout
    assert _evaluations(run)[: len(evaluations)] == evaluations
    assert not [each for each in run.metrics() if each["kind"] == "epoch" and int(str(each["epoch"])) > best + 3]

    averaged = _hpctrain(job, 3, folder, "eval", "--checkpoint", "best", "--averaged")
    assert f"(averaged weights): 40 samples, loss {losses[best]:.4f}" in averaged.stdout
    more = _hpctrain(job, 2, folder, "train", "--resume", "auto", "early_stop.patience=null", f"epochs={best + 4}")
    assert "early stop" not in more.stdout
    assert len(_evaluations(run)) > len(evaluations)
