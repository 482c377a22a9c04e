"""`hpctrain train` with images of several sizes by epoch: what is said and kept, resumes anywhere, and what one size changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data import format as data_format
from hpctrain.storage import checkpoint
from hpctrain.storage.run_directory import RunDirectory, latest
from tests.support.jobs import Outcome

Job = Callable[..., Outcome]

CONFIG = """
name: tiny
seed: 7
dtype: float64
backend: numpy
progress: test
model: {{name: small, channels: [3], hidden: 5}}
batch_norm: {{statistics: synchronised}}
data:
  train: {folder}/train.h5
  test: {folder}/test.h5
  augment: [pad_crop, flip]
  sizes: [{{size: 10}}, {{from_epoch: 1, size: 16}}, {{from_epoch: 2, size: 12}}]
batch: 16
epochs: 3
optimizer: {{name: sgd, lr: 0.05, momentum: 0.9}}
schedule: {{name: cosine, warmup_epochs: 0.5}}
deadline_seconds: 60
output: {folder}/runs
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration and two files of 16 x 16 pixels: 41 images to train on (the last batch has 9), 21 to test on."""
    random = np.random.default_rng(0)
    for name, count in (("train", 41), ("test", 21)):
        images = random.integers(0, 256, (count, 16, 16, 1), dtype=np.uint8)
        labels = random.integers(0, 3, count)
        data_format.write(tmp_path / f"{name}.h5", count, (16, 16, 1), ["a", "b", "c"], [(images, labels)])
    (tmp_path / "tiny.yaml").write_text(CONFIG.format(folder=tmp_path))
    return tmp_path


def _run(job: Job, folder: Path, *more: str, ranks: int = 0, command: str = "train") -> str:
    outcome = job(ranks, ["-m", "hpctrain", command, "tiny.yaml", *more], cwd=folder)
    assert outcome.code == 0, outcome.output
    return outcome.output


def _directory(folder: Path, name: str) -> RunDirectory:
    run = latest(folder / "runs", name)
    assert run is not None
    return run


def _last(folder: Path, name: str) -> dict[str, np.ndarray]:
    newest = checkpoint.read_newest(_directory(folder, name).checkpoints)
    assert newest is not None
    return {key: np.asarray(value) for key, value in newest[1].tensors.items()}


def _same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


@pytest.mark.slow
@pytest.mark.job
def test_a_run_goes_on_inside_of_any_size_on_as_many_ranks_or_others(job: Job, folder: Path) -> None:
    said = _run(job, folder, "name=whole")
    for line in ("images of 10 px from epoch 1", "images of 16 px from epoch 2", "images of 12 px from epoch 3"):
        assert line in said
    whole = _last(folder, "whole")
    _run(job, folder, "--steps", "4")  # an epoch has 3
    said = _run(job, folder, "--resume", "auto", "--steps", "3")
    assert "images of 16 px from epoch 2" in said
    assert "images of 12 px from epoch 3" in said
    _run(job, folder, "--resume", "auto")
    assert _same(_last(folder, "tiny"), whole)
    sizes = [
        (record["epoch"], record["size"]) for record in _directory(folder, "tiny").metrics() if record["kind"] == "image_size"
    ]
    assert sizes == [(1, 10), (2, 16), (3, 12)]
    evaluations = [record for record in _directory(folder, "tiny").metrics() if record["kind"] == "evaluation"]
    assert f"top1 {evaluations[-1]['top1']:.2%}" in _run(job, folder, command="eval")  # as stored: 16 px
    _run(job, folder, "name=others", "--steps", "4", ranks=2)
    _run(job, folder, "name=others", "--resume", "auto", "--steps", "1", "grid.rows=2", "plan.default=domain", ranks=2)
    _run(job, folder, "name=others", "--resume", "auto", "--steps", "2", ranks=3)
    _run(job, folder, "name=others", "--resume", "auto")
    for name, values in _last(folder, "others").items():
        np.testing.assert_allclose(values, whole[name], rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.slow
@pytest.mark.job
def test_one_size_that_is_the_images_own_trains_what_no_size_does(job: Job, folder: Path) -> None:
    _run(job, folder, "name=one", "epochs=1", "data.sizes=[{size: 16}]")
    _run(job, folder, "name=none", "epochs=1", "data.sizes=[]")
    assert _same(_last(folder, "one"), _last(folder, "none"))


@pytest.mark.slow
@pytest.mark.job
def test_sizes_change_between_epochs_only(job: Job, folder: Path) -> None:
    _run(job, folder, "--steps", "4")
    change = "data.sizes=[{size: 14}]"
    outcome = job(0, ["-m", "hpctrain", "train", "tiny.yaml", "--resume", "auto", change], cwd=folder)
    assert outcome.code == 2
    assert "may change between two epochs only: an epoch sees one kind of images" in outcome.output


@pytest.mark.slow
@pytest.mark.job
@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("data.augment=[{name: center_crop, size: 8}]", "data.sizes=[{size: 20}]"), "at most 16 fits"),
        (
            ("model={name: vgg11, width: 0.0625}", "data.sizes=[{size: 32}]"),
            "another size of this training or its evaluation: Layer",
        ),
    ],
)
def test_what_no_size_can_be_is_told_before_training(job: Job, folder: Path, overrides: tuple[str, ...], sentence: str) -> None:
    outcome = job(0, ["-m", "hpctrain", "train", "tiny.yaml", *overrides], cwd=folder)
    assert outcome.code == 2, outcome.output
    assert sentence in outcome.output
