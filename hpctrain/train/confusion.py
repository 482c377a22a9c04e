"""Confusion matrices: which class an evaluation took for which, in integers that are exact on any number of ranks.

A matrix of 20,000 classes has 400 million cells, few of which are not zero: only those are kept, and ranks add theirs in blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine

_BLOCK_CELLS = 1 << 20  # that ranks add at once: 8 MiB
_MOST_PENDING = 1 << 16  # samples that are not counted together yet


@dataclass(frozen=True)
class ClassScore:
    """The results of one class.

    Args:
        label: of the class. samples: that are of it. hits: of these, that were taken for it.
        predictions: samples of any class that were taken for it.
        rival: the class that its other samples were most often taken for, the first of several; None: there is none.
        rival_count: how often.
    """

    label: int
    samples: int
    hits: int
    predictions: int
    rival: int | None
    rival_count: int

    @property
    def top1(self) -> float | None:
        """Share of its samples that were taken for it; None where it has no sample."""
        return self.hits / self.samples if self.samples else None


@dataclass(frozen=True)
class ConfusionMatrix:
    """The cells of a confusion matrix that are not zero, by label, then by prediction.

    Args:
        classes: of the model. labels, predictions, counts: (cells,) int64. A prediction of `classes` stands for outputs that are
            not numbers, which are of no class.
    """

    classes: int
    labels: np.ndarray
    predictions: np.ndarray
    counts: np.ndarray

    @property
    def undecided(self) -> int:
        """Samples whose outputs are not numbers."""
        return int(self.counts[self.predictions == self.classes].sum())

    def of_label(self, label: int) -> np.ndarray:
        """How often samples of a class were taken for each, (classes + 1,) int64; the last is for no class."""
        cells = slice(*np.searchsorted(self.labels, [label, label + 1]))
        counts = np.zeros(self.classes + 1, np.int64)
        counts[self.predictions[cells]] = self.counts[cells]
        return counts

    def scores(self) -> list[ClassScore]:
        """The results of all classes, by label."""
        predictions = np.zeros(self.classes + 1, np.int64)
        np.add.at(predictions, self.predictions, self.counts)
        return [self._score(label, int(predictions[label])) for label in range(self.classes)]

    def worst_first(self) -> list[ClassScore]:
        """The same, the lowest accuracy first; classes without samples last."""
        return sorted(self.scores(), key=lambda score: (score.top1 is None, score.top1, score.label))

    def largest_confusions(self, most: int) -> list[tuple[int, int, int]]:
        """(label, prediction, count) of the most frequent mistakes, the most frequent first."""
        wrong = np.flatnonzero(self.labels != self.predictions)
        order = wrong[np.argsort(-self.counts[wrong], kind="stable")][:most]
        return [(int(self.labels[cell]), int(self.predictions[cell]), int(self.counts[cell])) for cell in order]

    def _score(self, label: int, predictions: int) -> ClassScore:
        counts = self.of_label(label)
        samples, hits = int(counts.sum()), int(counts[label])
        counts[label] = counts[self.classes] = 0  # neither is another class
        rival = int(counts.argmax())
        times = int(counts[rival])
        return ClassScore(label, samples, hits, predictions, rival if times else None, times)


class ConfusionCounts:
    """The counts of one rank's own samples, so far.

    Args:
        classes: of the model.
    """

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self._cells = np.zeros(0, np.int64)  # label * (classes + 1) + prediction, sorted, each once
        self._counts = np.zeros(0, np.int64)
        self._pending: list[np.ndarray] = []

    def add(self, labels: np.ndarray, scores: np.ndarray) -> None:
        """Count samples: labels (N,), and scores (N, classes), logits or their like, of which the first of the largest counts."""
        if not len(labels):
            return
        # As the loss counts hits: of equal scores the first, and nothing where there is a NaN.
        predictions = np.where(np.isnan(scores).any(axis=1), self.classes, scores.argmax(axis=1))
        self._pending.append(labels.astype(np.int64) * (self.classes + 1) + predictions)
        if sum(map(len, self._pending)) >= _MOST_PENDING:
            self._gather()

    def summed(self, comm: Communicator, progress: ProgressEngine) -> ConfusionMatrix:
        """The counts of all ranks, on every rank. Collective."""
        self._gather()
        width = self.classes + 1
        cells: list[np.ndarray] = []
        counts: list[np.ndarray] = []
        at_once = max(1, _BLOCK_CELLS // width)
        for first in range(0, self.classes, at_once):
            begin, stop = first * width, min(first + at_once, self.classes) * width
            in_block = slice(*np.searchsorted(self._cells, [begin, stop]))
            block = np.zeros(stop - begin, np.int64)
            block[self._cells[in_block] - begin] = self._counts[in_block]
            _add_over_ranks(block, comm, progress)
            filled = np.flatnonzero(block)
            cells.append(filled + begin)
            counts.append(block[filled])
        every = np.concatenate(cells)
        return ConfusionMatrix(self.classes, every // width, every % width, np.concatenate(counts))

    def _gather(self) -> None:
        """Count the pending samples together with those before."""
        pending = np.concatenate([np.zeros(0, np.int64), *self._pending])
        fresh, times = np.unique(pending, return_counts=True)
        cells = np.union1d(self._cells, fresh)
        counts = np.zeros(len(cells), np.int64)
        counts[np.searchsorted(cells, self._cells)] += self._counts
        counts[np.searchsorted(cells, fresh)] += times
        self._cells, self._counts, self._pending = cells, counts, []


def _add_over_ranks(counts: np.ndarray, comm: Communicator, progress: ProgressEngine) -> None:
    queue = progress.queue(comm)
    progress.wait(queue.post(lambda: comm.iallreduce(counts), "confusion matrix"))
