"""The link model: what an operation among ranks costs, from two measured numbers.

Every rank has one link, full duplex. Costs are those of the bandwidth-optimal algorithms (rings; recursive halving and doubling
move the same bytes), after Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
IJHPCA 2005. n is the size of the whole buffer in bytes, P the number of ranks; one rank costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from hpctrain.comm.base import Communicator, Handle
from hpctrain.comm.posting_queue import PostingQueue
from hpctrain.comm.progress import ProgressEngine

_SMALL_BYTES, _LARGE_BYTES = 1 << 10, 1 << 20  # of the whole buffer; the large one takes 4 ms and more at 1 Gb/s
_REPEATS = 5
_BURST = 32  # operations in flight at a time


@dataclass(frozen=True)
class LinkModel:
    """A link.

    Attributes:
        alpha_seconds: time of an empty message. beta_seconds_per_byte: the inverse of the link's rate.
        operation_seconds: of a core, for posting and testing a collective, whatever moves; 0 where that is not known.
    """

    alpha_seconds: float
    beta_seconds_per_byte: float
    operation_seconds: float = 0.0

    def __post_init__(self) -> None:
        if min(self.alpha_seconds, self.beta_seconds_per_byte, self.operation_seconds) < 0:
            raise ValueError(f"A link's times must not be negative, but got {self}; the nearest legal value is 0.")

    def point_to_point_seconds(self, n_bytes: int) -> float:
        """alpha + n beta."""
        return self.alpha_seconds + n_bytes * self.beta_seconds_per_byte

    def reduce_scatter_seconds(self, n_bytes: int, ranks: int) -> float:
        """(P - 1) alpha + (P - 1) / P n beta; n is the size of the buffer that every rank sends."""
        return (ranks - 1) * (self.alpha_seconds + n_bytes / ranks * self.beta_seconds_per_byte)

    def allgather_seconds(self, n_bytes: int, ranks: int) -> float:
        """(P - 1) alpha + (P - 1) / P n beta; n is the size of the gathered buffer."""
        return self.reduce_scatter_seconds(n_bytes, ranks)

    def allreduce_seconds(self, n_bytes: int, ranks: int) -> float:
        """2 (P - 1) alpha + 2 (P - 1) / P n beta: a reduce-scatter, then an allgather."""
        return self.reduce_scatter_seconds(n_bytes, ranks) + self.allgather_seconds(n_bytes, ranks)

    def alltoall_seconds(self, n_bytes: int, ranks: int) -> float:
        """(P - 1) alpha + (P - 1) / P n beta; n is the largest buffer that a rank sends or receives."""
        return self.reduce_scatter_seconds(n_bytes, ranks)

    def broadcast_seconds(self, n_bytes: int, ranks: int) -> float:
        """ceil(log2 P) (alpha + n beta): a binomial tree."""
        return _rounds(ranks) * self.point_to_point_seconds(n_bytes)

    def barrier_seconds(self, ranks: int) -> float:
        """ceil(log2 P) alpha: dissemination."""
        return _rounds(ranks) * self.alpha_seconds


def _rounds(ranks: int) -> int:
    return (ranks - 1).bit_length()


def calibrate(comm: Communicator, progress: ProgressEngine) -> LinkModel:
    """alpha and beta of `comm`, from timed reduce-scatters and allgathers of two sizes on rank 0; all ranks get the same.

    A few tens of milliseconds on a fast network, half a second at 0.5 Gb/s. The costs are those of collectives as they are
    here: their own overhead is in alpha, sharing of a node's link in beta. One rank: zeros. Collective; set-up only.
    """
    if comm.size == 1:
        return LinkModel(0.0, 0.0)
    (small, small_seconds), (large, large_seconds) = (_half_pair(comm, progress, size) for size in (_SMALL_BYTES, _LARGE_BYTES))
    others = comm.size - 1
    beta = max(0.0, large_seconds - small_seconds) / (others * (large - small))
    alpha = max(0.0, small_seconds / others - small * beta)
    measured: tuple[float, float] = comm.broadcast_object((alpha, beta))
    return LinkModel(*measured)


def measure_operation_seconds(comm: Communicator, progress: ProgressEngine) -> float:
    """Seconds of a core for an operation, from small allgathers in flight together on rank 0; all ranks get the same.

    So many at a time hide each other's latencies, and what is left is the posting and testing, in a queue as averagers have one.
    Some milliseconds. One rank: 0. Collective; set-up only.
    """
    if comm.size == 1:
        return 0.0
    seconds = [(_burst_seconds(comm, progress, _BURST), _burst_seconds(comm, progress, 1)) for _ in range(1 + _REPEATS)]
    many, one = (median(column) for column in zip(*seconds[1:], strict=True))
    measured: float = comm.broadcast_object(max(0.0, many - one) / (_BURST - 1))
    return measured


class _Burst:
    """Small operations of a queue of their own, driven as one handle."""

    def __init__(self, comm: Communicator, count: int) -> None:
        self._queue = PostingQueue(f"{comm.name} measurement")
        counts = [1] * comm.size
        for _ in range(count):
            self._queue.post(partial(comm.iallgather, None, np.zeros(comm.size, np.float32), counts), "measurement of the link")

    def test(self) -> bool:
        self._queue.collect()
        self._queue.start_heads()
        return self._queue.idle


def _burst_seconds(comm: Communicator, progress: ProgressEngine, count: int) -> float:
    """Seconds until so many small operations, posted together, are complete."""
    progress.wait_handle(comm.ibarrier(), "measurement of the link")
    begin = progress.now()
    progress.wait_handle(_Burst(comm, count), "measurement of the link")
    return progress.now() - begin


def _half_pair(comm: Communicator, progress: ProgressEngine, whole_bytes: int) -> tuple[int, float]:
    """(bytes of a rank's piece, half the median time of a reduce-scatter and an allgather of about `whole_bytes`).

    The first pair warms up.
    """
    elements = max(1, whole_bytes // 4 // comm.size)
    counts = [elements] * comm.size
    buffer, piece = np.zeros(sum(counts), np.float32), np.zeros(elements, np.float32)

    def wait(handle: Handle) -> None:
        progress.wait_handle(handle, "measurement of the link")

    seconds = []
    for _ in range(1 + _REPEATS):
        wait(comm.ibarrier())
        begin = progress.now()
        wait(comm.ireduce_scatter(buffer, piece, counts))
        wait(comm.iallgather(None, buffer, counts))
        seconds.append(progress.now() - begin)
    return piece.nbytes, median(seconds[1:]) / 2
