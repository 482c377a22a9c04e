"""The start of a rank by the clock. Imports nothing that a training would load: that is what is measured."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

#: the modules from which a training begins
TRAINING = ("hpctrain.run.training", "hpctrain.run.resume")


@dataclass(frozen=True)
class StartFacts:
    """The start of one rank.

    Attributes:
        seconds: until all was loaded, without those in which it waited for a core. cpu_seconds: of these, computing.
        files: that were opened.
    """

    seconds: float
    cpu_seconds: float
    files: int


class OpenedFiles:
    """Counts the files that this process opens; for its whole life, as the system's hooks cannot be taken off.

    Attributes:
        begin, queued_seconds: by `time.perf_counter`, and waits for a core, when it began to count.
    """

    def __init__(self) -> None:
        self.count = 0
        self.begin = time.perf_counter()
        self.queued_seconds = queued_seconds()
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            self.count += 1


def load_training(age_seconds: float, opened: OpenedFiles, modules: Sequence[str] = TRAINING) -> StartFacts:
    """Load what a training loads, and say how long it took until then.

    Args:
        age_seconds: until `opened` began to count, without waits for a core.
    """
    for module in modules:
        importlib.import_module(module)
    seconds = time.perf_counter() - opened.begin - (queued_seconds() - opened.queued_seconds)
    return StartFacts(age_seconds + seconds, time.process_time(), opened.count)


def queued_seconds(statistics: Path = Path("/proc/self/schedstat")) -> float:
    """Seconds that this process was ready and waited for a core, as on a machine that others use; 0 where nobody counts."""
    try:
        return int(statistics.read_text().split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return 0.0
