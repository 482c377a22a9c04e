"""Evaluation: every sample once, with running statistics, on all ranks; sums over ranks, never means."""

from __future__ import annotations

import numpy as np

from hpctrain.backend.kernels.base import StepContext
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.data.loader import Loader
from hpctrain.nn.network import Network
from hpctrain.train.metrics import RunningSums


class Evaluator:
    """Runs a data set through the network.

    Args:
        network: this rank's copy, with all parameters up to date (drained). loader: this rank's share, in order.
        comm: all ranks. progress: the process's engine.
    """

    def __init__(self, network: Network, loader: Loader, comm: Communicator, progress: ProgressEngine) -> None:
        self._network, self._loader, self._comm, self._progress = network, loader, comm, progress

    def run(self) -> RunningSums:
        """Sums over all samples of all ranks, each sample once. Collective."""
        sums = np.zeros(4, np.float64)
        for batch in self._loader.epoch(0):
            if not sum(batch.share.counts):  # of the column: a rank without samples may hold a part of the others'
                continue
            program = self._network.program(batch.share.counts, training=False)
            program.x[...] = batch.x
            program.forward(StepContext(training=False, sample_ids=batch.sample_ids, global_count=batch.global_count))
            part = program.loss(batch.y, batch.global_count)
            sums += (part.loss, part.top1, part.top5, part.count)
        queue = self._progress.queue(self._comm)
        self._progress.wait(queue.post(lambda: self._comm.iallreduce(sums), "evaluation sums"))
        return RunningSums(float(sums[0]), round(sums[1]), round(sums[2]), round(sums[3]))
