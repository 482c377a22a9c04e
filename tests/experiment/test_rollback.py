"""Values that are not finite on one rank: stop, skip, and rollback, on virtual ranks and once over real ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.data import format as data_format
from hpctrain.data.loader import Batch
from hpctrain.data.sampler import Reordering, Sampler
from hpctrain.errors import DivergedError
from hpctrain.storage import checkpoint
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.storage.run_directory import RunDirectory, latest
from hpctrain.train.step import TrainingStep
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual
from tests.support.jobs import Outcome
from tests.support.virtual_runs import _rank

pytestmark = pytest.mark.slow

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
#: by step, the samples of each rank as they were taken last
Seen = dict[tuple[int, int], dict[int, list[int]]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    for name, count in (("train", SAMPLES), ("test", 21)):
        images = random.integers(0, 256, (count, 9, 8, 1), dtype=np.uint8)
        data_format.write(tmp_path / f"{name}.h5", count, (9, 8, 1), ["a", "b", "c"], [(images, random.integers(0, 3, count))])
    (tmp_path / "tiny.yaml").write_text(CONFIG.format(folder=tmp_path, batch=BATCH, seed=SEED))
    return tmp_path


def _train(folder: Path, ranks: int, bad: Mapping[str, Any], *more: str, resume: str | None = None, steps: int = 0) -> Seen:
    """Train with images that are NaN on one rank in some steps, or where two samples meet in some epoch; return what was seen."""
    here, run, seen = threading.local(), TrainingStep.run, Seen()

    def poisoned(self: TrainingStep, batch: Batch, global_step: int, lr: float) -> None:
        ids = batch.sample_ids.tolist()
        together = batch.epoch == bad.get("epoch") and set(bad["pair"]) <= set(ids)
        if together or (here.rank == bad.get("rank") and global_step in bad["steps"]):
            batch = replace(batch, x=np.full_like(batch.x, np.nan))
        seen.setdefault((batch.epoch, global_step), {})[here.rank] = ids
        run(self, batch, global_step, lr)

    def program(comm: ThreadCommunicator) -> None:
        here.rank = comm.rank
        _rank(comm, folder / "tiny.yaml", more, resume, steps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingStep, "run", poisoned)
        run_virtual(ranks, program, deadline_seconds=120)
    return seen


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


def test_stop_ends_the_run_behind_its_last_checkpoint(folder: Path) -> None:
    with pytest.raises(DivergedError, match="is the first, in forward order, whose"):
        _train(folder, 3, {"rank": 1, "steps": [3]})
    run = _run(folder)
    assert [step for step, _ in checkpoint.checkpoints(run.checkpoints)] == [2]
    assert not _records(run, "skip") + _records(run, "rollback")


def test_skip_leaves_a_step_out_and_a_resume_goes_on_alike(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = {"rank": 1, "steps": [0, 3, 6]}
    _train(folder, 2, bad, "on_nonfinite=skip", f"output={folder}/whole")
    said = capsys.readouterr().out
    for words in ("step 4 skipped: layer ", "(on rank 1 of 2)", "3 of 10 steps were skipped, as something in them was not finite"):
        assert words in said
    whole = _run(folder, "whole")
    assert [(record["step"], record["sources"]) for record in _records(whole, "skip")] == [(1, [1]), (4, [1]), (7, [1])]
    assert len(_records(whole, "interval")) == 10
    assert _last(whole).meta["position"]["skipped"] == 3  # type: ignore[index]
    _train(folder, 2, bad, "on_nonfinite=skip", steps=4)
    _train(folder, 2, bad, "on_nonfinite=skip", resume="auto")
    assert "3 of 10 steps were skipped" in capsys.readouterr().out
    _assert_same(_run(folder), whole)


def test_too_many_skips_in_a_row_end_the_run(folder: Path) -> None:
    words = "4 steps, one after another, are not finite and were skipped, the last one step 6, as layer"
    with pytest.raises(DivergedError, match=words):
        _train(folder, 2, {"rank": 0, "steps": [2, 3, 4, 5]}, "on_nonfinite.action=skip", "on_nonfinite.most=3")
    assert len(_records(_run(folder), "skip")) == 4


def _assert_went_back(folder: Path, said: str) -> None:
    (record,) = _records(_run(folder), "rollback")
    assert (record["step"], record["from_step"], record["samples"], record["order"]) == (6, 9, BATCH, 1)
    assert "went back from step 9 to step 6, and on in order 1: Layer" in said
    assert [record["step"] for record in _records(_run(folder), "interval")] == list(range(1, 11))
    assert _last(_run(folder)).meta["position"]["reorderings"] == [[1, BATCH, 1]]  # type: ignore[index]


@pytest.mark.parametrize("ranks", [2, 3])
def test_rollback_goes_back_and_on_in_another_order(folder: Path, ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Inside an epoch: what was seen of it stays, the rest comes in another order, each sample once."""
    seen = _train(folder, ranks, _meet(8), "on_nonfinite=rollback", "checkpoint.every_steps=3")
    _assert_went_back(folder, capsys.readouterr().out)
    steps = [[sample for _, ids in sorted(seen[1, step].items()) for sample in ids] for step in range(5, 10)]
    assert sorted(sample for step in steps for sample in step) == list(range(SAMPLES))
    sampler = Sampler(SAMPLES, BATCH, SEED)
    sampler.reorder([Reordering(1, BATCH, 1)])
    assert steps == [sampler.ids(1, step).tolist() for step in range(5)]


# The program; images are NaN on the rank that reads two samples at once in some epoch.
POISONED = """
import json, os, runpy
from dataclasses import replace
import numpy as np
from hpctrain.train.step import TrainingStep
run, bad = TrainingStep.run, json.loads(os.environ["BAD"])
def poisoned(self, batch, global_step, lr):
    if batch.epoch == bad["epoch"] and set(bad["pair"]) <= set(batch.sample_ids.tolist()):
        batch = replace(batch, x=np.full_like(batch.x, np.nan))
    run(self, batch, global_step, lr)
TrainingStep.run = poisoned
runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)
"""


@pytest.mark.job
def test_real_ranks_go_back_together(job: Callable[..., Outcome], folder: Path) -> None:
    (folder / "poisoned.py").write_text(POISONED)
    words = ["poisoned.py", "train", "tiny.yaml", "on_nonfinite=rollback", "checkpoint.every_steps=3"]
    outcome = job(2, words, cwd=folder, env={"BAD": json.dumps(_meet(8))})
    assert outcome.code == 0, outcome.output
    _assert_went_back(folder, outcome.stdout)


@pytest.mark.parametrize("averager", ["sharded", "{name: lazy, layers: 2, max_interval: 3, check_every: 1}"])
def test_rollback_has_the_same_bits_again_and_across_a_resume(folder: Path, averager: str) -> None:
    """Twice the same, and the same where the run is stopped behind the rollback, in the next epoch, and goes on."""
    options = ("on_nonfinite=rollback", f"averager={averager}", "epochs=3")
    for output in ("first", "second"):
        _train(folder, 2, _meet(3), *options, f"output={folder}/{output}")
    _assert_same(_run(folder, "first"), _run(folder, "second"))
    _train(folder, 2, _meet(3), *options, steps=9)
    assert len(_records(_run(folder), "rollback")) == 1
    _train(folder, 2, _meet(3), *options, resume="auto")
    _assert_same(_run(folder), _run(folder, "first"))
    whole, parts = (_records(_run(folder, name), "rollback") for name in ("first", "runs"))
    assert [{**record, "time": 0} for record in whole] == [{**record, "time": 0} for record in parts]


def test_without_a_checkpoint_it_goes_back_to_the_start(folder: Path) -> None:
    _train(folder, 2, _meet(2), "on_nonfinite=rollback", "checkpoint.every_steps=0", "checkpoint.every_epochs=0")
    run = _run(folder)
    assert [step for step, _ in checkpoint.checkpoints(run.checkpoints)] == [0]
    (record,) = _records(run, "rollback")
    assert (record["step"], record["order"]) == (0, 1)
    assert [r["step"] for r in _records(run, "interval")] == list(range(1, 11))


def test_it_ends_where_no_order_helps(folder: Path) -> None:
    words = "The run has gone back to step 6 2 times, each time in another order, without coming to"
    with pytest.raises(DivergedError, match=words):
        _train(folder, 2, {"rank": 1, "steps": [6]}, "on_nonfinite.action=rollback", "on_nonfinite.most=2")
    records = _records(_run(folder), "rollback")
    assert [(record["step"], record["order"]) for record in records] == [(6, 1), (6, 2)]
    assert all(a["time"] < b["time"] for a, b in pairwise(records))


def test_a_resume_says_a_rollback_once(folder: Path) -> None:
    """From the checkpoint that the run went back to: it goes back again, and that line is there once."""
    for _ in range(2):
        with pytest.raises(DivergedError):
            _train(folder, 2, {"rank": 1, "steps": [6]}, "on_nonfinite={action: rollback, most: 1}", resume="auto")
        assert [record["step"] for record in _records(_run(folder), "rollback")] == [6]
