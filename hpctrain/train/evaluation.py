"""Evaluation: every sample once, with running statistics, on all ranks; sums over ranks, never means."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import repeat

import numpy as np

from hpctrain.backend.operators import LossHandle
from hpctrain.backend.numpy.classifier import SoftmaxCrossEntropy
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.data.loader import Batch, BatchSource, Share
from hpctrain.nn.network import Network
from hpctrain.summation_tree import ShardsOfRank
from hpctrain.train.confusion import ConfusionCounts
from hpctrain.train.metrics_rest import RunningSums
from hpctrain.train.micro_batches import micro_batches_of
from hpctrain.train.scores import forward, host_logits, log_probabilities, pairs


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
    """Sums over all samples of all ranks, each sample once. Collective.

    Args:
        network: this rank's copy, with all parameters up to date (drained). loader: this rank's share, in order.
        comm: all ranks. progress: the process's engine.
        mirrored: the same share, mirrored: the mean of both probabilities counts, see `scores.log_probabilities`.
        confusion: counts this rank's own samples, of which it has none so far.
        advance: is called with the number of samples that are done, over all ranks, before each batch but the first.
        shards: those of this rank, which are computed one after another and added up in the order of their tree; None: a rank
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
            if not sum(part.share.counts):  # of the split group: a rank without samples may hold a part of the others'
                continue
            if mirror_part is None:
                program = forward(network, part)
                sums.add(program.loss(part.y, part.global_count))
                if confusion is not None:
                    confusion.add(part.y, host_logits(network, program))
            else:
                means = log_probabilities(network, part, mirror_part)  # whose softmax they are the logarithm of: their own logits
                sums.add(loss_of_means.run(means, part.y, part.global_count, None))
                if confusion is not None:
                    confusion.add(part.y, means)
    loss, top1, top5, count = sums.over_ranks(comm, progress)
    return RunningSums(float(loss), round(top1), round(top5), round(count))


class _Sums:
    """Loss, hits and count of this rank: one sum for each of its shards, or one.

    What a kernel gives is asked for when the next one is enqueued.
    """

    def __init__(self, shards: ShardsOfRank | None) -> None:
        self._shards = shards
        self._rows = np.zeros((1 if shards is None else shards.count, 4), np.float64)
        self._row = -1
        self._latest: tuple[int, LossHandle] | None = None

    def parts(self, batch: Batch) -> Iterator[Batch]:
        """A batch in as many parts as there are sums."""
        if len(self._rows) == 1:
            yield batch
            return
        for part in micro_batches_of(batch.share, len(self._rows)):
            share = Share(part.counts, batch.share.split_rank)
            x, y, ids = batch.x[part.own], batch.y[part.own], batch.sample_ids[part.shared]
            yield replace(batch, x=x, y=y, sample_ids=ids, share=share)

    def next_part(self) -> None:
        """Let what is added from now on belong to the next of the parts, which follow each other in a circle."""
        self._row = (self._row + 1) % len(self._rows)

    def add(self, handle: LossHandle) -> None:
        """The sums of one part."""
        self._take_latest()
        self._latest = self._row, handle

    def _take_latest(self) -> None:
        if self._latest is not None:
            row, handle = self._latest
            losses = handle.result()
            self._rows[row] += (losses.loss, losses.top1, losses.top5, losses.count)
            self._latest = None

    def over_ranks(self, comm: Communicator, progress: ProgressEngine) -> np.ndarray:
        """The sums of all ranks. Collective."""
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
