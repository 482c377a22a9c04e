"""`hpctrain train --resume` with other values than before: what may change, what is mapped, what is refused, what is kept."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from hpctrain.data.loader import Batch
from hpctrain.data.sampler import Sampler
from hpctrain.optim.schedules import Cosine
from hpctrain.runs.directory import RunDirectory
from hpctrain.storage import checkpoint
from hpctrain.training.step import TrainingStep
from hpctrain_testing.run import Outcome
from tests.support.here import virtual_rank
from tests.support.tiny_runs import (
    accuracy,
    assert_close,
    hpctrain,
    newest_checkpoint,
    newest_run,
    prepare,
    sentence,
    tiny,
    write_images,
)

pytestmark = pytest.mark.slow

SAMPLES = 75
SHAPE = (7, 6, 1)
CONFIG = tiny(
    "model: {name: small, channels: [3], hidden: 5}, schedule: {name: cosine, warmup_epochs: 0.5}, "
    "metrics: {interval_seconds: 1.0e-9}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration and two small data files: 75 images to train on (the last batch has 11), 21 to test on."""
    return prepare(tmp_path, CONFIG, SAMPLES, 21, SHAPE)


class Seen:
    """The samples of each training step and its learning rate, over all ranks and runs of a test."""

    def __init__(self) -> None:
        self.steps: dict[tuple[int, int, int], list[int]] = {}  # by epoch, step and rank
        self.rates: dict[int, float] = {}

    def of(self, epoch: int) -> list[list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for (its, number, _), ids in sorted(self.steps.items()):
            if its == epoch:
                found[number] += ids
        return list(found.values())

    def all_of(self, epoch: int) -> list[int]:
        return [sample for step in self.of(epoch) for sample in step]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What the steps of the test's runs have seen."""
    noted, run = Seen(), TrainingStep.run

    def step(self: TrainingStep, batch: Batch, number: int, lr: float) -> None:
        noted.steps[batch.epoch, number, virtual_rank()] = batch.sample_ids.tolist()
        noted.rates[number] = lr
        run(self, batch, number, lr)

    monkeypatch.setattr(TrainingStep, "run", step)
    return noted


def _train(folder: Path, *more: str, ranks: int = 0, code: int = 0) -> Outcome:
    return hpctrain(ranks, folder, "train", *more, code=code)


def _again(folder: Path, *more: str, ranks: int = 0, code: int = 0) -> Outcome:
    return hpctrain(ranks, folder, "train", "--resume", "auto", *more, code=code)


def _position(folder: Path) -> dict[str, Any]:
    return dict(newest_checkpoint(folder).meta["position"])  # type: ignore[call-overload]


def test_another_batch_goes_on_with_the_next_sample(folder: Path, seen: Seen) -> None:
    """Batches of 16, then 5 on two ranks in micro-batches, then 30: every sample of the epoch once, in its order."""
    _train(folder, "--steps", "2")
    assert _position(folder)["sums"]["count"] == 32
    _again(folder, "--steps", "3", "batch=5", "micro_batches=2", ranks=2)
    position = _position(folder)
    assert (position["samples"], position["sums"]["count"], position["global_step"]) == (47, 47, 5)
    _again(folder, "batch=30")
    order = Sampler(SAMPLES, 16, seed=7)
    for epoch, sizes in ((0, [16, 16, 5, 5, 5, 28]), (1, [30, 30, 15])):
        assert [len(step) for step in seen.of(epoch)] == sizes
        assert seen.all_of(epoch) == order.order(epoch).tolist()
    assert [record["step"] for record in newest_run(folder).metrics() if record["kind"] == "epoch"] == [6, 9]
    # The learning rate follows from the share of the training that is done, to a step, whatever the batch: as with a batch of 1.
    fine = Cosine(base_lr=0.05, epochs=2, steps_per_epoch=SAMPLES, warmup_epochs=0.5)
    sizes = [len(step) for epoch in (0, 1) for step in seen.of(epoch)]
    for number, rate in seen.rates.items():
        assert abs(rate - fine.lr(sum(sizes[:number]))) < 0.011, number


def test_other_batches_and_other_grids_at_each_resume_train_as_one_process(folder: Path) -> None:
    """In float64: whatever grid, plan, averager and ranks go on, also where the epoch's last batch is another than planned."""
    common = ("dtype=float64", "batch_norm.statistics=synchronised", "optimizer.clip_norm=0.5", "checkpoint.every_steps=2")
    crop = ("data.augment=[{name: pad_crop, padding: 1}]", "model={name: small, channels: [3], hidden: 5, dropout: 0.3}")
    starts = (
        ("batch=16", "--steps", "2", 2, ("grid.rows=2", "plan.default=domain")),
        ("batch=7", "--steps", "3", 3, ("averager=overlap",)),
        ("batch=30", "--steps", "2", 2, ("grid.rows=2", "plan.default=model", "averager=priority")),
    )
    ends = []
    for output, on_ranks in (("alone", False), ("grids", True)):
        for batch, *steps, ranks, grid in starts:
            options = [*common, *crop, f"output={output}", "--resume", "auto", batch, *steps]
            _train(folder, *options, *(grid if on_ranks else ()), ranks=ranks if on_ranks else 0)
        ends.append(newest_checkpoint(folder, output))
    assert ends[0].meta["position"]["samples"] == 30  # type: ignore[index]  # 16 + 16, 7 + 7 + 7, 22; then 30 of the next epoch
    assert_close(*ends)


def test_an_option_that_is_written_out_is_no_change(folder: Path) -> None:
    _train(folder, "--steps", "1", "data.augment=[flip]")
    outcome = _again(folder, "--steps", "1", "data.augment=[{name: flip, probability: 0.5}]")
    assert " -> " not in outcome.stdout


def test_changes_are_printed_kept_and_followed_by_the_configuration(folder: Path) -> None:
    _train(folder, "--steps", "2")
    before = newest_run(folder).config()
    outcome = _again(folder, "--steps", "1", "batch=5", "optimizer.lr=0.1", ranks=2)
    assert "resumed at epoch 1, step 2, 32 of 75 images of the epoch done" in outcome.stdout
    for words in ("batch: 16 -> 5", "optimizer.lr: 0.05 -> 0.1", "ranks: 1 -> 2"):
        assert f"  {words}\n" in outcome.stdout
    run = newest_run(folder)
    assert "batch: 5\n" in run.config()
    assert (run.path / "config-00000002.yaml").read_text() == before
    _again(folder, "--steps", "1", "batch=5", "optimizer.lr=0.1", ranks=2)
    records = [record for record in run.metrics() if record["kind"] == "resume"]
    assert [record["step"] for record in records] == [2, 3]
    assert records[0]["changes"] == {"batch": [16, 5], "optimizer.lr": [0.05, 0.1], "ranks": [1, 2]}
    assert records[1]["changes"] == {}


def _contents(run: RunDirectory) -> dict[Path, bytes]:
    """Return all files of a run except the records of its owners, of which a refused resume was one."""
    return {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file() and path.parent.name != "owners"}


def test_what_does_not_go_together_is_refused_in_one_sentence_and_nothing_is_touched(folder: Path) -> None:
    _train(folder, "--steps", "2")
    run = newest_run(folder)
    before = _contents(run)
    write_images(folder / "train.h5", SAMPLES + 1, seed=5, shape=SHAPE)
    outcome = _again(folder, "seed=8", "model.hidden=6", "batch=5", ranks=2, code=2)
    line = sentence(outcome)
    images = ("images of data.train: 75 of 7 x 6 x 1", "-> 76 of", "labels of data.train: ")
    for words in ("seed: 7 -> 8", "model.hidden: 5 -> 6", *images, run.path.name):
        assert words in line
    assert "batch" not in line
    assert _contents(run) == before
    assert len(list((folder / "runs").iterdir())) == 1


def test_between_epochs_the_seed_and_the_images_may_change(folder: Path, seen: Seen) -> None:
    _train(folder, "epochs=1")
    write_images(folder / "more.h5", SAMPLES + 9, seed=5, shape=SHAPE)
    changes = ("seed=8", f"data.train={folder}/more.h5")
    outcome = _again(folder, *changes)
    for words in ("epochs: 1 -> 2", "seed: 7 -> 8", "images of data.train: 75 of 7 x 6 x 1"):
        assert words in outcome.stdout
    assert seen.all_of(1) == Sampler(SAMPLES + 9, 1, seed=8).order(1).tolist()


def test_an_epoch_that_is_over_stays_over_with_other_images(folder: Path, seen: Seen) -> None:
    """A checkpoint of an epoch's last step, which is older than the end of the epoch."""
    _train(folder, "--steps", "5")
    assert _position(folder)["sums"]["count"] == SAMPLES
    write_images(folder / "train.h5", SAMPLES + 9, seed=5, shape=SHAPE)
    outcome = _again(folder)
    assert len(seen.of(0)) == 5
    assert sum(map(len, seen.of(1))) == SAMPLES + 9
    (ended,) = [line for line in outcome.stdout.splitlines() if line.startswith("epoch 1/2: train loss")]
    assert "images/s" not in ended
    assert [record["epoch"] for record in newest_run(folder).metrics() if record["kind"] == "epoch"] == [1, 2]


@pytest.mark.parametrize("every_steps", [0, 5])
def test_a_finished_run_is_said_to_be_finished_and_records_no_epoch(folder: Path, every_steps: int) -> None:
    trained = _train(folder, f"checkpoint.every_steps={every_steps}")
    epochs = [record for record in newest_run(folder).metrics() if record["kind"] == "epoch"]
    outcome = _again(folder, f"checkpoint.every_steps={every_steps}")
    assert "resumed a run that is finished after 2 epochs, step 10: it is only evaluated\n" in outcome.stdout
    assert "resumed at" not in outcome.stdout
    assert accuracy(outcome) == accuracy(trained)
    assert [r["step"] for r in newest_run(folder).metrics() if r["kind"] == "epoch"] == [record["step"] for record in epochs]
    refused = _again(folder, "epochs=1", "batch=75", code=2)
    assert "epochs: 2 -> 1 (the smallest value is 2" in refused.stderr


def test_auto_starts_a_new_run_where_nothing_is_there_and_eval_does_not(folder: Path) -> None:
    outcome = _again(folder, "--steps", "1", "name=tiny-b")
    assert "nothing to resume: no run named tiny-b" in outcome.stdout
    # Neither a name that begins alike nor another output is this run.
    for more in ("name=tiny", "name=tiny-b-c"):
        assert "nothing to resume" in _again(folder, "--steps", "1", more).stdout
    assert "nothing to resume" in _again(folder, "--steps", "1", "name=tiny-b", "output=o").stdout
    assert "resumed at epoch 1, step 1" in _again(folder, "--steps", "1", "name=tiny-b").stdout
    refused = hpctrain(0, folder, "eval", "name=tiny-d", code=2)
    assert "No run of 'tiny-d'" in refused.stderr


def test_auto_goes_on_where_a_run_that_went_back_has_come_to(folder: Path) -> None:
    """Its earlier checkpoints are of higher steps, and of a training that was given up."""
    keep = "checkpoint.keep=9"
    _train(folder, "--steps", "2", keep)
    first = checkpoint.checkpoint_path(newest_run(folder).checkpoints, 2)
    _again(folder, "--steps", "2", "batch=10", keep)
    back = _train(folder, "--resume", str(first), "--steps", "1", "batch=12", keep)
    assert "checkpoint-00000004-set-aside.h5" in back.stderr
    again = _again(folder, "--steps", "1", "batch=12", keep)
    assert "resumed at epoch 1, step 3, 44 of 75 images" in again.stdout
    assert [line["images"] for line in newest_run(folder).metrics() if line["kind"] == "interval"] == [16, 32, 44, 56]
    aside = newest_run(folder).checkpoints / "checkpoint-00000004-set-aside.h5"
    assert "step 4, 52 of 75 images" in _train(folder, "--resume", str(aside), "--steps", "1", "batch=12").stdout


def test_norms_are_summed_where_only_the_resume_asks_for_them(folder: Path) -> None:
    """The checkpoint's schedule, which has no place for them, is not used then; nor one that has it without need."""
    for averager in ("sharded", "blocking"):
        options = (f"averager={averager}", f"output={averager}", "--steps", "1")
        _train(folder, *options)
        _again(folder, *options, "optimizer.clip_norm=0.01")
        _again(folder, *options)
    assert_close(newest_checkpoint(folder, "sharded"), newest_checkpoint(folder, "blocking"), 1e-4, 1e-6)


def test_to_lazy_and_back(folder: Path) -> None:
    """Gradients that it has added up are refused by others until a step has applied them."""
    _train(folder, "--steps", "1")
    lazy = ("averager={name: lazy, layers: 2}", "--resume", "auto", "--steps")
    _train(folder, *lazy, "3", ranks=2)
    refused = _again(folder, "--steps", "1", ranks=2, code=2)
    assert "that the averager lazy has not applied yet" in refused.stderr
    assert "another model" not in refused.stderr
    _train(folder, *lazy, "1")
    outcome = _again(folder, "--steps", "1", "averager=overlap")
    assert "  averager: lazy -> overlap\n" in outcome.stdout
    assert _position(folder)["global_step"] == 6
