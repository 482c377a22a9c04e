"""Models and measurements of what lies between ranks: the cost of a link, and the offsets of their clocks.

The link model predicts what an operation among ranks costs, from two measured numbers. Every rank has one link, full duplex.
Costs are those of the bandwidth-optimal algorithms (rings; recursive halving and doubling move the same bytes), after Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 2005. n is the size of the whole
buffer in bytes, P the number of ranks; one rank costs nothing.

One clock for all ranks follows from offsets to rank 0: the quickest of many round trips, with the bound that it proves. Rank 0
sends at t0, rank r reads its clock c, the answer is back at t1. However long the ways were, rank r read c at some instant of
[t0, t1], so c - (t0 + t1) / 2 is its offset to within (t1 - t0) / 2 (Cristian, "Probabilistic clock synchronization",
Distributed Computing 3, 1989). The quickest round trip has the least bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from hpctrain.comm.base import Communicator, Handle
from hpctrain.comm.progress import PostingQueue, ProgressEngine

_SMALL_BYTES, _LARGE_BYTES = 1 << 10, 1 << 20  # of the whole buffer; the large one takes 4 ms and more at 1 Gb/s
_REPEATS = 5
_BURST = 32  # operations in flight at a time


@dataclass(frozen=True)
class LinkModel:
    """Latency and inverse rate of a link, and the cost of operations over it.

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
        """Return alpha + n beta."""
        return self.alpha_seconds + n_bytes * self.beta_seconds_per_byte

    def reduce_scatter_seconds(self, n_bytes: int, ranks: int) -> float:
        """Return (P - 1) alpha + (P - 1) / P n beta; n is the size of the buffer that every rank sends."""
        return (ranks - 1) * (self.alpha_seconds + n_bytes / ranks * self.beta_seconds_per_byte)

    def allgather_seconds(self, n_bytes: int, ranks: int) -> float:
        """Return (P - 1) alpha + (P - 1) / P n beta; n is the size of the gathered buffer."""
        return self.reduce_scatter_seconds(n_bytes, ranks)

    def allreduce_seconds(self, n_bytes: int, ranks: int) -> float:
        """Return 2 (P - 1) alpha + 2 (P - 1) / P n beta: a reduce-scatter, then an allgather."""
        return self.reduce_scatter_seconds(n_bytes, ranks) + self.allgather_seconds(n_bytes, ranks)

    def alltoall_seconds(self, n_bytes: int, ranks: int) -> float:
        """Return (P - 1) alpha + (P - 1) / P n beta; n is the largest buffer that a rank sends or receives."""
        return self.reduce_scatter_seconds(n_bytes, ranks)

    def broadcast_seconds(self, n_bytes: int, ranks: int) -> float:
        """Return ceil(log2 P) (alpha + n beta): a binomial tree."""
        return _rounds(ranks) * self.point_to_point_seconds(n_bytes)

    def barrier_seconds(self, ranks: int) -> float:
        """Return ceil(log2 P) alpha: dissemination."""
        return _rounds(ranks) * self.alpha_seconds


def _rounds(ranks: int) -> int:
    return (ranks - 1).bit_length()


def calibrate(comm: Communicator, progress: ProgressEngine) -> LinkModel:
    """Measure alpha and beta of `comm` by timed reduce-scatters and allgathers of two sizes on rank 0; all ranks get the same.

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
    """Measure the seconds of a core for an operation, by small allgathers in flight together on rank 0.

    All ranks get the same.

    Concurrent operations hide each other's latency; the remaining time is posting and testing, as in an averager's queue. Some
    milliseconds. One rank: 0. Collective; set-up only.
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
    """Return the seconds until `count` small operations, posted together, are complete."""
    progress.wait_handle(comm.ibarrier(), "measurement of the link")
    begin = progress.now()
    progress.wait_handle(_Burst(comm, count), "measurement of the link")
    return progress.now() - begin


def _half_pair(comm: Communicator, progress: ProgressEngine, whole_bytes: int) -> tuple[int, float]:
    """Return (bytes of a rank's piece, half the median time of a reduce-scatter and an allgather of `whole_bytes`).

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


Wait = Callable[[Handle, str], None]

CLOCK_ROUNDS = 30
_CLOCK_TAG = 7301


@dataclass(frozen=True)
class Offset:
    """This rank's clock less rank 0's, in nanoseconds, at `at_ns` of this rank's clock; true to within `error_ns`."""

    at_ns: int
    offset_ns: int
    error_ns: int


@dataclass(frozen=True)
class ClockMap:
    """The map from this rank's clock to rank 0's: a straight line through two offsets, as clocks drift."""

    begin: Offset
    end: Offset

    def to_root(self, times_ns: np.ndarray) -> np.ndarray:
        """Return rank 0's time, int64, of instants of this rank's clock."""
        span = self.end.at_ns - self.begin.at_ns
        times_ns = np.asarray(times_ns, np.int64)
        if span <= 0:
            return times_ns - self.end.offset_ns
        share = (times_ns - self.begin.at_ns) / span
        drift = self.end.offset_ns - self.begin.offset_ns
        return times_ns - self.begin.offset_ns - np.rint(share * drift).astype(np.int64)

    @property
    def error_ns(self) -> int:
        """Bound of the error between the two measurements, for clocks that drift evenly."""
        return max(self.begin.error_ns, self.end.error_ns)


def measure_offset(
    comm: Communicator, wait: Wait, *, clock_ns: Callable[[], int] = time.perf_counter_ns, rounds: int = CLOCK_ROUNDS
) -> Offset:
    """Measure this rank's offset to rank 0. Collective.

    Rank 0 exchanges messages with one rank after another; nothing else should be under way.

    Args:
        wait: waits for a handle (`ProgressEngine.wait_handle`).
    """
    if comm.rank == 0:
        for rank in range(1, comm.size):
            _measure_rank(comm, wait, clock_ns, rank, rounds)
        return Offset(clock_ns(), 0, 0)
    return _answer_root(comm, wait, clock_ns, rounds)


def _measure_rank(comm: Communicator, wait: Wait, clock_ns: Callable[[], int], rank: int, rounds: int) -> None:
    """Run rank 0's part: keep the quickest round trip and send its offset to rank `rank`."""
    ping, pong = np.zeros(1, np.int64), np.zeros(1, np.int64)
    best = (0, 0, 0)
    for number in range(rounds):
        answer = comm.irecv(pong, rank, _CLOCK_TAG)
        begin = clock_ns()
        wait(comm.isend(ping, rank, _CLOCK_TAG), "a clock's question")
        wait(answer, "a clock's answer")
        end = clock_ns()
        if number == 0 or end - begin < best[1] - best[0]:
            best = (begin, end, int(pong[0]))
    begin, end, theirs = best
    measured = np.array([theirs, theirs - (begin + end) // 2, -(-(end - begin) // 2) + 1], np.int64)
    wait(comm.isend(measured, rank, _CLOCK_TAG), "a clock's offset")


def _answer_root(comm: Communicator, wait: Wait, clock_ns: Callable[[], int], rounds: int) -> Offset:
    ping, pong = np.zeros(1, np.int64), np.zeros(1, np.int64)
    for _ in range(rounds):
        wait(comm.irecv(ping, 0, _CLOCK_TAG), "a clock's question")
        pong[0] = clock_ns()
        wait(comm.isend(pong, 0, _CLOCK_TAG), "a clock's answer")
    measured = np.zeros(3, np.int64)
    wait(comm.irecv(measured, 0, _CLOCK_TAG), "a clock's offset")
    at_ns, offset_ns, error_ns = (int(value) for value in measured)
    return Offset(at_ns, offset_ns, error_ns)
