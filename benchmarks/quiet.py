"""Quiet moments of a machine that others use, too: a fixed piece of work says whether a rank's core runs as fast as it can.

On shared machines other tenants slow a core by half and more for seconds at a time, whatever runs here, and its CPU time shows it
as its wall time does. Operators are timed in moments in which that piece of work takes no longer than it can, on all ranks.
"""

from __future__ import annotations

import time

import numpy as np

from hpctrain.comm.base import Communicator

_WIDTH = 384  # of the multiplied matrices: 1.7 MB in all, so caches that others share count, too
_PRODUCTS, _TRIALS = 3, 2
_SLOWED = 1.08  # this many times the least time and more is no quiet moment
_PAUSE_SECONDS = 0.02


class QuietCores:
    """The speed of the ranks' cores, now, next to their best. All methods but `probe` are collective over `world`."""

    def __init__(self, world: Communicator) -> None:
        self._world = world
        random = np.random.default_rng(0)
        self._factors = random.random((2, _WIDTH, _WIDTH), np.float32)
        self._product = np.empty((_WIDTH, _WIDTH), np.float32)
        self._best_seconds = min(self.probe() for _ in range(50))
        self.waited_seconds = 0.0

    def probe(self) -> float:
        """CPU seconds of a few products, here and now; the less of two trials."""
        return min(self._trial() for _ in range(_TRIALS))

    def _trial(self) -> float:
        begin = time.process_time()
        for _ in range(_PRODUCTS):
            np.matmul(*self._factors, out=self._product)
        return time.process_time() - begin

    def now(self) -> bool:
        """Whether no rank's core is slowed."""
        seconds = self.probe()
        self._best_seconds = min(self._best_seconds, seconds)
        return max(self._world.allgather_object(seconds / self._best_seconds)) < _SLOWED

    def wait(self, most_seconds: float) -> bool:
        """Until no core is slowed, or for so long; whether none is."""
        begin = time.perf_counter()
        while not (quiet := self.now()):
            if self._world.broadcast_object(time.perf_counter() - begin > most_seconds):
                break
            time.sleep(_PAUSE_SECONDS)
        self.waited_seconds += time.perf_counter() - begin
        return quiet
