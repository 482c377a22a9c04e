"""`hpctrain train` and `eval` as users run them: results, resume bit by bit, and one sentence for every mistake."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging import averagers
from hpctrain.comm.link import LinkModel
from hpctrain.runs.directory import RunDirectory
from hpctrain.storage import checkpoint
from hpctrain_testing.run import Outcome
from tests.support.here import run_here
from tests.support.run_in_process import Killed
from tests.support.tiny_runs import (
    Start,
    accuracy,
    assert_close,
    assert_same,
    hpctrain,
    newest_checkpoint,
    newest_run,
    prepare,
    tiny,
    whole_lines,
)

pytestmark = pytest.mark.slow

CONFIG = tiny(
    "model: {name: small, channels: [4, 6], hidden: 9, dropout: 0.2}, "
    "data: {train: FOLDER/train.h5, test: FOLDER/test.h5, augment: [{name: pad_crop, padding: 1}, {name: flip}]}, "
    "optimizer: {name: sgd, lr: 0.05, momentum: 0.9, weight_decay: 1.0e-3}, schedule: {name: cosine, warmup_epochs: 0.5}, "
    "checkpoint: {keep: 9}, metrics: {interval_seconds: 0.01}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration and two small data files: 75 images to train on (the last batch has 11), 21 to test on."""
    return prepare(tmp_path, CONFIG)


def _train(ranks: int, folder: Path, *more: str, code: int = 0, start: Start = run_here) -> Outcome:
    return hpctrain(ranks, folder, "train", *more, code=code, start=start)


def test_one_process_trains_evaluates_and_leaves_its_files(job: Start, folder: Path) -> None:
    outcome = _train(0, folder, start=job)
    run = newest_run(folder)
    assert f"files of this run: runs/{run.path.name}" in outcome.stdout
    kinds = [line["kind"] for line in run.metrics()]
    assert [kinds.count(kind) for kind in ("epoch", "evaluation", "data")] == [2, 2, 2]
    assert "steps waited for data " in outcome.stdout
    assert kinds.count("interval") >= 1
    assert "lr: 0.05" in run.config()
    assert "clip_norm: null" in run.config()  # a default of an option
    assert json.loads((run.path / "versions.json").read_text())["kernels"] == "numpy"
    assert [step for step, _ in checkpoint.checkpoints(run.checkpoints)] == [5, 10]


@pytest.mark.sample(1)
@pytest.mark.mpi_differs
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, ()),
        (3, ()),
        (2, ("optimizer.clip_norm=0.3", "averager={name: priority, slice_parameters: 100, window: 2}")),
        (2, ("optimizer.clip_norm=0.3", "averager={name: sharded, bucket_bytes: 500, fc_exchange: never}")),
        (2, ("optimizer.clip_norm=0.3", "averager={name: lazy, max_interval: 1, bucket_bytes: 500}")),
    ],
    ids=["1", "3", "priority", "gradients only", "lazy"],
)
def test_resume_is_bitwise(job: Start, folder: Path, ranks: int, options: tuple[str, ...]) -> None:
    """Over a real MPI: 7 steps and 3 more equal 10, across an epoch's end and inside the second epoch."""
    whole = _train(ranks, folder, *options, "output=whole", start=job)
    _train(ranks, folder, *options, "--steps", "7", start=job)
    second = _train(ranks, folder, *options, "--resume", "auto", start=job)
    assert "resumed at epoch 2, step 7" in second.stdout
    assert accuracy(second) == accuracy(whole)
    assert_same(newest_checkpoint(folder), newest_checkpoint(folder, "whole"))
    for kind in ("parameters/", "statistics/", "optimizer/momentum/"):
        assert any(key.startswith(kind) for key in newest_checkpoint(folder).tensors)
    evaluated = hpctrain(3, folder, "eval", *options)
    assert f"21 samples, loss {whole.stdout.split('loss ')[-1].split(',')[0]}, top1 {accuracy(whole)}%" in whole_lines(
        evaluated.stdout
    )


def test_a_checkpoint_is_read_once_by_each_rank(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, reads, read = 2, [], checkpoint.read
    _train(ranks, folder, "--steps", "2")
    monkeypatch.setattr(checkpoint, "read", lambda path: reads.append(path) or read(path))  # type: ignore[func-returns-value]
    (path,) = newest_run(folder).checkpoints.iterdir()
    for words in ((), ("--checkpoint", str(newest_run(folder).path)), ("--checkpoint", str(path))):
        hpctrain(ranks, folder, "eval", *words)
        assert len(reads) == ranks
        reads.clear()
    _train(ranks, folder, "--steps", "1", "--resume", "auto")
    assert len(reads) == ranks


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [0, 3])
def test_a_run_that_diverges_names_the_layer_and_keeps_nothing(folder: Path, ranks: int) -> None:
    outcome = _train(ranks, folder, "optimizer.lr=1e30", "checkpoint.every_steps=1", "checkpoint.keep=99", code=2)
    assert outcome.stderr.count("is the first, in forward order, whose") == 1
    assert "Warning" not in outcome.output
    for _, path in checkpoint.checkpoints(newest_run(folder).checkpoints):
        for name, tensor in checkpoint.read(path).tensors.items():
            assert np.isfinite(tensor).all(), f"{name} in {path}"


def test_steps_end_in_words_and_a_short_run_records_its_first_step_and_its_last(folder: Path) -> None:
    calm = "metrics.interval_seconds=1000"
    outcome = _train(0, folder, "--steps", "3", calm)
    run = newest_run(folder)
    assert "ended after step 3, in epoch 1 of 2, as requested by --steps\nno evaluation was made" in outcome.stdout
    assert f"\ncheckpoint runs/{run.path.name}/checkpoints/checkpoint-00000003.h5\n" in outcome.stdout
    assert f"continue with the same command and, instead of --steps, --resume runs/{run.path.name}\n" in whole_lines(
        outcome.stdout
    )
    assert [step for step, _ in checkpoint.checkpoints(run.checkpoints)] == [3]
    assert outcome.stdout.count(" left\n") == 1
    assert [(r["epoch"], r["step"]) for r in run.metrics() if r["kind"] == "interval"] == [(1, 1), (1, 3)]
    outcome = _train(0, folder, "--resume", "auto", calm, "--progress", "none")
    assert " left\n" not in outcome.stdout
    records = [(r["kind"], r["epoch"], r["step"]) for r in run.metrics() if "loss" in r]
    assert records[:3] == [("interval", 1, 1), ("interval", 1, 3), ("interval", 1, 4)]
    assert records[3:] == [("epoch", 1, 5), ("evaluation", 1, 5), ("epoch", 2, 10), ("evaluation", 2, 10)]


@pytest.fixture
def on_a_link(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Trains on a link that measures as slow or as fast as said."""

    def train(alpha: float, *more: str, ranks: int = 3, code: int = 0) -> Outcome:
        monkeypatch.setattr(averagers, "calibrate", lambda comm, progress: LinkModel(alpha, 1e-8))
        options = ("model.hidden=199", "optimizer.clip_norm=0.3", "averager.fc_exchange=never")
        return _train(ranks, folder, *options, *more, code=code)

    return train


def test_resume_is_bitwise_whatever_the_link_measures_then(folder: Path, on_a_link: Callable[..., Outcome]) -> None:
    on_a_link(1e-6, "output=whole")
    on_a_link(1e-6, "--steps", "7")
    before = newest_run(folder).schedule_path("all").read_text()
    on_a_link(1e-2, "--resume", "auto")
    assert_same(newest_checkpoint(folder), newest_checkpoint(folder, "whole"))
    assert newest_run(folder).schedule_path("all").read_text() == before


def _killed(monkeypatch: pytest.MonkeyPatch, kind: str, step: int, train: Callable[[], object]) -> None:
    """The training ends where a record of a kind and step has been appended, and half of another line."""
    append = RunDirectory.append_metrics

    def killed(run: RunDirectory, record: dict[str, Any]) -> None:
        if dead:
            raise Killed
        append(run, record)
        if (record["kind"], record.get("step", 0)) == (kind, step):
            with run.metrics_path.open("ab") as file:
                file.write(b'{"kind": "inter')
            dead.append(True)
            raise Killed

    dead: list[bool] = []
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "append_metrics", killed)
        with pytest.raises(Killed):
            train()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("ranks", "every_steps", "kills"),
    [
        (0, 3, [("interval", 8)]),
        # Killed again before the next checkpoint, then at an epoch's end after one.
        (2, 4, [("evaluation", 5), ("progress", 0), ("interval", 7), ("epoch", 10)]),
        # A checkpoint inside the last step of an epoch is older than the epoch's record and its evaluation.
        (0, 5, [("evaluation", 5), ("evaluation", 10)]),
    ],
)
def test_a_killed_and_resumed_run_has_each_step_once(
    folder: Path, ranks: int, every_steps: int, kills: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["metrics.interval_seconds=1e-9", f"checkpoint.every_steps={every_steps}", "progress=test"]
    options += ["checkpoint.asynchronous=false"]  # what was written before a kill is there
    _train(ranks, folder, *options, "output=whole")
    assert [record["step"] for record in newest_run(folder, "whole").metrics() if record["kind"] == "memory"] == [10]
    for kind, step in kills:
        _killed(monkeypatch, kind, step, lambda: _train(ranks, folder, *options, "--resume", "auto"))
    run = newest_run(folder)
    assert run.metrics_path.read_bytes().endswith(b'"inter')
    refused = _train(0, folder, "model.hidden=11", "--resume", "auto", code=2)
    assert "model.hidden: 9 -> 11 (may not change" in refused.stderr
    assert run.metrics_path.read_bytes().endswith(b'"inter'), "a resume that is refused leaves the metrics alone"
    for _ in range(2):  # the second time there is nothing to train: evaluated once more, in place of the last time
        _train(ranks, folder, *options, "--resume", "auto")
        assert newest_run(folder).path == run.path
        records = _without_times(run.metrics())
        assert records == _without_times(newest_run(folder, "whole").metrics())
        assert [record["step"] for record in records if record["kind"] == "interval"] == list(range(1, 11))
    assert not list(run.path.glob("*unreadable*"))


def _without_times(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records that are the same in every run: none of starts, nor of what a job has waited for, read and held."""
    times = ("time", "images_per_second")
    of_jobs = ("progress", "start", "resume", "data", "reads", "memory")
    kept = [record for record in records if record["kind"] not in of_jobs]
    return [{key: value for key, value in record.items() if key not in times} for record in kept]


SYNTHETIC = ("data.train=synthetic", "data.test=synthetic", "data.augment=[flip]")
SIZES = "data.synthetic={height: 8, width: 6, classes: 3, samples: 50, test_samples: 7}"


def test_a_run_on_made_up_images_goes_on_bit_by_bit_and_notices_others(folder: Path) -> None:
    options = (*SYNTHETIC, SIZES, "epochs=1")
    whole = _train(2, folder, *options, "output=whole")
    assert "data synthetic: 50 images, batch 16, 4 steps per epoch" in whole.stdout
    assert "7 images)" in whole.stdout
    _train(2, folder, *options, "--steps", "2")
    refused = _train(0, folder, *options, "--resume", "auto", "data.synthetic.samples=60", code=2)
    assert "an epoch uses each image of one file once" in refused.output
    _train(2, folder, *options, "--resume", "auto")
    assert_same(newest_checkpoint(folder), newest_checkpoint(folder, "whole"))
    assert "7 samples" in hpctrain(0, folder, "eval", *options).stdout


def test_a_plan_takes_shape_and_classes_of_images_that_do_not_exist_yet(folder: Path) -> None:
    assert "There is no" not in hpctrain(0, folder, "plan show", *SYNTHETIC, SIZES, "--ranks", "2").output


# -- images of several sizes by epoch ------------------------------------------------------------------------------------------

BY_SIZE = tiny(
    "model: {name: small, channels: [3], hidden: 5}, epochs: 3, dtype: float64, batch_norm: {statistics: synchronised}, "
    "data: {train: FOLDER/train.h5, test: FOLDER/test.h5, augment: [{name: pad_crop, padding: 1}, {name: flip}]}, "
    "schedule: {name: cosine, warmup_epochs: 0.5}, checkpoint: {keep: 9}"
)
CHANGING = "data.sizes=[{size: 10}, {from_epoch: 1, size: 16}, {from_epoch: 2, size: 12}]"


@pytest.fixture
def by_size(tmp_path: Path) -> Path:
    """A configuration and two files of 16 x 16 pixels: 41 images to train on (the last batch has 9), 21 to test on."""
    return prepare(tmp_path, BY_SIZE, 41, 21, (16, 16, 1))


def test_a_run_goes_on_inside_of_any_size_on_as_many_ranks_or_others(by_size: Path) -> None:
    said = _train(0, by_size, CHANGING, "output=whole").stdout
    for line in ("images of 10 px from epoch 1", "images of 16 px from epoch 2", "images of 12 px from epoch 3"):
        assert line in said
    _train(0, by_size, CHANGING, "--steps", "4")  # an epoch has 3
    refused = _train(0, by_size, "--resume", "auto", "data.sizes=[{size: 14}]", code=2)
    assert "may change only between two epochs: all images of an epoch are prepared in the same way" in refused.output
    said = _train(0, by_size, CHANGING, "--resume", "auto", "--steps", "3").stdout
    assert "images of 16 px from epoch 2" in said
    assert "images of 12 px from epoch 3" in said
    _train(0, by_size, CHANGING, "--resume", "auto")
    assert_same(newest_checkpoint(by_size), newest_checkpoint(by_size, "whole"))
    records = list(newest_run(by_size).metrics())
    assert [(each["epoch"], each["size"]) for each in records if each["kind"] == "image_size"] == [(1, 10), (2, 16), (3, 12)]
    evaluations = [each for each in records if each["kind"] == "evaluation"]
    evaluated = whole_lines(hpctrain(0, by_size, "eval", CHANGING).stdout)
    assert f"top1 {evaluations[-1]['top1']:.2%}" in evaluated  # as stored: 16 px
    _train(2, by_size, CHANGING, "output=others", "--steps", "4")
    again = (CHANGING, "output=others", "--resume", "auto")
    _train(2, by_size, *again, "--steps", "1", "grid.rows=2", "plan.default=domain")
    _train(3, by_size, *again, "--steps", "2")
    _train(0, by_size, *again)
    assert_close(newest_checkpoint(by_size, "others"), newest_checkpoint(by_size, "whole"))


def test_one_size_that_is_the_images_own_trains_what_no_size_does(by_size: Path) -> None:
    _train(0, by_size, "epochs=1", "data.sizes=[{size: 16}]", "output=one")
    _train(0, by_size, "epochs=1", "data.sizes=[]")
    assert_same(newest_checkpoint(by_size, "one"), newest_checkpoint(by_size))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("data.augment=[{name: center_crop, size: 8}]", "data.sizes=[{size: 20}]"), "at most 16 fits"),
        (
            ("model={name: vgg11, width: 0.0625}", "data.sizes=[{size: 32}]"),
            "which this training or its evaluation also uses: Layer",
        ),
    ],
)
def test_what_no_size_can_be_is_reported_before_training(by_size: Path, overrides: tuple[str, ...], words: str) -> None:
    assert words in _train(0, by_size, *overrides, code=2).output
