"""Classes have names: training, resume and evaluation go by them, whatever their order in a file."""

from collections.abc import Callable, Sequence
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpctrain.data import format as data_format
from hpctrain.storage import checkpoint
from hpctrain.storage.run_directory import latest
from tests.support.jobs import Outcome

Job = Callable[..., Outcome]

CONFIG = """
name: tiny
backend: numpy
progress: test
model: {{name: small, channels: [3], hidden: 5}}
data: {{train: {folder}/train.h5, test: {folder}/test.h5}}
batch: 16
epochs: 2
optimizer: {{name: sgd, lr: 0.1, momentum: 0.9}}
schedule: constant
deadline_seconds: 60
output: {folder}/runs
"""
NAMES = ("cat", "dog", "owl")
SHUFFLED = ("owl", "cat", "dog")


def write_images(path: Path, count: int, seed: int, names: Sequence[str] = NAMES, height: int = 7) -> None:
    """Images whose brightness tells their class; the same ones, of the same classes, whatever the order of the names."""
    random = np.random.default_rng(seed)
    classes = random.integers(0, 3, count)
    images = (random.integers(0, 90, (count, height, 6, 1)) + 60 * classes[:, None, None, None]).astype(np.uint8)
    labels = np.array([list(names).index(NAMES[number]) if NAMES[number] in names else 2 for number in classes])
    data_format.write(path, count, (height, 6, 1), list(names), [(images, labels)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_images(tmp_path / "train.h5", 75, 0)
    write_images(tmp_path / "test.h5", 41, 1)
    (tmp_path / "tiny.yaml").write_text(CONFIG.format(folder=tmp_path))
    return tmp_path


def _run(job: Job, folder: Path, command: str, *more: str, ranks: int = 0) -> Outcome:
    outcome = job(ranks, ["-m", "hpctrain", command, "tiny.yaml", *more], cwd=folder)
    assert outcome.code == 0, outcome.output
    return outcome


def _refused(job: Job, folder: Path, command: str, *more: str, ranks: int = 0) -> str:
    outcome = job(ranks, ["-m", "hpctrain", command, "tiny.yaml", *more], cwd=folder)
    assert outcome.code == 2, outcome.output
    (line,) = [line for line in outcome.stderr.splitlines() if line.startswith("hpctrain: ")]
    return line


def _tested(outcome: Outcome) -> str:
    """What `eval` found: loss and accuracies."""
    return outcome.stdout.split("samples, ")[1].split("\n")[0]


def _last(folder: Path, output: str = "runs") -> checkpoint.CheckpointContent:
    run = latest(folder / output, "tiny")
    assert run is not None
    newest = checkpoint.read_newest(run.checkpoints)
    assert newest is not None
    return newest[1]


def test_eval_needs_no_training_file_and_goes_by_the_classes_names(job: Job, folder: Path) -> None:
    trained = _run(job, folder, "train").stdout.split("test accuracy ")[1].split("%")[0]
    (folder / "train.h5").unlink()
    expected = _tested(_run(job, folder, "eval"))
    assert f"top1 {trained}%" in expected
    write_images(folder / "test.h5", 41, 1, SHUFFLED)
    outcome = _run(job, folder, "eval", ranks=2)
    assert _tested(outcome) == expected
    assert outcome.stdout.count("has its classes in another order than the checkpoint; its labels are mapped by name") == 1
    for names, words in (
        (("cat", "dog", "fox"), "class 2 is 'fox' and 'owl'"),
        (("cat", "dog", "owl", "fox"), "there are 4 and 3 classes, 'fox'"),
    ):
        write_images(folder / "test.h5", 41, 1, names)
        assert words in _refused(job, folder, "eval", ranks=2)


def test_eval_refuses_another_model(job: Job, folder: Path) -> None:
    _run(job, folder, "train", "--steps", "1")
    _run(job, folder, "eval", "model.classes=3", "optimizer={name: lars, lr: 1}", "seed=5", "epochs=0")  # not of the model
    line = _refused(job, folder, "eval", "data.normalise=false", "batch_norm.epsilon=0.1")
    assert "data.normalise: true -> false" in line
    assert "batch_norm.epsilon: 1.0e-05 -> 0.1" in line


def test_eval_refuses_images_of_another_shape_though_the_network_could_take_them(job: Job, folder: Path) -> None:
    _run(job, folder, "train", "--steps", "1", "model.grid=1")
    write_images(folder / "test.h5", 41, 1, height=9)
    (folder / "train.h5").unlink()
    line = _refused(job, folder, "eval", "model.grid=1", "data.augment=[]", ranks=2)
    assert "Test images come out as (9, 6, 1), training images as (7, 6, 1)" in line


def test_eval_of_the_first_format_asks_the_training_file(job: Job, folder: Path) -> None:
    _run(job, folder, "train", "--steps", "1")
    expected = _tested(_run(job, folder, "eval"))
    run = latest(folder / "runs", "tiny")
    assert run is not None
    (path,) = run.checkpoints.iterdir()
    content = checkpoint.read(path)
    meta = {key: value for key, value in content.meta.items() if key != "data"}
    checkpoint.write(path, checkpoint.CheckpointContent(content.tensors, meta))
    with h5py.File(path, "r+") as file:
        file.attrs["format_version"] = 1
    assert _tested(_run(job, folder, "eval")) == expected
    (folder / "train.h5").unlink()
    assert "train.h5" in _refused(job, folder, "eval")


def test_training_maps_or_refuses_the_test_file_s_classes(job: Job, folder: Path) -> None:
    expected = _run(job, folder, "train", "epochs=1").stdout.split("test accuracy ")[1].split("\n")[0]
    write_images(folder / "test.h5", 41, 1, SHUFFLED)
    outcome = _run(job, folder, "train", "epochs=1")
    assert outcome.stdout.split("test accuracy ")[1].split("\n")[0] == expected
    assert f"test.h5 has its classes in another order than {folder}/train.h5; its labels are mapped by name" in outcome.stdout
    write_images(folder / "test.h5", 41, 1, ("cat", "dog", "fox"))
    assert "class 2 is 'fox' and 'owl'" in _refused(job, folder, "train", ranks=2)


def test_a_resume_goes_on_with_the_same_classes_in_another_order(job: Job, folder: Path) -> None:
    """Also inside an epoch: the labels, once mapped, are the same."""
    whole = ("output=whole", "--resume", "auto", "--steps", "3")
    for _ in range(2):
        _run(job, folder, "train", *whole)
    _run(job, folder, "train", "--steps", "3")
    write_images(folder / "train.h5", 75, 0, SHUFFLED)
    outcome = _run(job, folder, "train", "--steps", "3", "--resume", "auto")
    assert "train.h5 has its classes in another order than the checkpoint" in outcome.stdout
    ours, theirs = _last(folder), _last(folder, "whole")
    assert ours.meta["data"] == theirs.meta["data"]
    for key, tensor in theirs.tensors.items():
        assert np.array_equal(ours.tensors[key], tensor), key


def test_a_resume_with_other_classes_is_refused_and_other_images_keep_the_normalisation(job: Job, folder: Path) -> None:
    _run(job, folder, "train", "epochs=1")
    write_images(folder / "fox.h5", 75, 0, ("cat", "dog", "fox"))
    line = _refused(job, folder, "train", "--resume", "auto", f"data.train={folder}/fox.h5", ranks=2)
    assert "class 2 is 'owl' and 'fox'" in line
    write_images(folder / "more.h5", 80, 5)
    before = _last(folder).meta["data"]
    outcome = _run(job, folder, "train", "--resume", "auto", f"data.train={folder}/more.h5")
    assert "images are normalised with the mean and deviation of the checkpoint, not with those of" in outcome.stdout
    after = _last(folder).meta["data"]
    assert after["samples"] == 80  # type: ignore[index]
    for key in ("mean", "std", "class_names"):
        assert after[key] == before[key]  # type: ignore[index]
