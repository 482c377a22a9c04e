"""Time budget of a measurement, and whether other programs used the cores meanwhile."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


class TimeBudget:
    """Time for a measurement, in seconds.

    Args:
        agree: collective function from this rank's decision to continue to the common decision of all ranks.
    """

    def __init__(self, seconds: float = math.inf, agree: Callable[[bool], bool] = lambda go_on: go_on) -> None:
        self.agree = agree
        self.seconds, self.begin, self._waited = seconds, time.perf_counter(), _waited_seconds()

    @property
    def is_busy(self) -> bool:
        """Whether this process has lacked a core, although it could run, for a noticeable share of the time since the start."""
        return _waited_seconds() - self._waited > _BUSY_SHARE * (time.perf_counter() - self.begin)

    def allows(self, seconds: float = 0.0) -> bool:
        """Return whether this many more seconds fit, on rank 0. Collective."""
        return self.agree(self.left() > seconds)

    def left(self) -> float:
        """Return the seconds that are left on this rank."""
        return self.seconds - (time.perf_counter() - self.begin)


_BUSY_SHARE = 0.2


def _waited_seconds(tasks: Path = Path("/proc/self/task")) -> float:
    """Return the seconds for which the threads of this process have waited for a core; 0 if the system does not report them."""
    waited = 0
    with suppress(OSError, ValueError, IndexError):
        for task in tasks.iterdir():
            waited += int((task / "schedstat").read_text().split()[1])
    return waited * 1e-9
