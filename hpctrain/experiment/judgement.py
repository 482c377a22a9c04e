"""A checkpoint's judgement of every test image: which class was taken for which, and images that it got right and wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpctrain.comm.raise_on_all_ranks import raise_on_all_ranks
from hpctrain.run.evaluation import EvaluationParts, build_parts, existing_checkpoint, require_test_set
from hpctrain.job.session import Session
from hpctrain.train.confusion import ConfusionMatrix
from hpctrain.train.predictor import TopClasses, predict


@dataclass(frozen=True)
class JudgedImage:
    """One image of a test set.

    Args:
        number: in the file. pixels: (H, W, C) uint8, as they are stored. label, prediction: classes. probability: of the latter.
    """

    number: int
    pixels: np.ndarray
    label: int
    prediction: int
    probability: float


@dataclass(frozen=True)
class Judgement:
    """The judgement of a test set.

    Args:
        checkpoint: whose it is. class_names: by label. confusion: which class was taken for which. right: of each class the
            surest image; wrong: the surest mistakes; the surest first.
    """

    checkpoint: Path
    class_names: tuple[str, ...]
    confusion: ConfusionMatrix
    right: tuple[JudgedImage, ...]
    wrong: tuple[JudgedImage, ...]


def judge(session: Session, source: str, most: int) -> Judgement:
    """Judge the configured test set. Collective; every rank has the result.

    Args:
        source: as `find_checkpoint` takes it. most: images that are wanted of those that are right, and of those that are wrong.

    Raises:
        ConfigError, CheckpointError, DataError, ShapeError: as `run_evaluation`.
    """
    require_test_set(session)
    path, content = existing_checkpoint(session, source)
    parts = build_parts(session, path, content)
    replica = parts.replica
    batches = predict(replica.network, parts.loader, replica.groups.all_ranks, session.progress, 1)
    predictions, probabilities = _joined(batches)
    return raise_on_all_ranks(session.world, lambda: _judgement(path, parts, predictions, probabilities, most))


def _joined(batches: Iterable[TopClasses]) -> tuple[np.ndarray, np.ndarray]:
    """The most probable class of every sample, (N,) int64, and its probability, (N,) float64."""
    pairs = [(batch.labels[:, 0], batch.probabilities[:, 0]) for batch in batches]
    return np.concatenate([labels for labels, _ in pairs]), np.concatenate([values for _, values in pairs])


def _judgement(path: Path, parts: EvaluationParts, predictions: np.ndarray, probabilities: np.ndarray, most: int) -> Judgement:
    file = parts.images.file
    labels, classes = file.labels, len(file.class_names)
    decided = ~np.isnan(probabilities)
    width = classes + 1  # the last prediction is of no class
    cells, counts = np.unique(labels * width + np.where(decided, predictions, classes), return_counts=True)
    confusion = ConfusionMatrix(classes, cells // width, cells % width, counts.astype(np.int64))
    surest = [number for number in np.argsort(-probabilities, kind="stable").tolist() if decided[number]]
    wrong = [number for number in surest if predictions[number] != labels[number]]
    of_class = {labels[number]: number for number in reversed(surest) if predictions[number] == labels[number]}
    right = sorted(of_class.values(), key=lambda number: -probabilities[number])

    def images(numbers: list[int]) -> tuple[JudgedImage, ...]:
        return tuple(
            JudgedImage(number, file.pixels[number], int(labels[number]), int(predictions[number]), float(probabilities[number]))
            for number in numbers[:most]
        )

    return Judgement(path, file.class_names, confusion, images(right), images(wrong))
