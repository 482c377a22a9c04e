"""The reporter of a rank that keeps a log file: what happens in the run, with what this rank itself waited."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from hpctrain.core import log
from hpctrain.comm.progress import ProgressEngine
from hpctrain.train.metrics_rest import Reporter, RunningSums

_INTERVAL = "interval"


class LogReporter(Reporter):
    """Logs for this rank's file alone; nothing of it reaches the terminal.

    Args:
        progress: knows how long this rank has waited for others.
        interval_seconds: between two lines on steps; the first step has one. clock: in seconds.
    """

    def __init__(
        self, progress: ProgressEngine, *, interval_seconds: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._progress, self._interval_seconds, self._clock = progress, interval_seconds, clock
        self._last: float | None = None
        self._steps = 0
        self._waited_seconds = 0.0

    def start(self, epochs: int, samples_per_epoch: int, done_samples: int, last_sample: int) -> None:
        self._waited_seconds = self._progress.waited_seconds
        _info(f"training begins, {done_samples:,} of {last_sample:,} samples are done")

    def step(self, epoch: int, step: int, sums: RunningSums, lr: float, images_per_second: float) -> None:
        """Log a line where the interval is over: the step, its loss over all ranks, and this rank's share of waiting."""
        self._steps += 1
        if self._last is None or self._clock() - self._last >= self._interval_seconds:
            self._tell(epoch, step, sums)

    def _tell(self, epoch: int, step: int, sums: RunningSums) -> None:
        now = self._clock()
        waited = self._progress.waited_seconds
        since = "" if self._last is None else f" of {now - self._last:.1f} s"
        _debug(
            f"epoch {epoch}, step {step}: loss {sums.means()['loss']:.6g}; in {self._steps} "
            f"{'step' if self._steps == 1 else 'steps'} this rank waited {waited - self._waited_seconds:.3f} s{since} for others"
        )
        self._last, self._steps, self._waited_seconds = now, 0, waited

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        if kind != _INTERVAL:
            _debug(f"{kind}: {json.dumps(values, default=str)}")

    def say(self, text: str) -> None:
        _info(text)

    def close(self) -> None:
        _info("the run is over on this rank")


def _info(text: str) -> None:
    log.also(text, logging.INFO)


def _debug(text: str) -> None:
    log.also(text, logging.DEBUG)
