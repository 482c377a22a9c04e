"""Evaluation and prediction of each sample once, with running statistics, on all ranks. Ranks add sums, never means.

The scores of an image come from one pass, or are the mean over the image and its mirror image. A confusion matrix counts how
often an evaluation predicted each class for the samples of each label. Its counts are integers and thus exact on any number of
ranks. A matrix of 20,000 classes has 400 million cells, of which few are not zero. Therefore only these cells are stored, and the
ranks add their counts block by block. `WeightAverage` replaces the weights and running statistics by their averages for an
evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat

import numpy as np

from hpctrain.averaging.averager_state import copy_parameters, swap_parameters
from hpctrain.averaging.base import GradientAverager
from hpctrain.backend.numpy.classifier import SoftmaxCrossEntropy
from hpctrain.backend.operators import LossHandle, StepContext
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.core.intervals import ShardsOfRank
from hpctrain.data.loader import Batch, BatchSource, Share
from hpctrain.nn.network import Network, layer_of
from hpctrain.nn.program import Program
from hpctrain.optim.ema import EMA, EmaRule
from hpctrain.training.metrics import EvaluationSums, RunningSums
from hpctrain.training.passes import micro_batches_of

_BLOCK_CELLS = 1 << 20  # cells per allreduce: 8 MiB
_MOST_PENDING = 1 << 16  # maximum number of samples that wait to be merged


@dataclass(frozen=True)
class ClassScore:
    """Results for one class.

    Attributes:
        label: label of the class.
        samples: number of samples with this label.
        hits: number of these samples that were predicted correctly.
        predictions: number of samples of any class for which this class was predicted.
        rival: class most often predicted for the remaining samples, the first of equally frequent ones; None: there is none.
        rival_count: number of samples for which `rival` was predicted.
    """

    label: int
    samples: int
    hits: int
    predictions: int
    rival: int | None
    rival_count: int

    @property
    def top1(self) -> float | None:
        """Share of the class's samples that were predicted correctly; None without samples."""
        return self.hits / self.samples if self.samples else None


@dataclass(frozen=True)
class ConfusionMatrix:
    """Nonzero cells of a confusion matrix, sorted by label, then by prediction.

    Attributes:
        labels: label of each cell, (cells,) int64.
        predictions: prediction of each cell, (cells,) int64; `classes` stands for outputs with NaN, which predict no class.
        counts: number of samples of each cell, (cells,) int64.
    """

    classes: int
    labels: np.ndarray
    predictions: np.ndarray
    counts: np.ndarray

    @property
    def undecided(self) -> int:
        """Number of samples whose outputs contain NaN."""
        return int(self.counts[self.predictions == self.classes].sum())

    def of_label(self, label: int) -> np.ndarray:
        """Return the number of predictions of each class for the samples with a label, (classes + 1,) int64.

        The last entry is the number of samples whose outputs contain NaN.
        """
        cells = slice(*np.searchsorted(self.labels, [label, label + 1]))
        counts = np.zeros(self.classes + 1, np.int64)
        counts[self.predictions[cells]] = self.counts[cells]
        return counts

    def scores(self) -> list[ClassScore]:
        """Return the results of all classes, sorted by label."""
        predictions = np.zeros(self.classes + 1, np.int64)
        np.add.at(predictions, self.predictions, self.counts)
        return [self._score(label, int(predictions[label])) for label in range(self.classes)]

    def worst_first(self) -> list[ClassScore]:
        """Return the results of all classes, the lowest accuracy first and classes without samples last."""
        return sorted(self.scores(), key=lambda score: (score.top1 is None, score.top1, score.label))

    def largest_confusions(self, most: int) -> list[tuple[int, int, int]]:
        """Return (label, prediction, count) of the `most` most frequent wrong predictions, the most frequent first."""
        wrong = np.flatnonzero(self.labels != self.predictions)
        order = wrong[np.argsort(-self.counts[wrong], kind="stable")][:most]
        return [(int(self.labels[cell]), int(self.predictions[cell]), int(self.counts[cell])) for cell in order]

    def _score(self, label: int, predictions: int) -> ClassScore:
        counts = self.of_label(label)
        samples, hits = int(counts.sum()), int(counts[label])
        counts[label] = counts[self.classes] = 0  # a rival is another class, so neither this one nor NaN
        rival = int(counts.argmax())
        times = int(counts[rival])
        return ClassScore(label, samples, hits, predictions, rival if times else None, times)


class ConfusionCounts:
    """Counts of a confusion matrix over the samples that one rank has evaluated."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self._cells = np.zeros(0, np.int64)  # label * (classes + 1) + prediction, sorted, each once
        self._counts = np.zeros(0, np.int64)
        self._pending: list[np.ndarray] = []

    def add(self, labels: np.ndarray, scores: np.ndarray) -> None:
        """Count samples by their labels (N,) and scores (N, classes), for example logits.

        The prediction is the class with the largest score, and the first such class if scores are equal. A sample with a NaN
        score predicts no class.
        """
        if not len(labels):
            return
        # The same rule as in the loss: the first of equal scores, and no class if there is a NaN.
        predictions = np.where(np.isnan(scores).any(axis=1), self.classes, scores.argmax(axis=1))
        self._pending.append(labels.astype(np.int64) * (self.classes + 1) + predictions)
        if sum(map(len, self._pending)) >= _MOST_PENDING:
            self._gather()

    def summed(self, comm: Communicator, progress: ProgressEngine) -> ConfusionMatrix:
        """Return the confusion matrix over all ranks, on every rank. Collective."""
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
            progress.wait(progress.queue(comm).post(partial(comm.iallreduce, block), "confusion matrix"))
            filled = np.flatnonzero(block)
            cells.append(filled + begin)
            counts.append(block[filled])
        every = np.concatenate(cells)
        return ConfusionMatrix(self.classes, every // width, every % width, np.concatenate(counts))

    def _gather(self) -> None:
        """Merge the pending samples into the counts."""
        pending = np.concatenate([np.zeros(0, np.int64), *self._pending])
        fresh, times = np.unique(pending, return_counts=True)
        cells = np.union1d(self._cells, fresh)
        counts = np.zeros(len(cells), np.int64)
        counts[np.searchsorted(cells, self._cells)] += self._counts
        counts[np.searchsorted(cells, fresh)] += times
        self._cells, self._counts, self._pending = cells, counts, []


_LOG_2 = math.log(2.0)


def pairs(loader: BatchSource, mirrored: BatchSource | None) -> Iterator[tuple[Batch, Batch | None]]:
    """Yield pairs of a batch and the batch of its mirror images, which is None without mirror images.

    Args:
        mirrored: source of the same samples in the same order, mirrored; None: no mirror images.
    """
    if mirrored is None:
        yield from ((batch, None) for batch in loader.epoch(0))
        return
    yield from zip(loader.epoch(0), mirrored.epoch(0), strict=True)


def forward(network: Network, batch: Batch) -> Program:
    """Return a program that has computed the logits of this rank's samples. Collective over the split group.

    At least one rank of the split group must have samples.
    """
    program = network.program(batch.share.counts, training=False, image_shape=batch.image_shape)
    program.set_input(batch.x)
    program.forward(StepContext(training=False, sample_ids=batch.sample_ids))
    return program


def host_logits(network: Network, program: Program) -> np.ndarray:
    """Return logits (N, classes) on the host, bfloat16 as float32. The array is read-only and valid until the next pass."""
    return network.kernels.arithmetic.to_host(program.logits)


def log_probabilities(network: Network, batch: Batch, mirror: Batch | None = None) -> np.ndarray:
    """Return the log probabilities of this rank's samples, (N, classes) float64. Collective over the split group.

    With mirror images, return the logarithm of the mean of both probabilities (Simonyan and Zisserman, ICLR 2015, section 3.2).
    The mean of two distributions is a distribution, and its loss is never above the mean of both losses.

    Args:
        mirror: mirror images of the same samples; None: use the images only.
    """
    if not sum(batch.share.counts):  # no rank of the split group has samples
        return np.zeros((0, network.classes))
    scores = log_softmax(host_logits(network, forward(network, batch)))
    if mirror is None:
        return scores
    # A probability of 1e-400 would be 0 in float64, and its loss infinite; its logarithm is finite.
    mean: np.ndarray = np.logaddexp(scores, log_softmax(host_logits(network, forward(network, mirror)))) - _LOG_2
    return mean


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the logarithm of softmax over the last dim, float64; NaN for a sample whose largest logit is infinite or NaN."""
    with np.errstate(invalid="ignore", over="ignore"):
        shifted = logits.astype(np.float64)
        shifted -= shifted.max(axis=-1, keepdims=True)
        shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def evaluate(
    network: Network,
    loader: BatchSource,
    comm: Communicator,
    progress: ProgressEngine,
    *,
    mirrored: BatchSource | None = None,
    confusion: ConfusionCounts | None = None,
    advance: Callable[[int], None] = lambda done: None,
    shards: ShardsOfRank | None = None,
) -> RunningSums:
    """Evaluate each sample of all ranks once, and return the sums over all ranks. Collective.

    Args:
        network: this rank's copy of the network, with all parameters up to date (drained).
        loader: this rank's share of the samples, in order.
        comm: all ranks.
        mirrored: source of the mirror images of the same samples, for the mean of both probabilities (see `log_probabilities`);
            None: no mirror images.
        confusion: empty counts, to which this rank's samples are added.
        advance: callback, called before each batch but the first with the number of samples done by all ranks.
        shards: shards of this rank, computed one after another and added in a fixed order (see `ShardsOfRank`); None: a rank
            computes its samples of a batch together.
    """
    sums = _Sums(shards)
    loss_of_means = SoftmaxCrossEntropy(network.loss_spec)
    done = 0
    for batch, mirror in pairs(loader, mirrored):
        progress.notes.alive()
        if done:
            advance(done)
        done += batch.global_count
        for part, mirror_part in zip(sums.parts(batch), repeat(None) if mirror is None else sums.parts(mirror), strict=False):
            sums.next_part()
            if not sum(part.share.counts):  # a rank without samples may hold a part of the split group's samples
                continue
            if mirror_part is None:
                program = forward(network, part)
                sums.add(program.loss(part.y, part.global_count))
                if confusion is not None:
                    confusion.add(part.y, host_logits(network, program))
            else:
                # Logarithms of probabilities are logits of these probabilities.
                means = log_probabilities(network, part, mirror_part)
                sums.add(loss_of_means.run(means, part.y, part.global_count, None))
                if confusion is not None:
                    confusion.add(part.y, means)
    loss, top1, top5, count = sums.over_ranks(comm, progress)
    return RunningSums(float(loss), round(top1), round(top5), round(count))


class _Sums:
    """Loss, hits and count of this rank: one sum for each of its shards, or one sum without shards.

    The result of a kernel is fetched when the next kernel has been enqueued.
    """

    def __init__(self, shards: ShardsOfRank | None) -> None:
        self._shards = shards
        self._rows = np.zeros((1 if shards is None else shards.count, 4), np.float64)
        self._row = -1
        self._latest: tuple[int, LossHandle] | None = None

    def parts(self, batch: Batch) -> Iterator[Batch]:
        """Yield a batch in as many parts as there are sums."""
        if len(self._rows) == 1:
            yield batch
            return
        for part in micro_batches_of(batch.share, len(self._rows)):
            share = Share(part.counts, batch.share.split_rank)
            x, y, ids = batch.x[part.own], batch.y[part.own], batch.sample_ids[part.shared]
            yield replace(batch, x=x, y=y, sample_ids=ids, share=share)

    def next_part(self) -> None:
        """Select the sum of the next part; the first part follows the last."""
        self._row = (self._row + 1) % len(self._rows)

    def add(self, handle: LossHandle) -> None:
        """Add the result of one part to the selected sum."""
        self._take_latest()
        self._latest = self._row, handle

    def _take_latest(self) -> None:
        if self._latest is not None:
            row, handle = self._latest
            losses = handle.result()
            self._rows[row] += (losses.loss, losses.top1, losses.top5, losses.count)
            self._latest = None

    def over_ranks(self, comm: Communicator, progress: ProgressEngine) -> np.ndarray:
        """Return the sums over all ranks. Collective."""
        self._take_latest()
        queue, shards = progress.queue(comm), self._shards
        if shards is None:
            sums: np.ndarray = self._rows[0]
            progress.wait(queue.post(lambda: comm.iallreduce(sums), "evaluation sums"))
            return sums
        rows = np.zeros((shards.shards, 4), np.float64)
        rows[shards.rank * shards.count : (shards.rank + 1) * shards.count] = self._rows
        counts = [4 * shards.count] * comm.size
        progress.wait(queue.post(lambda: comm.iallgather(None, rows.reshape(-1), counts), "evaluation sums"))
        for step in replace(shards, rank=0, ranks=1).additions:  # every rank has all terms
            rows[step.left] += rows[step.right]
        whole: np.ndarray = rows[0]
        return whole


@dataclass(frozen=True)
class TopClasses:
    """Most probable classes of consecutive samples, in descending order of probability.

    Of equal probabilities, the lower label comes first.

    Attributes:
        first: index of the first sample.
        labels: labels, (N, K) int64.
        probabilities: probabilities, (N, K) float64; all NaN for a sample whose output contains NaN.
    """

    first: int
    labels: np.ndarray
    probabilities: np.ndarray


def predict(
    network: Network,
    loader: BatchSource,
    comm: Communicator,
    progress: ProgressEngine,
    top: int,
    *,
    mirrored: BatchSource | None = None,
) -> Iterator[TopClasses]:
    """Yield the most probable classes of all samples, batch by batch, each batch on every rank. Collective.

    Args:
        network: this rank's copy of the network, with all parameters up to date.
        loader: this rank's share of the samples, in order.
        comm: all ranks, in the order of their positions.
        top: number of classes per sample, K; at most the number of classes of the model.
        mirrored: source of the mirror images of the same samples, for the mean of both probabilities; None: no mirror images.
    """
    first = 0
    for batch, mirror in pairs(loader, mirrored):
        progress.notes.alive()
        gathered = _gathered(_top(log_probabilities(network, batch, mirror), top), batch.counts, comm, progress)
        yield TopClasses(first, gathered[:, :top].astype(np.int64), gathered[:, top:])
        first += batch.global_count


def _gathered(own: np.ndarray, counts: Sequence[int], comm: Communicator, progress: ProgressEngine) -> np.ndarray:
    """Return the arrays (N, width) of all ranks, concatenated in rank order. Collective.

    Args:
        own: array of this rank.
        counts: number of samples N of each rank.
    """
    width = own.shape[1]
    gathered = np.empty((sum(counts), width), np.float64)
    queue, pieces = progress.queue(comm), [count * width for count in counts]
    progress.wait(queue.post(lambda: comm.iallgather(own, gathered, pieces), "predictions"))
    return gathered


def _top(logarithms: np.ndarray, top: int) -> np.ndarray:
    """Return labels, then probabilities, of the K most probable classes of each sample: (N, 2 K) float64."""
    labels = np.argsort(-logarithms, axis=1, kind="stable")[:, :top]
    probabilities = np.exp(np.take_along_axis(logarithms, labels, axis=1))
    probabilities[np.isnan(logarithms).any(axis=1)] = np.nan
    return np.ascontiguousarray(np.concatenate([labels.astype(np.float64), probabilities], axis=1))


class WeightAverage:
    """Averages of the parameters, which their owners keep in `EmaOptimizer`, and of the running statistics, equal on every rank.

    The statistics are averaged by the same rule as the weights, with one update per step, as in timm and torch
    (use_buffers=True). Frozen values have no separate average, because they do not change.

    Args:
        averagers: averagers by parameter group, with optimisers that hold the averages of the parameters.

    Attributes:
        views: averages of the statistics of trained layers, by full name, each in the shape of its statistic.
    """

    def __init__(self, network: Network, averagers: Mapping[str, GradientAverager], rule: EmaRule) -> None:
        self._network, self._averagers, self._rule = network, averagers, rule
        self._running = network.statistics.running.copy()
        self._updates = 0
        starts = np.cumsum([0, *(view.size for view in network.statistics.views.values())])
        self.views = {
            name: self._running[start : start + view.size].reshape(view.shape)
            for (name, view), start in zip(network.statistics.views.items(), starts, strict=False)
            if layer_of(name) not in network.frozen
        }

    def blend(self, weighted_sums: np.ndarray, count: float) -> None:
        """Blend the running statistics like `FlatStatistics.blend`, and update their averages, unless `count` is 0."""
        statistics = self._network.statistics
        if count == 0:
            return
        if not self._updates:  # the statistics may have been loaded since
            self._running[...] = statistics.running
        statistics.blend(weighted_sums, count)
        self._updates += 1
        self._running[...] = (self._running - statistics.running) * self._rule.kept(self._updates) + statistics.running

    def weights_changed(self) -> None:
        """Set the averages to the current weights and statistics, after other code wrote them, unless a step has updated them."""
        if self._weight_updates():
            return
        for averager in self._averagers.values():
            copy_parameters(averager, EMA)
        self._running[...] = self._network.statistics.running

    def loaded(self) -> None:
        """Restore the number of updates, after the averagers have loaded a checkpoint and `views` were written."""
        self._updates = self._weight_updates()

    def _weight_updates(self) -> int:
        """Return the number of updates of the averaged weights."""
        counters = (averager.counters() for averager in self._averagers.values())
        return next(counters, {}).get("updates", 0)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace parameters and running statistics by their averages during the block.

        Call it after a drain. The start and the end of the block are collective.
        """
        self._swap()
        yield  # no swap after an error, which may be of this rank only: the other ranks would not answer, and the job ends
        self._swap()

    def _swap(self) -> None:
        for averager in self._averagers.values():
            swap_parameters(averager, EMA)
        statistics = self._network.statistics
        for name, average in self.views.items():
            running = statistics.views[name]
            running[...], average[...] = average.copy(), running.copy()
        statistics.running_changed()
        self._network.parameters_changed()


def evaluated_with(
    average: WeightAverage | None,
    evaluate: Callable[..., RunningSums],
    confusion: ConfusionCounts | None,
    advance: Callable[[int], None],
) -> RunningSums:
    """Return the sums of an evaluation; with an average of the weights, `EvaluationSums` after a second pass. Collective.

    Args:
        evaluate: function that makes one pass, with the keywords `confusion` and `advance`.
        confusion: counts of the pass with the weights themselves.
        advance: callback, called with the number of samples done. The second pass continues the count of the first.
    """
    sums = evaluate(confusion=confusion, advance=advance)
    if average is None:
        return sums
    with average.in_place():
        return EvaluationSums.of(sums, evaluate(advance=lambda done: advance(sums.count + done)))
