"""Models and measurements of links between ranks, and of the offsets between their clocks.

The link model predicts the cost of an operation among ranks from two measured numbers. Every rank has one link, full duplex.
Costs are those of the bandwidth-optimal algorithms (rings; recursive halving and doubling move the same bytes), after Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 2005. n is the size of the whole
buffer in bytes, P the number of ranks; with one rank the cost is zero.

A common clock of all ranks follows from offsets to rank 0, measured by the fastest of many round trips. Rank 0 sends at t0, rank
r reads its clock c, and the answer arrives at t1. Rank r read c at some instant of [t0, t1], so c - (t0 + t1) / 2 is its offset
to within (t1 - t0) / 2 (Cristian, "Probabilistic clock synchronization", Distributed Computing 3, 1989). The fastest round trip
has the smallest bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

from hpctrain.comm.base import Communicator, Handle
from hpctrain.comm.progress import ProgressEngine

_SMALL_BYTES, _LARGE_BYTES = 1 << 10, 1 << 20  # size of the whole buffer; the large one takes at least 4 ms at 1 Gb/s
_REPEATS = 5


@dataclass(frozen=True)
class LinkModel:
    """Latency and inverse rate of a link, and the cost of operations over it.

    Attributes:
        alpha_seconds: time of an empty message.
        beta_seconds_per_byte: inverse of the link's rate.
        operation_seconds: processor time to post and test a collective of any size; 0 if unknown.
    """

    alpha_seconds: float
    beta_seconds_per_byte: float
    operation_seconds: float = 0.0

    def __post_init__(self) -> None:
        if min(self.alpha_seconds, self.beta_seconds_per_byte, self.operation_seconds) < 0:
            raise ValueError(f"The times of a link must not be negative, but are {self}.")

    def point_to_point_seconds(self, n_bytes: int) -> float:
        """Return the time of a message between two ranks: alpha + n beta."""
        return self.alpha_seconds + n_bytes * self.beta_seconds_per_byte

    def reduce_scatter_seconds(self, n_bytes: int, ranks: int) -> float:
        """Return the time of a reduce-scatter, (P - 1) alpha + (P - 1) / P n beta; each rank sends a buffer of n bytes."""
        return (ranks - 1) * (self.alpha_seconds + n_bytes / ranks * self.beta_seconds_per_byte)

    def allgather_seconds(self, n_bytes: int, ranks: int) -> float:
        """Return the time of an allgather, (P - 1) alpha + (P - 1) / P n beta; the gathered buffer has n bytes."""
        return self.reduce_scatter_seconds(n_bytes, ranks)


def calibrate(comm: Communicator, progress: ProgressEngine) -> LinkModel:
    """Measure alpha and beta of `comm` on rank 0 by reduce-scatters and allgathers of two sizes, and return them on all ranks.

    The measurement takes a few tens of milliseconds on a fast network, and half a second at 0.5 Gb/s. Alpha includes the overhead
    of the installed collectives, and beta the sharing of a node's link. With one rank, both are zero. Collective; at set-up only.
    """
    link: LinkModel = comm.broadcast_object(fitted(comm.size, lambda elements: _pair_seconds(comm, progress, elements)))
    return link


def fitted(ranks: int, pair_seconds: Callable[[int], float]) -> LinkModel:
    """Return the link on which a reduce-scatter and an allgather, with n float32 per piece, take `pair_seconds(n)` together."""
    if ranks == 1:
        return LinkModel(0.0, 0.0)
    small, large = (max(1, whole_bytes // 4 // ranks) for whole_bytes in (_SMALL_BYTES, _LARGE_BYTES))
    small_seconds, large_seconds = (pair_seconds(elements) / 2 for elements in (small, large))
    beta = max(0.0, large_seconds - small_seconds) / ((ranks - 1) * 4 * (large - small))
    return LinkModel(max(0.0, small_seconds / (ranks - 1) - 4 * small * beta), beta)


def _pair_seconds(comm: Communicator, progress: ProgressEngine, elements: int) -> float:
    """Return the median seconds of a reduce-scatter and an allgather together, with `elements` float32 per piece."""
    counts = [elements] * comm.size
    buffer, piece = np.zeros(sum(counts), np.float32), np.zeros(elements, np.float32)

    def wait(handle: Handle) -> None:
        progress.wait_handle(handle, "measurement of the link")

    seconds = []
    for _ in range(1 + _REPEATS):  # the first pair is a warm-up
        wait(comm.ibarrier())
        begin = progress.now()
        wait(comm.ireduce_scatter(buffer, piece, counts))
        wait(comm.iallgather(None, buffer, counts))
        seconds.append(progress.now() - begin)
    return median(seconds[1:])


Wait = Callable[[Handle, str], None]

CLOCK_ROUNDS = 30
_CLOCK_TAG = 7301


@dataclass(frozen=True)
class Offset:
    """Offset of this rank's clock to rank 0's.

    Attributes:
        at_ns: time of the measurement on this rank's clock, in nanoseconds.
        offset_ns: this rank's clock minus rank 0's.
        error_ns: bound of the error.
    """

    at_ns: int
    offset_ns: int
    error_ns: int


@dataclass(frozen=True)
class ClockMap:
    """Map from this rank's clock to rank 0's: a linear interpolation between two offsets, because clocks drift."""

    begin: Offset
    end: Offset

    def to_root(self, times_ns: np.ndarray) -> np.ndarray:
        """Return the times on rank 0's clock (int64) that correspond to `times_ns` on this rank's clock."""
        span = self.end.at_ns - self.begin.at_ns
        times_ns = np.asarray(times_ns, np.int64)
        if span <= 0:
            return times_ns - self.end.offset_ns
        share = (times_ns - self.begin.at_ns) / span
        drift = self.end.offset_ns - self.begin.offset_ns
        return times_ns - self.begin.offset_ns - np.rint(share * drift).astype(np.int64)

    @property
    def error_ns(self) -> int:
        """Bound of the error between the two measurements, for clocks with a constant drift."""
        return max(self.begin.error_ns, self.end.error_ns)


def measure_offset(
    comm: Communicator, wait: Wait, *, clock_ns: Callable[[], int] = time.perf_counter_ns, rounds: int = CLOCK_ROUNDS
) -> Offset:
    """Measure this rank's offset to rank 0. Collective.

    Rank 0 exchanges messages with one rank after another. No other communication should be in progress.

    Args:
        wait: function that waits for a handle (`ProgressEngine.wait_handle`).
    """
    if comm.rank == 0:
        for rank in range(1, comm.size):
            _measure_rank(comm, wait, clock_ns, rank, rounds)
        return Offset(clock_ns(), 0, 0)
    return _answer_root(comm, wait, clock_ns, rounds)


def _measure_rank(comm: Communicator, wait: Wait, clock_ns: Callable[[], int], rank: int, rounds: int) -> None:
    """Run rank 0's part of a measurement: exchange messages with `rank`, and send it the offset from the fastest round trip."""
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
