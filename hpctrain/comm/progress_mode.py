"""Progress modes: how messages advance while kernels run, and a measurement of how much time each mode hides on this machine.

- none: messages do not advance between waits, or the transport itself drives them (MPICH_ASYNC_PROGRESS=1, offloading networks).
- test: the program tests operations in flight after each operator.
- thread: in addition to mode test, a thread tests every 200 us while an operator runs. Requires MPI at thread level "serialized".
- posting: a thread does everything that the program does between operators in mode test, so it also completes operations and
  starts operations that are ready, including their computations. Requires MPI at thread level "serialized", and a core in
  addition to those of the kernels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine

#: share of `test`'s time below which another mode is chosen; for a smaller gain, runs on one machine should not differ in mode
CLEARLY_BETTER = 0.9
#: confidence level of the one-sided bound that must be below this share
CONFIDENCE = 0.99

_MESSAGES = 4
_WIRE_SECONDS = 20e-3  # minimum duration of an exchange: long compared with a scheduler's tick, short compared with a run
_BUDGET_SECONDS = 2.0
_MOST_ROUNDS = 25
_TRIALS = 3  # repetitions of an exchange alone; the shortest counts, because other work can only lengthen it
_WIDTH = 256  # width of the multiplied matrices
_FIRST_BYTES = 1 << 16


class ProgressMode(StrEnum):
    """Way in which messages advance while kernels run.

    NONE: not driven by hpctrain. TEST: by tests after operators. THREAD: also by a thread. POSTING: by a thread that also starts
    operations.
    """

    NONE = "none"
    TEST = "test"
    THREAD = "thread"
    POSTING = "posting"

    @property
    def has_thread(self) -> bool:
        """Whether a thread drives messages while the program computes."""
        return self in (ProgressMode.THREAD, ProgressMode.POSTING)

    @property
    def in_words(self) -> str:
        """Description of the mode for users who have not read the documentation."""
        return {
            ProgressMode.NONE: "messages move by themselves while layers compute",
            ProgressMode.TEST: "messages move whenever a layer is done",
            ProgressMode.THREAD: "a thread moves messages while layers compute",
            ProgressMode.POSTING: "a thread posts and moves messages while layers compute",
        }[self]


@dataclass(frozen=True)
class OverlapMeasurement:
    """Measured times of an exchange alone, of a computation alone, and of both together by mode.

    All times are those of the slowest rank, in seconds. They are medians over rounds, except `by_round`.

    Attributes:
        wire_seconds: time of the exchange alone.
        compute_seconds: time of the computation alone.
        operator_seconds: duration of one operator of the computation.
        message_bytes: bytes of all messages of one exchange.
        by_round: time of both together in each round, by mode.
    """

    wire_seconds: float
    compute_seconds: float
    operator_seconds: float
    message_bytes: int
    by_round: Mapping[ProgressMode, tuple[float, ...]]

    @property
    def together_seconds(self) -> dict[ProgressMode, float]:
        """Median seconds of both together, by mode."""
        return {mode: float(np.median(times)) for mode, times in self.by_round.items()}

    def hidden(self, mode: ProgressMode) -> float:
        """Return the hidden time divided by the shorter of exchange and computation; negative if they slow each other down."""
        saved = self.wire_seconds + self.compute_seconds - self.together_seconds[mode]
        return saved / min(self.wire_seconds, self.compute_seconds)

    def ratio(self, mode: ProgressMode) -> float:
        """Return the ratio of this mode's time to that of mode `test`; the median over the rounds."""
        return float(np.median(self._ratios(mode)))

    def ratio_limit(self, mode: ProgressMode) -> float:
        """Return an upper bound of the median ratio at the confidence level `CONFIDENCE`; infinite with too few rounds.

        The bound is an order statistic, so a few disturbed rounds have no effect and no distribution is assumed.
        """
        ratios = sorted(self._ratios(mode))
        for below, ratio in enumerate(ratios):  # the median exceeds `ratio` only if at most `below` rounds are below the median
            if _at_most(below, len(ratios)) >= CONFIDENCE:
                return ratio
        return math.inf

    def _ratios(self, mode: ProgressMode) -> list[float]:
        usual = self.by_round[ProgressMode.TEST]
        return [seconds / reference for seconds, reference in zip(self.by_round[mode], usual, strict=True)]

    def __str__(self) -> str:
        shares = ", ".join(f"{mode} hides {self.hidden(mode):.0%}" for mode in self.by_round)
        return (
            f"{self.wire_seconds * 1e3:.0f} ms of messages under {self.compute_seconds * 1e3:.0f} ms of compute in operators of "
            f"{self.operator_seconds * 1e3:.1f} ms: {shares}"
        )


def _at_most(successes: int, trials: int) -> float:
    """Return the probability of at most `successes` heads in `trials` tosses of a fair coin."""
    outcomes: int = sum(math.comb(trials, count) for count in range(successes + 1))
    return outcomes / float(2**trials)


def choose(measured: OverlapMeasurement) -> ProgressMode:
    """Return the fastest mode whose `ratio_limit` is below `CLEARLY_BETTER`; mode `test` if there is none."""
    better = [mode for mode in measured.by_round if mode is not ProgressMode.TEST and measured.ratio_limit(mode) < CLEARLY_BETTER]
    return min(better, key=measured.ratio, default=ProgressMode.TEST)


def apply(progress: ProgressEngine, mode: ProgressMode) -> None:
    """Switch `progress` to a mode."""
    progress.polls_between_operators = mode is not ProgressMode.NONE
    if mode.has_thread:
        progress.start_thread(posts=mode is ProgressMode.POSTING)
    else:
        progress.stop_thread()


def measure(
    comm: Communicator,
    progress: ProgressEngine,
    modes: Sequence[ProgressMode],
    *,
    operator_seconds: float = 5e-3,
    most_bytes: int = 64 << 20,
    worth_seconds: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> OverlapMeasurement | None:
    """Measure how much time each mode hides, in rounds that run every mode once, in about two seconds. Collective over `comm`.

    Returns None if a whole exchange takes less than `worth_seconds`, because there is little to hide. The call changes the
    engine's mode; call `apply` afterwards.

    Args:
        comm: communicator of the ranks.
        progress: progress engine of the process.
        modes: modes to measure.
        operator_seconds: duration of a typical operator of the run. In mode `test`, messages advance between operators only.
        most_bytes: maximum bytes of all messages of one exchange, usually those of the run's gradients.
        worth_seconds: minimum duration of an exchange that is worth measuring.
        clock: clock in seconds.
    """
    begin = clock()
    probe = _Probe(comm, progress, clock)
    apply(progress, ProgressMode.TEST)
    wire_alone = probe.grow_messages(most_bytes)
    if wire_alone < worth_seconds:
        return None
    left_rows, operators = probe.make_operators(operator_seconds, wire_alone)
    wire: list[float] = []
    compute: list[float] = []
    together: dict[ProgressMode, list[float]] = {mode: [] for mode in modes}
    more = True
    while more:
        round_begin = clock()
        apply(progress, ProgressMode.TEST)
        wire.append(probe.run(0, 0))
        compute.append(probe.run(left_rows, operators, messages=0))
        first = len(wire) % len(modes)  # each mode is first, second, ... equally often
        for mode in (*modes[first:], *modes[:first]):
            apply(progress, mode)
            together[mode].append(probe.run(left_rows, operators))
        now = clock()
        in_time = now - begin + (now - round_begin) < _BUDGET_SECONDS
        more = comm.broadcast_object(in_time and len(wire) < _MOST_ROUNDS)
    apply(progress, modes[0])
    slowest = np.max(comm.allgather_object([wire, compute, *together.values()]), axis=0)
    wire_seconds, compute_seconds = (float(value) for value in np.median(slowest[:2], axis=1))
    by_round = {mode: tuple(times) for mode, times in zip(modes, slowest[2:].tolist(), strict=True)}
    return OverlapMeasurement(wire_seconds, compute_seconds, compute_seconds / operators, probe.message_bytes, by_round)


class _Probe:
    """Probe that exchanges messages while it computes matrix products."""

    def __init__(self, comm: Communicator, progress: ProgressEngine, clock: Callable[[], float]) -> None:
        self._comm, self._progress, self._clock = comm, progress, clock
        self._queue = progress.queue(comm)
        self._left = np.ones((1, _WIDTH), np.float32)
        self._right = np.full((_WIDTH, _WIDTH), 1 / _WIDTH, np.float32)
        self._product = np.empty_like(self._left)
        self._buffers = self._make_buffers(_FIRST_BYTES)

    @property
    def message_bytes(self) -> int:
        """Bytes of all messages of one exchange."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def grow_messages(self, most_bytes: int) -> float:
        """Choose the size of the messages, and return the seconds of their exchange alone as measured by rank 0. Collective.

        The size grows until an exchange takes long enough, because short messages may fit into a buffer and appear too fast.
        """
        self.run(0, 0)  # connections are established at first use
        size, wire, grows = _FIRST_BYTES, 0.0, True
        while grows:
            self._buffers = self._make_buffers(min(size, most_bytes))
            wire = min(self.run(0, 0) for _ in range(_TRIALS))
            wire, grows = self._comm.broadcast_object((wire, wire < _WIRE_SECONDS and size < most_bytes))
            size *= 2
        return wire

    def make_operators(self, operator_seconds: float, wire_seconds: float) -> tuple[int, int]:
        """Create the operands of the products. Return this rank's number of rows, and the number of products of a computation.

        Each product takes about `operator_seconds`, and all of them together about as long as an exchange. The number of products
        is chosen by rank 0. Collective.
        """
        # Rows differ between ranks so that operators take the same time on all of them.
        rows = self._rows_of(operator_seconds)
        operators = int(self._comm.broadcast_object(max(2, min(100, round(wire_seconds / operator_seconds)))))
        self._make_rows(rows)
        return rows, operators

    def run(self, rows: int, operators: int, messages: int = _MESSAGES) -> float:
        """Return the seconds until all products are computed and all messages received. All ranks start together. Collective."""
        self._progress.wait_handle(self._comm.ibarrier(), "start of a probe")
        begin = self._clock()
        tickets = [
            self._queue.post(lambda buffer=buffer: self._comm.iallreduce(buffer), "probe")  # type: ignore[misc]
            for buffer in self._buffers[:messages]
        ]
        with self._progress.computing():
            for _ in range(operators):
                np.matmul(self._left[:rows], self._right, out=self._product[:rows])
                self._progress.operator_done()
        self._progress.wait(tickets)
        return self._clock() - begin

    def _rows_of(self, operator_seconds: float) -> int:
        """Return the number of rows with which a product takes `operator_seconds`. Not collective."""
        rows, product = 32, 0.0
        while product < operator_seconds / 2:
            rows *= 2
            self._make_rows(rows)
            begin = self._clock()
            np.matmul(self._left, self._right, out=self._product)
            product = self._clock() - begin
        return max(1, int(rows * operator_seconds / product))

    def _make_buffers(self, size_bytes: int) -> list[np.ndarray]:
        return [np.zeros(max(1, size_bytes // (4 * _MESSAGES)), np.float32) for _ in range(_MESSAGES)]

    def _make_rows(self, rows: int) -> None:
        self._left = np.ones((rows, _WIDTH), np.float32)
        self._product = np.empty_like(self._left)
