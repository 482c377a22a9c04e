"""The time that training steps wait for their batches, beside the time of whole steps: two clock readings a step, always on."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass

from hpctrain.data.loader import Batch


@dataclass(frozen=True)
class DataWait:
    """Sums over steps of one rank. seconds: from asking for a batch to asking for the next; waited_seconds: until it came."""

    steps: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0


class DataWaits:
    """Adds up how long the steps of this rank took, and how long they waited for data.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._steps = 0
        self._seconds = self._waited_seconds = 0.0

    def watched(self, batches: Generator[Batch, None, None]) -> Generator[Batch, None, None]:
        """The same batches. A step ends where the next batch is asked for, or where the generator is closed."""
        with closing(batches):
            while True:
                begin = self._clock()
                batch = next(batches, None)
                if batch is None:
                    return
                self._waited_seconds += self._clock() - begin
                try:
                    yield batch
                finally:
                    self._seconds += self._clock() - begin
                    self._steps += 1

    def take(self) -> DataWait:
        """The sums since they were taken last."""
        sums = DataWait(self._steps, self._seconds, self._waited_seconds)
        self._steps, self._seconds, self._waited_seconds = 0, 0.0, 0.0
        return sums
