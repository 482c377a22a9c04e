"""Predictions of pictures are, to the last bit, what an evaluation computes for the same images in a data file."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hpctrain.errors import CheckpointError, DataError
from hpctrain.experiment.evaluation import run_evaluation
from hpctrain.experiment.prediction import PredictedPicture, PredictionRequest, run_prediction
from hpctrain.experiment.session import Session
from hpctrain.storage import checkpoint
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.train.confusion import ConfusionCounts
from hpctrain.train.scores import log_softmax
from tests.support.trained_run import CLASSES, GRIDS, TrainedRun, train
from tests.support.virtual_runs import work_virtual


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    return train(tmp_path_factory.mktemp("trained"), "ema.decay=0.5", dtype="float32", layout="sharded")


def _predicted(
    trained: TrainedRun, grid: str, request: PredictionRequest | None = None, source: str | None = None
) -> list[PredictedPicture]:
    """The answers, the same on all ranks of a grid; by default of all test pictures, in the batches of the evaluation."""
    request = request or PredictionRequest((trained.folder / "test",))

    def work(session: Session) -> list[PredictedPicture]:
        return list(run_prediction(session, source or str(trained.run.path), request).answers)

    ranks, overrides = GRIDS[grid]
    first, *others = work_virtual(ranks, trained.file, overrides, work)
    assert all(other == first for other in others)
    return first


def _probabilities(answers: list[PredictedPicture]) -> np.ndarray:
    """(N, classes), by label."""
    return np.array([[one.probability for one in sorted(each.classes, key=lambda one: one.label)] for each in answers])


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(("grid", "flip"), [("1", False), ("1x3", True), ("domain 3x1", False), ("mixed 2x2", True)])
def test_pictures_have_the_bits_of_the_evaluation(
    trained: TrainedRun, grid: str, flip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation's own scores, as they are counted, of images that the converter has decoded."""
    ranks, overrides = GRIDS[grid]
    scores: dict[str, list[np.ndarray]] = {}

    def add(self: ConfusionCounts, labels: np.ndarray, of_batch: np.ndarray) -> None:
        scores.setdefault(f"{id(self)}", []).append(np.array(of_batch))
        plain_add(self, labels, of_batch)

    plain_add = ConfusionCounts.add
    monkeypatch.setattr(ConfusionCounts, "add", add)
    work = partial(run_evaluation, source=str(trained.run.path), flip=flip, confusion=True)
    (evaluation, *_) = work_virtual(ranks, trained.file, overrides, work)
    answers = _predicted(trained, grid, PredictionRequest((trained.folder / "test",), flip=flip))
    found = _probabilities(answers)
    evaluated = np.concatenate([log_softmax(one) if not flip else one for batches in scores.values() for one in batches])
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, np.exp(evaluated).tolist()))
    hits = sum(each.classes[0].name == each.file.parent.name for each in answers)
    assert (hits, len(answers)) == (evaluation.sums.top1, evaluation.sums.count)


@pytest.mark.parametrize(("grid", "flip"), [("1", False), ("mixed 2x2", True)])
def test_averaged_weights_predict_what_they_are_evaluated_with(trained: TrainedRun, grid: str, flip: bool) -> None:
    ranks, overrides = GRIDS[grid]
    work = partial(run_evaluation, source=str(trained.run.path), averaged=True, flip=flip)
    (evaluation, *_) = work_virtual(ranks, trained.file, overrides, work)
    request = PredictionRequest((trained.folder / "test",), flip=flip, averaged=True)
    answers = _predicted(trained, grid, request)
    of_truth = [next(one.probability for one in each.classes if one.name == each.file.parent.name) for each in answers]
    assert -np.log(of_truth).sum() == pytest.approx(evaluation.sums.loss, rel=1e-5)
    assert answers != _predicted(trained, grid, replace(request, averaged=False))


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("grid", [grid for grid in GRIDS if grid != "1"])
def test_any_grid_answers_in_order(trained: TrainedRun, grid: str) -> None:
    files = tuple(sorted((trained.folder / "test").rglob("*.*")))
    chosen = (*files[::-1], files[3])
    found, expected = (_predicted(trained, one, PredictionRequest(chosen, batch=5)) for one in (grid, "1"))
    assert [each.file for each in found] == list(chosen)
    assert np.allclose(_probabilities(found), _probabilities(expected), rtol=1e-5)
    assert np.allclose(_probabilities(found).sum(axis=1), 1, rtol=1e-14)
    assert {one.name for one in found[0].classes} == set(CLASSES)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(("grid", "flip"), [("1", True), ("1x4", False), ("tiles 4x1", True)])
def test_a_broken_picture_disturbs_no_other(trained: TrainedRun, grid: str, flip: bool, tmp_path: Path) -> None:
    good = sorted((trained.folder / "test").rglob("*.*"))[:3]
    (tmp_path / "bad.jpg").write_text("no image")
    places = (good[0], tmp_path / "bad.jpg", good[1], good[2])
    answers = _predicted(trained, grid, PredictionRequest(places, flip=flip, batch=4, top=1))
    assert [each.file for each in answers] == list(places)
    assert answers[1] == PredictedPicture(places[1], error="The image cannot be decoded: it is of no format that hpctrain reads.")
    alone = _predicted(trained, "1", PredictionRequest(tuple(good), flip=flip, top=1))
    for each, other in zip([answers[0], *answers[2:]], alone, strict=True):
        assert each.classes[0].name == other.classes[0].name
        assert np.isclose(each.classes[0].probability, other.classes[0].probability, rtol=1e-5)


def test_a_checkpoint_without_the_form_of_evaluation_images_takes_that_of_training(trained: TrainedRun, tmp_path: Path) -> None:
    _, newest = checkpoint.checkpoints(trained.run.checkpoints)[-1]
    content = checkpoint.read(newest)
    old = CheckpointContent(
        dict(content.tensors), {key: value for key, value in content.meta.items() if key != "evaluation_images"}
    )
    checkpoint.write(tmp_path / "old.h5", old)
    request = PredictionRequest((trained.folder / "train",), fit="crop")
    found = _predicted(trained, "1", request, str(tmp_path / "old.h5"))
    assert _probabilities(found).shape == (21, 3)
    as_trained = _predicted(trained, "1", replace(request, fit=None), str(tmp_path / "old.h5"))
    assert found == as_trained
    assert found != _predicted(trained, "1", replace(request, fit="squash"), str(tmp_path / "old.h5"))


def test_outputs_that_are_not_finite_are_said(trained: TrainedRun, tmp_path: Path) -> None:
    _, newest = checkpoint.checkpoints(trained.run.checkpoints)[-1]
    content = checkpoint.read(newest)
    tensors = {key: np.array(value) for key, value in content.tensors.items()}
    key = next(name for name in tensors if name.startswith("parameters/") and name.endswith("bias"))
    tensors[key][...] = np.nan
    checkpoint.write(tmp_path / "nan.h5", CheckpointContent(tensors, content.meta))
    answers = _predicted(trained, "1x2", source=str(tmp_path / "nan.h5"))
    assert {each.error for each in answers} == {"The network's outputs for the image are not finite."}


def test_what_is_not_there_is_said_on_all_ranks(trained: TrainedRun) -> None:
    with pytest.raises(DataError, match=r"There is no image nowhere\.png"):
        _predicted(trained, "1x2", PredictionRequest((Path("nowhere.png"),)))
    with pytest.raises(CheckpointError, match="nowhere is no run directory"):
        _predicted(trained, "1x2", source="nowhere")
