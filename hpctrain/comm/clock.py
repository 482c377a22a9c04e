"""One clock for all ranks: offsets to rank 0 from the quickest of many round trips, with the bound that it proves.

Rank 0 sends at t0, rank r reads its clock c, the answer is back at t1. However long the ways were, rank r read c at some
instant of [t0, t1], so c - (t0 + t1) / 2 is its offset to within (t1 - t0) / 2 (Cristian, "Probabilistic clock
synchronization", Distributed Computing 3, 1989). The quickest round trip has the least bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hpctrain.comm.base import Communicator, Handle

Wait = Callable[[Handle, str], None]

ROUNDS = 30
_TAG = 7301


@dataclass(frozen=True)
class Offset:
    """This rank's clock less rank 0's, in nanoseconds, at `at_ns` of this rank's clock; true to within `error_ns`."""

    at_ns: int
    offset_ns: int
    error_ns: int


@dataclass(frozen=True)
class ClockMap:
    """This rank's clock brought to rank 0's: a straight line through two offsets, as clocks drift."""

    begin: Offset
    end: Offset

    def to_root(self, times_ns: np.ndarray) -> np.ndarray:
        """Rank 0's time, int64, of instants of this rank's clock."""
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
    comm: Communicator, wait: Wait, *, clock_ns: Callable[[], int] = time.perf_counter_ns, rounds: int = ROUNDS
) -> Offset:
    """This rank's offset to rank 0. Collective: rank 0 plays with one rank after another; nothing else should be under way.

    Args:
        wait: waits for a handle (`ProgressEngine.wait_handle`).
    """
    if comm.rank == 0:
        for rank in range(1, comm.size):
            _serve(comm, wait, clock_ns, rank, rounds)
        return Offset(clock_ns(), 0, 0)
    return _answer(comm, wait, clock_ns, rounds)


def _serve(comm: Communicator, wait: Wait, clock_ns: Callable[[], int], rank: int, rounds: int) -> None:
    """Rank 0's part: keeps the quickest round trip and sends its offset to rank `rank`."""
    ping, pong = np.zeros(1, np.int64), np.zeros(1, np.int64)
    best = (0, 0, 0)
    for number in range(rounds):
        answer = comm.irecv(pong, rank, _TAG)
        begin = clock_ns()
        wait(comm.isend(ping, rank, _TAG), "a clock's question")
        wait(answer, "a clock's answer")
        end = clock_ns()
        if number == 0 or end - begin < best[1] - best[0]:
            best = (begin, end, int(pong[0]))
    begin, end, theirs = best
    measured = np.array([theirs, theirs - (begin + end) // 2, -(-(end - begin) // 2) + 1], np.int64)
    wait(comm.isend(measured, rank, _TAG), "a clock's offset")


def _answer(comm: Communicator, wait: Wait, clock_ns: Callable[[], int], rounds: int) -> Offset:
    ping, pong = np.zeros(1, np.int64), np.zeros(1, np.int64)
    for _ in range(rounds):
        wait(comm.irecv(ping, 0, _TAG), "a clock's question")
        pong[0] = clock_ns()
        wait(comm.isend(pong, 0, _TAG), "a clock's answer")
    measured = np.zeros(3, np.int64)
    wait(comm.irecv(measured, 0, _TAG), "a clock's offset")
    at_ns, offset_ns, error_ns = (int(value) for value in measured)
    return Offset(at_ns, offset_ns, error_ns)
