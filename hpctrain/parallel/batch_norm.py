"""Batch statistics over several ranks: exact for uneven and empty shares, and free of float32 sums of squares."""

from __future__ import annotations

import numpy as np

from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine


def merge_moments(counts: np.ndarray, means: np.ndarray, m2s: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    """Total count, mean (C,) and sum of squared deviations (C,) of P groups, from counts (P,), means and m2s (P, C), float64.

    Groups of count 0 are left out, whatever they hold; with none left the moments are 0. The pairwise update of Chan, Golub and
    LeVeque (The American Statistician 37, 1983) for all groups at once, relative to the first one's mean, so that a large common
    offset does not cancel.
    """
    present = counts > 0
    n, mean, m2 = counts[present], means[present], m2s[present]
    if not n.size:
        return 0, np.zeros(means.shape[1]), np.zeros(means.shape[1])
    total = n.sum()
    shift = mean - mean[0]
    center = (n[:, None] * shift).sum(axis=0) / total
    spread = (n[:, None] * (shift - center) ** 2).sum(axis=0)
    return int(total), mean[0] + center, m2.sum(axis=0) + spread


class RankStatistics:
    """A `StatisticsMerger` over the ranks of `comm`. All ranks gather all moments and merge them in rank order: the same bits.

    Both calls are collective and wait; they pass through the queue of `comm`, behind everything posted there before, so a
    communicator of their own keeps them from waiting behind gradients.

    Args:
        comm: the ranks that share the step. progress: the process's engine.
    """

    def __init__(self, comm: Communicator, progress: ProgressEngine) -> None:
        self._comm = comm
        self._progress = progress
        self._queue = progress.queue(comm)
        self._gathered: dict[int, np.ndarray] = {}  # by width: one for each channel count, made at its first step

    @property
    def alone(self) -> bool:
        """One rank: there is nothing to merge."""
        return self._comm.size == 1

    def merge(self, count: int, mean: np.ndarray, m2: np.ndarray) -> int:
        """Replace `mean` and `m2`, float64 (C,), by those of all ranks; give the total count. Count 0: they are not read."""
        channels = mean.size
        moments = self._buffer(2 * channels + 1)
        own_moments = moments[self._comm.rank]
        own_moments[0] = count
        own_moments[1 : channels + 1] = mean
        own_moments[channels + 1 :] = m2
        self._gather(moments, "batch statistics")
        total, mean[...], m2[...] = merge_moments(moments[:, 0], moments[:, 1 : channels + 1], moments[:, channels + 1 :])
        return total

    def sum(self, values: np.ndarray) -> None:
        """Replace `values`, float64, by their sum over the ranks, in rank order."""
        summands = self._buffer(values.size)
        summands[self._comm.rank] = values.reshape(-1)
        self._gather(summands, "sums of batch norm's backward")
        np.sum(summands, axis=0, out=values.reshape(-1))

    def _buffer(self, width: int) -> np.ndarray:
        if width not in self._gathered:
            self._gathered[width] = np.zeros((self._comm.size, width))
        return self._gathered[width]

    def _gather(self, by_rank: np.ndarray, purpose: str) -> None:
        size, width = by_rank.shape
        self._progress.wait(self._queue.post(lambda: self._comm.iallgather(None, by_rank, [width] * size), purpose))
