"""Predictions: the most probable classes of each sample, batch by batch, in order, on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.data.loader import BatchSource
from hpctrain.nn.network import Network
from hpctrain.train.scores import log_probabilities, pairs


@dataclass(frozen=True)
class TopClasses:
    """The most probable classes of neighbouring samples, the most probable first; of equal ones the first.

    Args:
        first: number of the first sample. labels: (N, K) int64. probabilities: (N, K) float64; all NaN for a sample of which an
            output is not a number.
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
    """The most probable classes of all samples, each batch on every rank. Collective, batch by batch.

    Args:
        network: this rank's copy, with all parameters up to date. loader: this rank's share, in order.
        comm: all ranks, by position. progress: the process's engine. top: K, at most the number of classes.
        mirrored: the same share, mirrored: the mean of both probabilities counts.
    """
    first = 0
    for batch, mirror in pairs(loader, mirrored):
        progress.notes.alive()
        of_all = _gathered(_top(log_probabilities(network, batch, mirror), top), batch.counts, comm, progress)
        yield TopClasses(first, of_all[:, :top].astype(np.int64), of_all[:, top:])
        first += batch.global_count


def _gathered(own: np.ndarray, counts: Sequence[int], comm: Communicator, progress: ProgressEngine) -> np.ndarray:
    """The arrays (N, width) of all ranks, which hold `counts` samples, one after another. Collective."""
    width = own.shape[1]
    of_all = np.empty((sum(counts), width), np.float64)
    queue, pieces = progress.queue(comm), [count * width for count in counts]
    progress.wait(queue.post(lambda: comm.iallgather(own, of_all, pieces), "predictions"))
    return of_all


def _top(logarithms: np.ndarray, top: int) -> np.ndarray:
    """Labels, then probabilities, of the K most probable classes of each sample: (N, 2 K) float64."""
    labels = np.argsort(-logarithms, axis=1, kind="stable")[:, :top]
    probabilities = np.exp(np.take_along_axis(logarithms, labels, axis=1))
    probabilities[np.isnan(logarithms).any(axis=1)] = np.nan
    return np.ascontiguousarray(np.concatenate([labels.astype(np.float64), probabilities], axis=1))
