"""The interval of lazy averaging: one for all parameter groups of a network and all ranks, which see the same numbers.

Lee, Kang, Al-Bahrani, Agrawal, Choudhary and Liao, "Improving scalability of parallel CNN training by adaptively adjusting
parameter update frequency", JPDC 2022.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from hpctrain.comm.base import Communicator, Complete, Handle
from hpctrain.comm.posting_queue import Ticket
from hpctrain.comm.progress import ProgressEngine

_NUMBERS = 3  # |f|^2, |G|^2 and |f - G|^2


def next_interval(interval: int, steps: int, latest: float, total: float, difference: float, most: int) -> int:
    """The interval that follows from one averaging.

    Both conditions true: one more; both false: one less, at least 1; else the same.

    Args:
        steps: how many gradients were added up. latest: |f|^2, f the last of them, over all ranks. total: |G|^2, G their sum.
        difference: |f - G|^2. most: the largest interval.
    """
    angle = difference + latest <= total
    magnitude = steps * latest <= total
    if angle and magnitude:
        return min(interval + 1, most)
    return max(interval - 1, 1) if not angle and not magnitude else interval


@dataclass(frozen=True)
class LazyStep:
    """A step of the interval. averages: layers that are held back are averaged in it. compares: f and G of it are, too."""

    averages: bool
    compares: bool


class LazyInterval:
    """Steps from one averaging of the layers that are held back to the next; shared by the averagers of all groups.

    Every rank adds up squares of what it owns of f and G in any group, so each element of the network counts on one rank of all.
    One small allgather a comparison brings the numbers of every rank to all, which add them in rank order: the same bits, and the
    same decision, everywhere. It is on a communicator of its own, and starts once all groups of a rank have given their part,
    driven by whatever the rank waits for: one that owns nothing gives zeros. The interval that one averaging leads to holds from
    the next averaging on, so nobody waits for it under a step. Making it is collective over `comm`.

    Args:
        comm: all ranks that hold a part of the network, or a copy of one. members: parameter groups of the network.
        max_interval: the largest interval. check_every: averagings from one comparison to the next.

    Attributes:
        interval: the same on every rank.
    """

    def __init__(
        self, comm: Communicator, progress: ProgressEngine, members: int = 1, *, max_interval: int, check_every: int
    ) -> None:
        copied = comm.split(0, comm.rank, f"{comm.name} interval")
        assert copied is not None
        self._comm, self._progress, self._queue = copied, progress, progress.queue(copied)
        self._max_interval, self._check_every = max_interval, check_every
        self._begun = [0] * members
        self._joined = 0
        self._step = LazyStep(averages=True, compares=False)
        self._squares = np.zeros((copied.size, _NUMBERS), np.float64)
        self._missing = 0  # members that have still to give their part
        self._ticket: Ticket | None = None
        self._compared_steps = 0
        self._steps = self._averagings = 0
        self.interval = self._decided = 1

    def join(self) -> int:
        """The place of another group among the members."""
        self._joined += 1
        assert self._joined <= len(self._begun), "there are more groups of parameters than the interval is for"
        return self._joined - 1

    def begin_step(self, member: int) -> LazyStep:
        """The step that this member begins: every member begins one before any begins the next.

        Waits in a step that averages for the comparison of an earlier one.
        """
        if self._begun[member] == max(self._begun):
            self._step = self._next_step()
        self._begun[member] += 1
        assert self._begun[member] == max(self._begun), "a group of parameters has left a step out"
        return self._step

    def _next_step(self) -> LazyStep:
        self._steps += 1
        if self._steps < self.interval:
            return LazyStep(averages=False, compares=False)
        self.settle()
        self.interval = self._decided
        steps, self._steps = self._steps, 0
        compares = self._max_interval > 1 and self._averagings % self._check_every == 0
        self._averagings += 1
        if not compares:
            return LazyStep(averages=True, compares=False)
        if steps == 1:  # f is G
            self._decided = next_interval(self.interval, 1, 1.0, 1.0, 0.0, self._max_interval)
            return LazyStep(averages=True, compares=False)
        self._squares[...] = 0.0
        self._compared_steps, self._missing = steps, len(self._begun)
        return LazyStep(averages=True, compares=True)

    def compare(self, add_squares: Callable[[np.ndarray], None], after: Sequence[Ticket]) -> None:
        """Queue one member's part of a comparison; in a step that compares every member does so, once. Never waits.

        Args:
            add_squares: adds |f|^2, |G|^2 and |f - G|^2 of what this rank owns to an array of them. after: what it comes after.
        """
        assert self._missing, "every group of parameters gives its part once"
        self._queue.post(partial(self._add, add_squares), "squares of gradients that were held back", after)
        self._missing -= 1
        if not self._missing:
            counts = [_NUMBERS] * self._comm.size
            everyone = self._squares.reshape(-1)
            self._ticket = self._queue.post(lambda: self._comm.iallgather(None, everyone, counts), "interval of averaging")

    def _add(self, add_squares: Callable[[np.ndarray], None]) -> Handle:
        add_squares(self._squares[self._comm.rank])
        return Complete()

    def settle(self) -> None:
        """Wait for the comparison that is under way, if any, and decide. Every rank does so between the same steps."""
        if self._ticket is None:
            return
        self._progress.wait(self._ticket)
        self._ticket = None
        latest, total, difference = (sum(of_ranks) for of_ranks in self._squares.T.tolist())
        self._decided = next_interval(self.interval, self._compared_steps, latest, total, difference, self._max_interval)

    def counters(self) -> dict[str, int]:
        """The numbers that later steps follow from, by name. After `settle`."""
        return {"interval": self.interval, "decided": self._decided, "steps": self._steps, "averagings": self._averagings}

    def load_counters(self, counters: Mapping[str, int]) -> None:
        """Take what `counters` gave, within the largest interval of now."""
        self.interval = min(counters.get("interval", 1), self._max_interval)
        self._decided = min(counters.get("decided", self.interval), self._max_interval)
        self._steps, self._averagings = counters.get("steps", 0), counters.get("averagings", 0)
