"""Evaluation: every sample once, with running statistics, on all ranks; sums over ranks, never means."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hpctrain.backend.kernels.base import LossHandle
from hpctrain.backend.kernels.numpy.loss import SoftmaxCrossEntropy
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.data.loader import BatchSource
from hpctrain.nn.network import Network
from hpctrain.train.confusion import ConfusionCounts
from hpctrain.train.metrics import RunningSums
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
) -> RunningSums:
    """Sums over all samples of all ranks, each sample once. Collective.

    Args:
        network: this rank's copy, with all parameters up to date (drained). loader: this rank's share, in order.
        comm: all ranks. progress: the process's engine.
        mirrored: the same share, mirrored: the mean of both probabilities counts, see `scores.log_probabilities`.
        confusion: counts this rank's own samples, of which it has none so far.
        advance: is called with the number of samples that are done, over all ranks, before each batch but the first.
    """
    sums = np.zeros(4, np.float64)
    latest: LossHandle | None = None  # asked for when the next batch is enqueued
    loss_of_means = SoftmaxCrossEntropy(network.loss_spec)
    done = 0
    for batch, mirror in pairs(loader, mirrored):
        progress.notes.alive()
        if done:
            advance(done)
        done += batch.global_count
        if not sum(batch.share.counts):  # of the split group: a rank without samples may hold a part of the others'
            continue
        if mirror is None:
            program = forward(network, batch)
            _add(sums, latest)
            latest = program.loss(batch.y, batch.global_count)
            if confusion is not None:
                confusion.add(batch.y, host_logits(network, program))
        else:
            means = log_probabilities(network, batch, mirror)  # whose softmax they are the logarithm of: logits of themselves
            _add(sums, loss_of_means.run(means, batch.y, batch.global_count, None))
            if confusion is not None:
                confusion.add(batch.y, means)
    _add(sums, latest)
    queue = progress.queue(comm)
    progress.wait(queue.post(lambda: comm.iallreduce(sums), "evaluation sums"))
    return RunningSums(float(sums[0]), round(sums[1]), round(sums[2]), round(sums[3]))


def _add(sums: np.ndarray, handle: LossHandle | None) -> None:
    if handle is not None:
        losses = handle.result()
        sums += (losses.loss, losses.top1, losses.top5, losses.count)
