"""Runs with values that are not finite on one rank, as users start them: stop, skip, and rollback over real ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.data import format as data_format
from hpctrain.data.sampler import Reordering, Sampler
from hpctrain.storage import checkpoint
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.storage.run_directory import RunDirectory, latest
from tests.support.jobs import Outcome

pytestmark = [pytest.mark.job, pytest.mark.slow]
Job = Callable[..., Outcome]

SAMPLES, BATCH, SEED = 75, 16, 7
CONFIG = """
name: tiny
seed: {seed}
backend: numpy
progress: test
model: {{name: small, channels: [4, 6], hidden: 9, dropout: 0.2}}
data: {{train: {folder}/train.h5, test: {folder}/test.h5}}
batch: {batch}
epochs: 2
optimizer: {{name: sgd, lr: 0.05, momentum: 0.9}}
schedule: {{name: cosine}}
checkpoint: {{every_steps: 2, keep: 99}}
metrics: {{interval_seconds: 1.0e-9}}
deadline_seconds: 60
output: {folder}/runs
"""

# The program; images are NaN on one rank in some steps, or on the rank that reads two samples at once in some epoch.
POISONED = """
import json, os, runpy
from dataclasses import replace
import numpy as np
from hpctrain.train.step import TrainingStep
run = TrainingStep.run
bad = json.loads(os.environ["BAD"])
def poisoned(self, batch, global_step, lr):
    rank = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", 0)))
    together = batch.epoch == bad["epoch"] and set(bad["pair"]) <= set(batch.sample_ids.tolist()) if "pair" in bad else False
    if together or (rank == bad.get("rank") and global_step in bad["steps"]):
        batch = replace(batch, x=np.full_like(batch.x, np.nan))
    with open(f"seen-{rank}.jsonl", "a") as file:
        file.write(json.dumps([global_step, batch.epoch, batch.sample_ids.tolist()]) + "\\n")
    run(self, batch, global_step, lr)
TrainingStep.run = poisoned
runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    for name, count in (("train", SAMPLES), ("test", 21)):
        images = random.integers(0, 256, (count, 9, 8, 1), dtype=np.uint8)
        labels = random.integers(0, 3, count)
        data_format.write(tmp_path / f"{name}.h5", count, (9, 8, 1), ["a", "b", "c"], [(images, labels)])
    (tmp_path / "tiny.yaml").write_text(CONFIG.format(folder=tmp_path, batch=BATCH, seed=SEED))
    (tmp_path / "poisoned.py").write_text(POISONED)
    return tmp_path


def _train(job: Job, ranks: int, folder: Path, bad: Mapping[str, Any], *more: str) -> Outcome:
    return job(ranks, ["poisoned.py", "train", "tiny.yaml", *more], cwd=folder, env={"BAD": json.dumps(bad)})


def _trains(job: Job, ranks: int, folder: Path, bad: Mapping[str, Any], *more: str) -> Outcome:
    outcome = _train(job, ranks, folder, bad, *more)
    assert outcome.code == 0, outcome.output
    return outcome


def _run(folder: Path, output: str = "runs") -> RunDirectory:
    run = latest(folder / output, "tiny")
    assert run is not None
    return run


def _last(run: RunDirectory) -> CheckpointContent:
    newest = checkpoint.read_newest(run.checkpoints)
    assert newest is not None
    return newest[1]


def _assert_same(a: RunDirectory, b: RunDirectory) -> None:
    one, other = _last(a), _last(b)
    assert one.meta["position"] == other.meta["position"]
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in other.tensors.items():
        assert one.tensors[name].tobytes() == tensor.tobytes(), name


def _records(run: RunDirectory, kind: str) -> list[dict[str, Any]]:
    return [record for record in run.metrics() if record["kind"] == kind]


def _meet(step: int) -> dict[str, Any]:
    """Two samples that the first rank reads together in a step of the first order."""
    epoch, inside = divmod(step, -(-SAMPLES // BATCH))
    first, second, *_ = Sampler(SAMPLES, BATCH, SEED).ids(epoch, inside)
    return {"epoch": epoch, "pair": [int(first), int(second)], "steps": []}


@pytest.mark.parametrize("ranks", [2, 3])
def test_stop_is_what_it_was(job: Job, folder: Path, ranks: int) -> None:
    outcome = _train(job, ranks, folder, {"rank": 1, "steps": [3]})
    assert outcome.code == 2
    assert outcome.stderr.count("is the first, in forward order, whose") == 1
    run = _run(folder)
    assert [step for step, _ in checkpoint.checkpoints(run.checkpoints)] == [2]
    assert not _records(run, "skip")
    assert not _records(run, "rollback")


@pytest.mark.parametrize("ranks", [2, 3])
def test_skip_leaves_a_step_out_and_a_resume_goes_on_alike(job: Job, folder: Path, ranks: int) -> None:
    bad = {"rank": 1, "steps": [0, 3, 6]}
    outcome = _trains(job, ranks, folder, bad, "on_nonfinite=skip", f"output={folder}/whole")
    assert "step 4 skipped: layer " in outcome.stdout
    assert f"(on rank 1 of {ranks})" in outcome.stdout
    assert "3 of 10 steps were skipped, as something in them was not finite" in outcome.stdout
    whole = _run(folder, "whole")
    assert [(record["step"], record["sources"]) for record in _records(whole, "skip")] == [(1, [1]), (4, [1]), (7, [1])]
    assert len(_records(whole, "interval")) == 10
    assert _last(whole).meta["position"]["skipped"] == 3  # type: ignore[index]
    _trains(job, ranks, folder, bad, "on_nonfinite=skip", "--steps", "4")
    outcome = _trains(job, ranks, folder, bad, "on_nonfinite=skip", "--resume", "auto")
    assert "3 of 10 steps were skipped" in outcome.stdout
    _assert_same(_run(folder), whole)


def test_too_many_skips_in_a_row_end_the_run(job: Job, folder: Path) -> None:
    outcome = _train(job, 2, folder, {"rank": 0, "steps": [2, 3, 4, 5]}, "on_nonfinite.action=skip", "on_nonfinite.most=3")
    assert outcome.code == 2
    assert outcome.stderr.count("4 steps, one after another, are not finite and were skipped, the last one step 6, as layer") == 1
    assert len(_records(_run(folder), "skip")) == 4


@pytest.mark.parametrize("ranks", [2, 3])
def test_rollback_goes_back_and_on_in_another_order(job: Job, folder: Path, ranks: int) -> None:
    """Inside an epoch: what was seen of it stays, the rest comes in another order, each sample once."""
    outcome = _trains(job, ranks, folder, _meet(8), "on_nonfinite=rollback", "checkpoint.every_steps=3")
    run = _run(folder)
    (record,) = _records(run, "rollback")
    assert (record["step"], record["from_step"], record["samples"], record["order"]) == (6, 9, BATCH, 1)
    assert "went back from step 9 to step 6, and on in order 1: Layer" in outcome.stdout
    assert [r["step"] for r in _records(run, "interval")] == list(range(1, 11))
    assert _last(run).meta["position"]["reorderings"] == [[1, BATCH, 1]]  # type: ignore[index]
    assert sorted(sample for step in _seen(folder, 1) for sample in step) == list(range(SAMPLES))
    sampler = Sampler(SAMPLES, BATCH, SEED)
    sampler.reorder([Reordering(1, BATCH, 1)])
    assert _seen(folder, 1) == [sampler.ids(1, step).tolist() for step in range(5)]


def _seen(folder: Path, epoch: int) -> list[list[int]]:
    """Samples of each step of an epoch, over all ranks, as they were taken last."""
    steps: dict[int, dict[str, list[int]]] = {}
    for path in sorted(folder.glob("seen-*.jsonl")):
        for line in path.read_text().splitlines():
            number, its_epoch, ids = json.loads(line)
            if its_epoch == epoch:
                steps.setdefault(number, {})[path.name] = ids
    return [[sample for ids in steps[number].values() for sample in ids] for number in sorted(steps)]


@pytest.mark.parametrize("averager", ["sharded", "{name: lazy, layers: 2, max_interval: 3, check_every: 1}"])
def test_rollback_gives_the_same_bits_again_and_across_a_resume(job: Job, folder: Path, averager: str) -> None:
    """Twice the same, and the same where the run is stopped behind the rollback, in the next epoch, and goes on."""
    options = ("on_nonfinite=rollback", f"averager={averager}", "epochs=3")
    for output in ("first", "second"):
        _trains(job, 2, folder, _meet(3), *options, f"output={folder}/{output}")
    _assert_same(_run(folder, "first"), _run(folder, "second"))
    _trains(job, 2, folder, _meet(3), *options, "--steps", "9")
    assert len(_records(_run(folder), "rollback")) == 1
    _trains(job, 2, folder, _meet(3), *options, "--resume", "auto")
    _assert_same(_run(folder), _run(folder, "first"))
    whole, parts = (_records(_run(folder, name), "rollback") for name in ("first", "runs"))
    assert [_untimed(record) for record in whole] == [_untimed(record) for record in parts]


def _untimed(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "time"}


def test_without_a_checkpoint_it_goes_back_to_the_start(job: Job, folder: Path) -> None:
    options = ("on_nonfinite=rollback", "checkpoint.every_steps=0", "checkpoint.every_epochs=0")
    _trains(job, 2, folder, _meet(2), *options)
    run = _run(folder)
    assert [step for step, _ in checkpoint.checkpoints(run.checkpoints)] == [0]
    (record,) = _records(run, "rollback")
    assert (record["step"], record["order"]) == (0, 1)
    assert [r["step"] for r in _records(run, "interval")] == list(range(1, 11))


def test_it_ends_where_no_order_helps(job: Job, folder: Path) -> None:
    bad = {"rank": 1, "steps": [6]}
    outcome = _train(job, 2, folder, bad, "on_nonfinite.action=rollback", "on_nonfinite.most=2")
    assert outcome.code == 2
    assert outcome.stderr.count("The run has gone back to step 6 2 times, each time in another order, without coming to") == 1
    records = _records(_run(folder), "rollback")
    assert [(record["step"], record["order"]) for record in records] == [(6, 1), (6, 2)]
    assert all(a["time"] < b["time"] for a, b in pairwise(records))


def test_a_resume_says_a_rollback_once(job: Job, folder: Path) -> None:
    """From the checkpoint that the run went back to: it goes back again, and that line is there once."""
    options = ("on_nonfinite={action: rollback, most: 1}", "--resume", "auto")
    for _ in range(2):
        assert _train(job, 2, folder, {"rank": 1, "steps": [6]}, *options).code == 2
        assert [record["step"] for record in _records(_run(folder), "rollback")] == [6]
