"""Metrics of a run: sums turned into means, and the base of those who receive them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hpctrain.train.metrics import StepTotals


@dataclass
class RunningSums:
    """Sums over steps of an epoch, of an interval, or of an evaluation. All means are by sample."""

    loss: float = 0.0
    top1: int = 0
    top5: int = 0
    count: int = 0

    def add(self, totals: StepTotals | None) -> None:
        """Add one step's sums over all ranks, where there are any."""
        if totals is not None:
            self.loss += totals.loss
            self.top1 += totals.top1
            self.top5 += totals.top5
            self.count += totals.count

    def means(self) -> dict[str, float]:
        """loss, top1 and top5 by sample (fractions); nan where there was no sample."""
        if not self.count:
            return {"loss": float("nan"), "top1": float("nan"), "top5": float("nan")}
        return {"loss": self.loss / self.count, "top1": self.top1 / self.count, "top5": self.top5 / self.count}


@dataclass
class EvaluationSums(RunningSums):
    """Sums over a test set; averaged: the same with the averaged weights, where there are any."""

    averaged: RunningSums | None = None

    @classmethod
    def of(cls, sums: RunningSums, averaged: RunningSums) -> EvaluationSums:
        """Those with the weights, and with their average."""
        return cls(sums.loss, sums.top1, sums.top5, sums.count, averaged)

    def means(self) -> dict[str, float]:
        """Also ema_loss, ema_top1 and ema_top5: those with the averaged weights."""
        averaged = {} if self.averaged is None else self.averaged.means()
        return super().means() | {f"ema_{name}": value for name, value in averaged.items()}


class Reporter:
    """Receives what happens in a run, and does nothing with it: the base of those that do, which rank 0 has.

    A constructor may take the keywords `directory`, the run's, and `done_steps`, those of earlier parts of the run.

    Attributes:
        width: columns of the terminal that it writes to; None where there is none.
    """

    width: int | None = None

    def start(self, epochs: int, samples_per_epoch: int, done_samples: int, last_sample: int) -> None:
        """Training begins, or goes on behind `done_samples`; it will end behind `last_sample`, counted over all epochs."""

    def step(self, epoch: int, step: int, sums: RunningSums, lr: float, images_per_second: float) -> None:
        """The totals of one step are known; epochs and steps count from 1. `sums` are the epoch's so far."""

    @contextmanager
    def evaluation(self, samples: int) -> Iterator[Callable[[int], None]]:
        """While this lasts, so many samples are evaluated; what it gives is called with the number of those that are done."""
        yield lambda done: None

    def flush(self) -> None:
        """Training ends inside an epoch: the latest step is recorded, too."""

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        """Write one line of metrics.

        kind: "interval", "epoch", "evaluation", "progress", "resume", "skip", "shrink", "rollback", "checkpoint", "steps",
        "data", "reads", "memory", "unreadable", "image_size" or "stop".
        """

    def say(self, text: str) -> None:
        """One line for people."""

    def close(self) -> None:
        """The run ends, in whatever way."""


class Rate:
    """Images per second over the last interval and since the start, from counts and a clock."""

    def __init__(self, clock: Any = time.perf_counter) -> None:
        self._clock = clock
        self._begin = clock()
        self._count = 0

    def restart(self) -> None:
        """Forget the time so far (after an evaluation or a checkpoint, which are not training)."""
        self._begin = self._clock()
        self._count = 0

    def add(self, count: int) -> None:
        self._count += count

    def per_second(self) -> float:
        """Images per second since `restart`."""
        elapsed = self._clock() - self._begin
        return self._count / elapsed if elapsed > 0 else 0.0
