"""The best checkpoint and early stop as users meet them: `best` as a source, and runs that end early and go on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hpctrain.runs import directory as best_record
from hpctrain.runs.directory import BestRecord, RunDirectory
from tests.support.tiny_runs import hpctrain, newest_run, prepare, tiny, whole_lines

pytestmark = pytest.mark.slow

#: so high a learning rate that accuracies and losses rise and fall
CONFIG = tiny(
    "model: {name: small, channels: [4], hidden: 9}, epochs: 5, optimizer: {name: sgd, lr: 0.5, momentum: 0.9}, "
    "checkpoint: {keep: 1}"
)
EARLY = (
    "epochs=9",
    "optimizer={name: adamw, lr: 0.005, clip_norm: 1.0}",
    "ema={decay: 0.9}",
    "early_stop={metric: ema_loss, patience: 2}",
    "checkpoint={keep: 1, best: ema_loss}",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepare(tmp_path, CONFIG, test=40)


def _best(run: RunDirectory) -> BestRecord:
    best = best_record.read_best(run.checkpoints)
    assert best is not None
    return best


def _accuracies(run: RunDirectory) -> dict[int, float]:
    """Of each step that was evaluated, as the metrics have them."""
    return {int(str(each["step"])): float(str(each["top1"])) for each in run.metrics() if each["kind"] == "evaluation"}


def test_eval_and_resume_take_the_best(folder: Path) -> None:
    trained = hpctrain(2, folder, "train")
    run = newest_run(folder)
    best, accuracies = _best(run), _accuracies(run)
    assert best.step == max(accuracies, key=lambda step: (accuracies[step], -step))
    assert best.step < 25, "the last is not the best, or this test shows nothing"
    path = run.checkpoints.relative_to(folder) / best.checkpoint
    assert f"\nbest test accuracy {best.value:.2%} after epoch {best.epoch}: {path}\n" in whole_lines(trained.stdout)
    evaluated = whole_lines(hpctrain(3, folder, "eval", "--checkpoint", "best").stdout)
    assert f"{path}: 40 samples, " in evaluated
    assert f"top1 {best.value:.2%}," in evaluated
    before = (folder / path).read_bytes()
    resumed = hpctrain(2, folder, "train", "--resume", "best")
    assert f"resumed at epoch {best.epoch + 1}, step {best.step}\n" in resumed.stdout
    assert _accuracies(run) == accuracies, "the same bits again"
    assert (_best(run), (folder / path).read_bytes()) == (best, before)


def _evaluations(run: RunDirectory) -> list[dict[str, object]]:
    return [
        {key: value for key, value in each.items() if key != "time"} for each in run.metrics() if each["kind"] == "evaluation"
    ]


def test_a_run_ends_where_evaluations_do_not_get_better_and_so_does_one_that_is_resumed(folder: Path) -> None:
    trained = hpctrain(2, folder, "train", *EARLY)
    run = newest_run(folder)
    evaluations = _evaluations(run)
    losses = [float(str(each["ema_loss"])) for each in evaluations]
    best = int(np.argmin(losses))
    assert len(losses) == best + 3 < 9, "it ends two evaluations after the best one"
    sentence = f"early stop after epoch {best + 3}: no improvement in 2 evaluations since epoch {best + 1} (ema_loss"
    assert sentence in whole_lines(trained.stdout)
    assert f"best test loss of the averaged weights {losses[best]:.4f} after epoch {best + 1}" in trained.stdout

    hpctrain(2, folder, "train", *EARLY, "--steps", str(5 * (best + 2) + 2), "output=parts", "checkpoint.layout=sharded")
    resumed = hpctrain(2, folder, "train", *EARLY, "--resume", "auto", "output=parts")
    assert _evaluations(newest_run(folder, "parts")) == evaluations, "the same bits"
    assert f"early stop after epoch {best + 3}" in resumed.stdout

    again = hpctrain(1, folder, "train", *EARLY, "--resume", "auto")
    assert f"early stop after epoch {best + 3}" in again.stdout
    assert _evaluations(run)[: len(evaluations)] == evaluations
    assert not [each for each in run.metrics() if each["kind"] == "epoch" and int(str(each["epoch"])) > best + 3]

    averaged = hpctrain(3, folder, "eval", *EARLY, "--checkpoint", "best", "--averaged")
    assert f"(averaged weights): 40 samples, loss {losses[best]:.4f}" in whole_lines(averaged.stdout)
    more = hpctrain(2, folder, "train", *EARLY, "--resume", "auto", "early_stop.patience=null", f"epochs={best + 4}")
    assert "early stop" not in more.stdout
    assert len(_evaluations(run)) > len(evaluations)


def test_validation_decides_and_test_is_tested_once(folder: Path) -> None:
    """No epoch trains on validation samples. A resume and other ranks hold out the same ones. The test set decides nothing."""
    held_out = ("data.validation=0.2", "epochs=3", "exact=true", "threads=1")
    whole = hpctrain(1, folder, "train", *held_out, "output=whole")
    hpctrain(2, folder, "train", *held_out, "--steps", "6")
    resumed = hpctrain(4, folder, "train", *held_out, "--resume", "auto")
    runs = newest_run(folder, "whole"), newest_run(folder)
    records, others = ([each for each in run.metrics() if each["kind"] in ("epoch", "evaluation", "test")] for run in runs)
    assert [(each["kind"], each.get("set")) for each in records] == [
        *(("epoch", None), ("evaluation", "validation")) * 3,
        ("test", "test"),
    ]
    assert all(each["images"] == 60 for each in records if each["kind"] == "epoch")
    keys = ("kind", "epoch", "step", "set", "loss", "top1", "images")
    assert [[each.get(key) for key in keys] for each in others] == [[each.get(key) for key in keys] for each in records]
    for outcome, run in ((whole, runs[0]), (resumed, runs[1])):
        assert f"best validation accuracy {_best(run).value:.2%} after epoch" in outcome.stdout
        assert f"test accuracy: {records[-1]['top1']:.2%} " in outcome.stdout
        assert _best(run).value == max(_accuracies(run).values())
    for on, record in (("validation", records[-2]), ("test", records[-1])):
        evaluated = json.loads(hpctrain(2, folder, "eval", *held_out, "--on", on, "--json").stdout)
        assert (evaluated["set"], evaluated["samples"]) == (on, 15 if on == "validation" else 40)
        assert evaluated["top1"] == pytest.approx(record["top1"])
    refused = hpctrain(2, folder, "eval", *held_out, "--on", "validation", "data.validation=0.3", code=2)
    assert "may have been trained on them" in refused.output
    refused = hpctrain(2, folder, "train", *held_out, "--resume", "auto", "data.validation=0.3", "epochs=4", code=2)
    assert "would become validation samples" in refused.output
    hpctrain(2, folder, "eval", "--on", "validation", code=2)


def test_validation_has_a_file_of_its_own_if_it_is_a_path(folder: Path) -> None:
    """A path is not read as the test set, and its images replace no training images."""
    outcome = hpctrain(2, folder, "train", f"data.validation={folder}/test.h5", "data.test=null", "epochs=2")
    records = newest_run(folder).metrics()
    assert [each["set"] for each in records if each["kind"] == "evaluation"] == ["validation"] * 2
    assert "test" not in [each["kind"] for each in records]
    assert "validation accuracy" in outcome.stdout
    assert "test accuracy" not in outcome.stdout
    assert all(each["images"] == 75 for each in records if each["kind"] == "epoch")
    assert "40 samples" in hpctrain(2, folder, "eval", f"data.validation={folder}/test.h5", "data.test=null").stdout
