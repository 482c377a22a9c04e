"""The small message of a step: sums and flags of all ranks, posted nonblocking and read one step later."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.backend.kernels.base import LossSums
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine, Ticket

#: what a rank has to tell travels in the same number as whether it was asked to stop: sums below 2^53 are exact
_NEWS = 1 << 24
_HEAD = 6  # loss, top1, top5, count, non-finite ranks, ranks asked to stop; batch statistics follow


@dataclass(frozen=True)
class StepTotals:
    """One step over all ranks: sums, never means.

    non_finite: ranks on which the loss, a batch statistic or a parameter is not finite. stop: ranks that were asked to stop.
    statistics: float64, flat, count-weighted sums of the batch statistics.
    news: sum of what ranks have to tell of a checkpoint that is being written (see `Saver.news`).
    """

    loss: float
    top1: int
    top5: int
    count: int
    non_finite: int
    stop: int
    statistics: np.ndarray
    news: int = 0


class StepReduction:
    """Two buffers in turn: while one travels, the next step fills the other.

    Args:
        comm: the ranks that share the step's samples out, on a communicator of its own. progress: the process's engine.
        statistics_size: elements of the flat batch statistics.
    """

    def __init__(self, comm: Communicator, progress: ProgressEngine, statistics_size: int) -> None:
        self._comm = comm
        self._progress = progress
        self._buffers = [np.zeros(_HEAD + statistics_size, np.float64) for _ in range(2)]
        self._turn = 0
        self._ticket: Ticket | None = None

    def clear(self) -> None:
        """Start a step: nothing summed yet."""
        self._current[...] = 0.0

    @property
    def _current(self) -> np.ndarray:
        return self._buffers[self._turn]

    def add(self, sums: LossSums, statistics: np.ndarray, *, finite: bool = True) -> None:
        """Add what one micro-batch of this rank gave.

        Args:
            statistics: float64, weighted by the samples that they stand for; left out where not all is finite.
            finite: whether all that this rank trains is finite, beside the loss.
        """
        head = self._current[:_HEAD]
        finite_loss = math.isfinite(sums.loss)
        head[:4] += (sums.loss if finite_loss else 0.0, sums.top1, sums.top5, sums.count)
        if not (finite and finite_loss):
            head[4] = 1.0
            return
        self._current[_HEAD:] += statistics

    @property
    def finite(self) -> bool:
        """Whether all that this rank has added since `clear` is finite."""
        return not self._current[4]

    def gather(self, value: Any) -> list[Any]:
        """Everyone's picklable value, in the order of the communicator. Collective; waits, so not in an ordinary step."""
        return self._comm.allgather_object(value)

    def post(self, *, stop: bool, news: int = 0) -> None:
        """Send this step's message; the previous one must have been read. Collective; does not wait."""
        assert self._ticket is None, "the previous message has not been read"
        buffer = self._current
        buffer[5] = float(stop + _NEWS * news)
        comm = self._comm
        self._ticket = self._progress.queue(comm).post(lambda: comm.iallreduce(buffer), "step message")
        self._turn = 1 - self._turn

    def read(self) -> StepTotals | None:
        """Wait for the message that is on its way; None where there is none. The statistics are valid until the next `clear`
        but one."""
        if self._ticket is None:
            return None
        self._progress.wait(self._ticket)
        self._ticket = None
        values = self._buffers[1 - self._turn]
        loss, top1, top5, count, non_finite, flags = (float(v) for v in values[:_HEAD])
        news, stop = divmod(round(flags), _NEWS)
        return StepTotals(loss, round(top1), round(top5), round(count), round(non_finite), stop, values[_HEAD:], news)
