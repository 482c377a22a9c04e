"""Confusions are the plain dense count, however samples are dealt to ranks, and hits are those of the loss."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.backend.kernels.numpy.loss import SoftmaxCrossEntropy
from hpctrain.backend.kernels.specs import SoftmaxCrossEntropySpec
from hpctrain.train import confusion
from hpctrain.train.confusion import ClassScore, ConfusionCounts, ConfusionMatrix
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine

CLASSES, SAMPLES = 7, 225


def _samples() -> tuple[np.ndarray, np.ndarray]:
    """Labels, and scores of which many are equal, some NaN and some infinite."""
    random = np.random.default_rng(5)
    scores = random.integers(0, 3, (SAMPLES, CLASSES)).astype(np.float32)
    scores[random.random(SAMPLES) < 0.1, 2] = np.nan
    scores[4, 3] = np.inf
    scores[5] = -np.inf
    return random.integers(0, CLASSES - 1, SAMPLES), scores  # the last class has no sample


def _dense(labels: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """(classes, classes + 1), one sample after another."""
    expected = np.zeros((CLASSES, CLASSES + 1), np.int64)
    for label, of_sample in zip(labels, scores, strict=True):
        undecided = any(np.isnan(of_sample))
        expected[label, CLASSES if undecided else list(of_sample).index(max(of_sample))] += 1
    return expected


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_any_ranks_count_what_one_loop_counts(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confusion, "_BLOCK_CELLS", 3 * (CLASSES + 1) - 1)  # two labels at once
    monkeypatch.setattr(confusion, "_MOST_PENDING", 9)
    labels, scores = _samples()

    def count(comm: ThreadCommunicator) -> ConfusionMatrix:
        counts = ConfusionCounts(CLASSES)
        own = slice(100, 100) if comm.rank == 1 and ranks > 2 else slice(comm.rank, None, ranks)  # a rank may have nothing
        for part in np.array_split(np.arange(SAMPLES)[own], 5):
            counts.add(labels[part], scores[part])
        return counts.summed(comm, virtual_engine(comm))

    kept = [sample for sample in range(SAMPLES) if ranks < 3 or sample % ranks != 1]
    expected = _dense(labels[kept], scores[kept])
    for matrix in run_virtual(ranks, count, seed=3):
        assert np.array_equal([matrix.of_label(label) for label in range(CLASSES)], expected)
        assert matrix.undecided == expected[:, CLASSES].sum() > 0
        assert (matrix.counts > 0).all(), "only cells that are not zero are kept"


def test_hits_are_those_of_the_loss() -> None:
    labels, scores = _samples()
    counts = ConfusionCounts(CLASSES)
    counts.add(labels, scores)
    losses = SoftmaxCrossEntropy(SoftmaxCrossEntropySpec()).run(scores, labels, 1, None)
    assert sum(score.hits for score in _summed(counts).scores()) == losses.top1


def test_the_worst_class_comes_first_and_one_without_samples_last() -> None:
    matrix = _matrix([[5, 0, 1, 0], [3, 1, 0, 4], [0, 0, 0, 0]])
    assert matrix.worst_first() == [
        ClassScore(1, 8, 1, 1, 0, 3),  # its samples that are of no class are of no other class either
        ClassScore(0, 6, 5, 8, 2, 1),
        ClassScore(2, 0, 0, 1, None, 0),
    ]
    assert [score.top1 for score in matrix.worst_first()] == [1 / 8, 5 / 6, None]
    assert matrix.largest_confusions(2) == [(1, 3, 4), (1, 0, 3)]
    assert matrix.undecided == 4


def _matrix(counts: list[list[int]]) -> ConfusionMatrix:
    labels, predictions = np.nonzero(counts)
    return ConfusionMatrix(len(counts), labels, predictions, np.array(counts)[labels, predictions])


def _summed(counts: ConfusionCounts) -> ConfusionMatrix:
    (matrix,) = run_virtual(1, lambda comm: counts.summed(comm, virtual_engine(comm)))
    return matrix


def test_no_sample_is_an_empty_matrix() -> None:
    counts = ConfusionCounts(3)
    counts.add(np.zeros(0, np.int64), np.zeros((0, 3)))
    assert [score.samples for score in _summed(counts).scores()] == [0, 0, 0]
