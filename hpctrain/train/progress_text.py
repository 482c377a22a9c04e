"""Words of progress: numbers that stay short, time left, and as many facts as fit in a line."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

#: of a line about steps and epochs where there is no terminal
LOG_COLUMNS = 80


def loss_text(loss: float) -> str:
    """Four digits behind the point; from 1,000 on, four digits in all, as 1.235e+26."""
    return f"{loss:.4f}" if abs(loss) < 1000 or not math.isfinite(loss) else f"{loss:.4g}"


def duration_text(seconds: float) -> str:
    """h:mm:ss, with whole days before it: 0:00:07, 1:02:03, 2 d 3:04:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days} d " if days else "") + f"{hour}:{minute:02}:{second:02}"


class TimeLeft:
    """Estimates how long the rest takes from how long the work so far took, evaluations and checkpoints included.

    Args:
        done, whole: of the work, in any unit; what was done before now took no time of this run's. clock: in seconds.
    """

    def __init__(self, done: int, whole: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._before, self._whole, self._clock = done, whole, clock
        self._begin = clock()

    def seconds(self, done: int) -> float | None:
        """None where nothing has been done by this run yet."""
        if done <= self._before:
            return None
        pace = (self._clock() - self._begin) / (done - self._before)
        return pace * max(0, self._whole - done)


def fitting(facts: Sequence[tuple[int, str]], room: int, between: str = "  ") -> str:
    """The most important facts that fit, in their order.

    Args:
        facts: (rank, text); those of low rank are left out last. room: characters.
    """
    kept = [fact for fact in facts if fact[1]]
    while kept and len(between.join(text for _, text in kept)) > room:
        kept.remove(max(kept, key=lambda fact: fact[0]))
    return between.join(text for _, text in kept)


def folded(pieces: Sequence[str], room: int = LOG_COLUMNS, between: str = "; ", indent: str = "  ") -> list[str]:
    """Lines of pieces that belong together, as many in each as have room; all but the first begin with the indent."""
    lines = [pieces[0]]
    for piece in pieces[1:]:
        longer = f"{lines[-1]}{between}{piece}"
        if len(longer) <= room:
            lines[-1] = longer
        else:
            lines[-1] += between.rstrip()
            lines.append(indent + piece)
    return lines
