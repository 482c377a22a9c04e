"""Classes have names: training, resume and evaluation go by them, whatever their order in a file."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data.writer import write_data_file
from hpctrain_testing.run import Outcome
from tests.support.tiny_runs import accuracy, assert_same, hpctrain, newest_checkpoint, sentence, tiny, whole_lines

pytestmark = pytest.mark.slow

CONFIG = tiny(
    "model: {name: small, channels: [3], hidden: 5}, data: {train: train.h5, test: test.h5}, "
    "optimizer: {name: sgd, lr: 0.1, momentum: 0.9}"
)
NAMES = ("cat", "dog", "owl")
SHUFFLED = ("owl", "cat", "dog")


def write_images(path: Path, count: int, seed: int, names: Sequence[str] = NAMES, height: int = 7) -> None:
    """Images whose brightness tells their class; the same ones, of the same classes, whatever the order of the names."""
    random = np.random.default_rng(seed)
    classes = random.integers(0, 3, count)
    images = (random.integers(0, 90, (count, height, 6, 1)) + 60 * classes[:, None, None, None]).astype(np.uint8)
    labels = np.array([list(names).index(NAMES[number]) if NAMES[number] in names else 2 for number in classes])
    write_data_file(path, count, (height, 6, 1), list(names), [(images, labels)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_images(tmp_path / "train.h5", 75, 0)
    write_images(tmp_path / "test.h5", 41, 1)
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    return tmp_path


def _refused(folder: Path, command: str, *more: str, ranks: int = 0) -> str:
    return sentence(hpctrain(ranks, folder, command, *more, code=2))


def _tested(outcome: Outcome) -> str:
    """What `eval` found: loss and accuracies."""
    return whole_lines(outcome.stdout).split("samples, ")[1].split("\n")[0]


def test_eval_needs_no_training_file_and_goes_by_the_classes_names(folder: Path) -> None:
    trained = accuracy(hpctrain(0, folder, "train"))
    (folder / "train.h5").unlink()
    expected = _tested(hpctrain(0, folder, "eval"))
    assert f"top1 {trained}%" in expected
    write_images(folder / "test.h5", 41, 1, SHUFFLED)
    outcome = hpctrain(2, folder, "eval")
    assert _tested(outcome) == expected
    assert outcome.stdout.count("has another order of classes than the checkpoint; its labels are mapped by class name") == 1
    for names, words in (
        (("cat", "dog", "fox"), "class 2 is 'fox' and 'owl'"),
        (("cat", "dog", "owl", "fox"), "there are 4 and 3 classes, 'fox'"),
    ):
        write_images(folder / "test.h5", 41, 1, names)
        assert words in _refused(folder, "eval", ranks=2)


def test_eval_refuses_another_model(folder: Path) -> None:
    hpctrain(0, folder, "train", "--steps", "1")
    hpctrain(0, folder, "eval", "model.classes=3", "optimizer={name: lars, lr: 1}", "seed=5", "epochs=0")  # not of the model
    line = _refused(folder, "eval", "data.normalise=false", "batch_norm.epsilon=0.1")
    assert "data.normalise: true -> false" in line
    assert "batch_norm.epsilon: 1.0e-05 -> 0.1" in line


def test_eval_refuses_images_of_another_shape_though_the_network_could_take_them(folder: Path) -> None:
    hpctrain(0, folder, "train", "--steps", "1", "model.grid=1")
    write_images(folder / "test.h5", 41, 1, height=9)
    (folder / "train.h5").unlink()
    line = _refused(folder, "eval", "model.grid=1", "data.augment=[]", ranks=2)
    assert "Evaluation images have shape (9, 6, 1) after augmentation, but training images (7, 6, 1)" in line


def test_training_maps_or_refuses_the_test_file_s_classes(folder: Path) -> None:
    expected = hpctrain(0, folder, "train", "epochs=1").stdout.split("test accuracy: ")[1].split("\n")[0]
    write_images(folder / "test.h5", 41, 1, SHUFFLED)
    outcome = hpctrain(0, folder, "train", "epochs=1")
    assert outcome.stdout.split("test accuracy: ")[1].split("\n")[0] == expected
    assert "test.h5 has another order of classes than train.h5; its labels are mapped by class name" in whole_lines(
        outcome.stdout
    )
    write_images(folder / "test.h5", 41, 1, ("cat", "dog", "fox"))
    assert "class 2 is 'fox' and 'owl'" in _refused(folder, "train", ranks=2)


def test_a_resume_goes_on_with_the_same_classes_in_another_order(folder: Path) -> None:
    """Also inside an epoch: the labels, once mapped, are the same."""
    whole = ("output=whole", "--resume", "auto", "--steps", "3")
    for _ in range(2):
        hpctrain(0, folder, "train", *whole)
    hpctrain(0, folder, "train", "--steps", "3")
    write_images(folder / "train.h5", 75, 0, SHUFFLED)
    outcome = hpctrain(0, folder, "train", "--steps", "3", "--resume", "auto")
    assert "train.h5 has another order of classes than the checkpoint" in whole_lines(outcome.stdout)
    assert newest_checkpoint(folder).meta["data"] == newest_checkpoint(folder, "whole").meta["data"]
    assert_same(newest_checkpoint(folder), newest_checkpoint(folder, "whole"))


def test_a_resume_with_other_classes_is_refused_and_other_images_keep_the_normalisation(folder: Path) -> None:
    hpctrain(0, folder, "train", "epochs=1")
    write_images(folder / "fox.h5", 75, 0, ("cat", "dog", "fox"))
    line = _refused(folder, "train", "--resume", "auto", f"data.train={folder}/fox.h5", ranks=2)
    assert "class 2 is 'fox' and 'owl'" in line
    write_images(folder / "more.h5", 80, 5)
    before = newest_checkpoint(folder).meta["data"]
    outcome = hpctrain(0, folder, "train", "--resume", "auto", f"data.train={folder}/more.h5")
    assert "images are normalised with the mean and deviation of the checkpoint, not with those of" in whole_lines(outcome.stdout)
    after = newest_checkpoint(folder).meta["data"]
    assert after["samples"] == 80  # type: ignore[index]
    for key in ("mean", "std", "class_names"):
        assert after[key] == before[key]  # type: ignore[index]
