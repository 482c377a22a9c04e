"""Evaluation: every sample once, with running statistics, on all ranks; sums over ranks, never means."""

from __future__ import annotations

import numpy as np

from hpctrain.backend.kernels.base import LossHandle, StepContext
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.data.loader import BatchSource
from hpctrain.nn.network import Network
from hpctrain.train.metrics import RunningSums


def evaluate(network: Network, loader: BatchSource, comm: Communicator, progress: ProgressEngine) -> RunningSums:
    """Sums over all samples of all ranks, each sample once. Collective.

    Args:
        network: this rank's copy, with all parameters up to date (drained). loader: this rank's share, in order.
        comm: all ranks. progress: the process's engine.
    """
    sums = np.zeros(4, np.float64)
    latest: LossHandle | None = None  # asked for when the next batch is enqueued
    for batch in loader.epoch(0):
        progress.notes.alive()
        if not sum(batch.share.counts):  # of the split group: a rank without samples may hold a part of the others'
            continue
        program = network.program(batch.share.counts, training=False)
        program.set_input(batch.x)
        program.forward(StepContext(training=False, sample_ids=batch.sample_ids, global_count=batch.global_count))
        _add(sums, latest)
        latest = program.loss(batch.y, batch.global_count)
    _add(sums, latest)
    queue = progress.queue(comm)
    progress.wait(queue.post(lambda: comm.iallreduce(sums), "evaluation sums"))
    return RunningSums(float(sums[0]), round(sums[1]), round(sums[2]), round(sums[3]))


def _add(sums: np.ndarray, handle: LossHandle | None) -> None:
    if handle is not None:
        losses = handle.result()
        sums += (losses.loss, losses.top1, losses.top5, losses.count)
