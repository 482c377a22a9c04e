"""`hpctrain predict` and the options of `hpctrain eval` as users start them, with no configuration at hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from hpctrain.process.ends import USER_ERROR
from hpctrain_testing.run import Outcome
from tests.support.here import run_here
from tests.support.runs import CLASSES, train

pytestmark = pytest.mark.slow

SAMPLES = 21


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `runs`, `test.h5` and the pictures that it was made of, without the training data."""
    folder = train(tmp_path_factory.mktemp("trained"), layout="sharded").folder
    shutil.rmtree(folder / "train")
    (folder / "train.h5").unlink()
    return folder


def _hpctrain(ranks: int, folder: Path, *words: str, code: int = 0) -> Outcome:
    outcome = run_here(ranks, ["-m", "hpctrain", *words], cwd=folder)
    assert outcome.code == code, outcome.output
    assert "Traceback" not in outcome.output
    return outcome


def _lines(outcome: Outcome) -> list[dict]:
    return [json.loads(line) for line in outcome.stdout.splitlines()]


def test_a_run_needs_no_configuration_and_ranks_divide_the_pictures(folder: Path) -> None:
    kept = (folder / "tiny.yaml").rename(folder / "elsewhere.yaml")
    try:
        alone = _lines(_hpctrain(0, folder, "predict", "test", "--json"))
        grid = ("--set", "grid.rows=3", "--set", "plan.default=domain", "--batch", "4")
        split = _lines(_hpctrain(3, folder, "predict", "test", "--json", *grid))
    finally:
        kept.rename(folder / "tiny.yaml")
    assert [one["image"] for one in split] == [one["image"] for one in alone] == sorted(one["image"] for one in alone)
    assert len(alone) == SAMPLES
    for one, other in zip(alone, split, strict=True):
        assert [each["label"] for each in one["predictions"]] == [each["label"] for each in other["predictions"]]
        probabilities = [[each["probability"] for each in answer["predictions"]] for answer in (one, other)]
        assert np.allclose(*probabilities, rtol=1e-12)
    assert {each["class"] for each in alone[0]["predictions"]} == set(CLASSES)


def test_a_broken_picture_is_named_and_the_code_says_so(folder: Path) -> None:
    (folder / "broken.jpg").write_text("no image")
    good = next(str(path.relative_to(folder)) for path in sorted((folder / "test").rglob("*.jpg")))
    words = ("predict", good, "broken.jpg", good, "--top", "1", "--flip")
    outcome = _hpctrain(2, folder, *words, code=USER_ERROR)
    said = [line for line in outcome.stderr.splitlines() if line.startswith("hpctrain: ")]
    assert said == ["hpctrain: 1 of 3 images could not be predicted: broken.jpg."]
    assert "abort" not in outcome.stderr.lower(), "the ranks end MPI together"
    lines = outcome.stdout.splitlines()
    error = " ".join(lines[3:-1])  # folded at the width of the terminal
    assert error == "broken.jpg: The image cannot be decoded: its format is not supported; save it as JPEG or PNG."
    assert lines[2] == lines[-1]
    assert lines[2].startswith(good)
    assert lines[2].endswith("%")


def test_eval_has_classes_confusions_and_mirror_images_on_any_ranks(folder: Path) -> None:
    words = ("eval", "tiny.yaml", "--flip", "--per-class", "--json", "--confusion")
    alone = json.loads(_hpctrain(0, folder, *words).stdout)
    other = json.loads(_hpctrain(3, folder, *words, "--checkpoint", "auto").stdout)
    assert alone["flip"] is other["flip"] is True
    assert (other["classes"], other["confusion"]) == (alone["classes"], alone["confusion"])
    assert (other["hits1"], other["samples"]) == (alone["hits1"], SAMPLES)
    matrix = np.array(alone["confusion"]["matrix"])
    assert (matrix.sum(), np.trace(matrix)) == (SAMPLES, alone["hits1"])
    pictures = _lines(_hpctrain(0, folder, "predict", "test", "--json", "--flip", "--top", "1"))
    hits = sum(one["predictions"][0]["class"] == Path(one["image"]).parent.name for one in pictures)
    assert hits == alone["hits1"]
