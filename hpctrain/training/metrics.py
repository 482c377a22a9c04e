"""Metrics of a run: the small message of each step, means, and the base of reporters.

The sums and flags of a step are added over all ranks in a nonblocking allreduce and read one step later (`StepReduction`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpctrain.backend.operators import LossSums
from hpctrain.comm.base import Communicator, GradientSums
from hpctrain.comm.progress import ProgressEngine, Ticket
from hpctrain.comm.sums import tree_sums_over
from hpctrain.core.intervals import ShardsOfRank
from hpctrain.core.text import LOG_COLUMNS

#: factor of the checkpoint status, which shares one number with stop requests; sums below 2^53 are exact
_STATUS = 1 << 24
_HEAD = 6  # loss, top1, top5, count, non-finite ranks, ranks asked to stop; batch statistics follow


@dataclass(frozen=True)
class StepTotals:
    """Sums of one step over all ranks, never means.

    Attributes:
        loss: sum of the losses of all samples, without micro-batches whose sum is not finite.
        top1: number of samples whose label has the highest score.
        top5: number of samples whose label is among the five highest scores.
        count: number of samples.
        non_finite: number of ranks on which the loss, a batch statistic or a parameter is not finite.
        stop: number of ranks that were asked to stop.
        statistics: count-weighted sums of the batch statistics, flat, float64.
        status: sum of the ranks' flags about a checkpoint that is being written (see `Saver.status_flag`).
        checks: sums of the ranks' numbers for checks of replicas (see `AgreedChecksums`), float64; empty without checks.
    """

    loss: float
    top1: int
    top5: int
    count: int
    non_finite: int
    stop: int
    statistics: np.ndarray
    status: int = 0
    checks: np.ndarray = field(default_factory=lambda: np.zeros(0))


class StepReduction:
    """Sum of the step's message over ranks, double-buffered: the next step fills one buffer while the other is in flight.

    Args:
        comm: ranks that share the step's samples, on a communicator used for this only.
        statistics_size: number of elements of the flat batch statistics.
        shards: shards of this rank, one per micro-batch, whose sums are added in a fixed order (see `ShardsOfRank`); None: a
            rank adds its micro-batches one after another.
        checks: number of elements of the message for checks of replicas (see `StepTotals.checks`).
    """

    def __init__(
        self,
        comm: Communicator,
        progress: ProgressEngine,
        statistics_size: int,
        shards: ShardsOfRank | None = None,
        *,
        checks: int = 0,
    ) -> None:
        self._comm = comm
        self._progress = progress
        self._shards = shards
        rows = 1 if shards is None else shards.count  # one row per term of this rank
        self._statistics = slice(_HEAD, _HEAD + statistics_size)
        self._buffers = [np.zeros((rows, _HEAD + statistics_size + checks), np.float64) for _ in range(2)]
        self._sums: GradientSums = comm
        self._additions = () if shards is None else shards.additions
        self._left = (0,) if shards is None else shards.sums
        self._turn = self._added = 0
        self._ticket: Ticket | None = None

    def agree(self) -> None:
        """Create the communicator for sums in the fixed order of the shards.

        Collective; call it once, before the first message.
        """
        if self._shards is not None:
            self._sums = tree_sums_over(self._comm, self._shards, allreduces=True) or self._comm

    def clear(self) -> None:
        """Begin a step: set all sums to zero."""
        self._current[...] = 0.0
        self._added = 0

    @property
    def _current(self) -> np.ndarray:
        return self._buffers[self._turn]

    def add(self, sums: LossSums, statistics: np.ndarray, *, finite: bool = True) -> None:
        """Add the sums of one micro-batch of this rank.

        Args:
            statistics: batch statistics, weighted by their number of samples, float64; ignored if any value is not finite.
            finite: whether everything that this rank trains, except the loss, is finite.
        """
        row = self._current[self._added]
        if self._shards is not None:
            self._added = (self._added + 1) % self._shards.count
        head = row[:_HEAD]
        finite_loss = math.isfinite(sums.loss)
        head[:4] += (sums.loss if finite_loss else 0.0, sums.top1, sums.top5, sums.count)
        if not (finite and finite_loss):
            head[4] = 1.0
            return
        row[self._statistics] += statistics

    @property
    def finite(self) -> bool:
        """Whether all values that this rank has added since `clear` are finite."""
        return not np.count_nonzero(self._current[:, 4])

    def gather(self, value: Any) -> list[Any]:
        """Return the picklable values of all ranks, in the order of the communicator. Collective and blocking."""
        return self._comm.allgather_object(value)

    def post(self, *, stop: bool, status: int = 0, checks: np.ndarray | None = None) -> None:
        """Post the message of this step without waiting; the previous message must have been read. Collective."""
        assert self._ticket is None, "the previous message has not been read"
        rows, sums = self._current, self._sums
        non_finite = not self.finite
        rows[:, 4] = 0.0
        for step in self._additions:
            rows[step.left] += rows[step.right]
        last = rows[self._left[-1]]
        last[4:6] = float(non_finite), float(stop + _STATUS * status)
        if checks is not None:
            last[self._statistics.stop :] = checks
        terms = last if len(self._left) == 1 else tuple(rows[place] for place in self._left)
        self._ticket = self._progress.queue(self._comm).post(lambda: sums.iallreduce(terms), "step message")
        self._turn = 1 - self._turn

    def read(self) -> StepTotals | None:
        """Wait for the message in flight and return its sums; None if there is no message.

        The statistics are views into a buffer, valid until the second `clear` after the message was posted.
        """
        if self._ticket is None:
            return None
        self._progress.wait(self._ticket)
        self._ticket = None
        values = self._buffers[1 - self._turn][self._left[-1]]
        loss, top1, top5, count, non_finite, flags = values[:_HEAD].tolist()
        status, stop = divmod(round(flags), _STATUS)
        statistics, checks = values[self._statistics], values[self._statistics.stop :]
        return StepTotals(loss, round(top1), round(top5), round(count), round(non_finite), stop, statistics, status, checks)


@dataclass
class RunningSums:
    """Sums over samples, for example of an epoch, an interval or an evaluation."""

    loss: float = 0.0
    top1: int = 0
    top5: int = 0
    count: int = 0

    def add(self, totals: StepTotals | None) -> None:
        """Add the sums of one step over all ranks; None has no effect."""
        if totals is not None:
            self.loss += totals.loss
            self.top1 += totals.top1
            self.top5 += totals.top5
            self.count += totals.count

    def means(self) -> dict[str, float]:
        """Return the means per sample of loss, top1 and top5 (accuracies as fractions); NaN if there is no sample."""
        if not self.count:
            return {"loss": float("nan"), "top1": float("nan"), "top5": float("nan")}
        return {"loss": self.loss / self.count, "top1": self.top1 / self.count, "top5": self.top5 / self.count}


@dataclass
class EvaluationSums(RunningSums):
    """Sums of an evaluation, with the weights and with their average.

    Attributes:
        averaged: sums with the averaged weights; None without averaged weights.
    """

    averaged: RunningSums | None = None

    @classmethod
    def of(cls, sums: RunningSums, averaged: RunningSums) -> EvaluationSums:
        """Return `sums`, extended by the sums with the averaged weights."""
        return cls(sums.loss, sums.top1, sums.top5, sums.count, averaged)

    def means(self) -> dict[str, float]:
        """Return the means, and with averaged weights also ema_loss, ema_top1 and ema_top5."""
        averaged = {} if self.averaged is None else self.averaged.means()
        return super().means() | {f"ema_{name}": value for name, value in averaged.items()}


def epoch_values(epoch: Mapping[str, Any], evaluation: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the values of an epoch by name: its number and last step, lr, images_per_second, and means.

    The means of the training images have the prefix "train_"; those of the evaluation, if there was one, have none.

    Args:
        epoch: record of the epoch.
        evaluation: record or means of its evaluation; None: there was none.
    """
    values = {name: epoch.get(name) for name in ("epoch", "step", "lr", "images_per_second")}
    values |= {f"train_{name}": epoch.get(name) for name in ("loss", "top1", "top5")}
    tested = {} if evaluation is None else evaluation
    return values | {name: value for name, value in tested.items() if name not in ("kind", "time", "epoch", "step", "set")}


class Reporter:
    """Base of reporters, which receive the events of a run on rank 0, or on the rank of a log. The default methods do nothing.

    A constructor may accept the keywords `directory`, the directory of the run, and `done_steps`, the number of steps done by
    earlier parts of the run.

    Attributes:
        width: number of columns of a printed line.
    """

    width: int = LOG_COLUMNS

    def start(self, epochs: int, samples_per_epoch: int, done_samples: int, last_sample: int) -> None:
        """Report that training begins after `done_samples` samples and will end after `last_sample`, counted over all epochs."""

    def step(self, epoch: int, step: int, sums: RunningSums, lr: float, images_per_second: float) -> None:
        """Report the totals of a step. Epochs and steps count from 1.

        Args:
            sums: sums of the epoch so far.
        """

    @contextmanager
    def evaluation(self, samples: int) -> Iterator[Callable[[int], None]]:
        """Report an evaluation of `samples` samples during the block.

        Yields:
            A function to call with the number of samples done.
        """
        yield lambda done: None

    def flush(self) -> None:
        """Record the latest step, before training ends within an epoch."""

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        """Append a record to the metrics.

        Args:
            kind: "interval", "epoch", "evaluation", "test", "progress", "resume", "skip", "rollback", "checkpoint",
                "steps", "data", "reads", "memory", "unreadable", "image_size" or "stop".
        """

    def say(self, text: str) -> None:
        """Print one line."""

    def warn(self, text: str) -> None:
        """Print one line that the user must see, even if nothing else is printed."""
        self.say(text)

    def close(self) -> None:
        """Release all resources at the end of the run, whether or not it succeeded."""


class Rate:
    """Number of images per second, from counts and a clock."""

    def __init__(self, clock: Any = time.perf_counter) -> None:
        self._clock = clock
        self._begin = clock()
        self._count = 0

    def restart(self) -> None:
        """Restart the measurement, after an evaluation or a checkpoint, whose time does not count as training."""
        self._begin = self._clock()
        self._count = 0

    def add(self, count: int) -> None:
        self._count += count

    def per_second(self) -> float:
        """Return images per second since `restart`; 0 if no time has passed."""
        elapsed = self._clock() - self._begin
        return self._count / elapsed if elapsed > 0 else 0.0
