"""The account of a run's waits for data: recorded for each epoch over all ranks, and told in a line at the end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpctrain.job.session import Session
from hpctrain.train.data_waits import DataWaits
from hpctrain.train.metrics_rest import Reporter
from hpctrain.train.progress_text import folded
from hpctrain.train.snapshot import Position

#: a share of the time from which on waits for data deserve a word on what to do about them
_NOTABLE_SHARE = 0.05


@dataclass(frozen=True)
class WaitsOfRanks:
    """Sums over steps. seconds: of the steps, and waited_seconds: of waits for data in them; both means over ranks.

    most_waited_seconds: of the rank that waited longest, which is `rank` of the world.
    """

    steps: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0
    most_waited_seconds: float = 0.0
    rank: int = 0

    @classmethod
    def of(cls, table: np.ndarray) -> WaitsOfRanks:
        """From a line for each rank: its number in the world, its steps, their seconds, and those of waits."""
        ranks, steps, seconds, waited = table.T
        slowest = int(waited.argmax())
        return cls(int(steps.min()), float(seconds.mean()), float(waited.mean()), float(waited[slowest]), int(ranks[slowest]))

    @property
    def share(self) -> float:
        """Share of the time of steps; 0 where there was none."""
        return self.waited_seconds / self.seconds if self.seconds else 0.0

    @property
    def most_share(self) -> float:
        """The same of the rank that waited longest."""
        return self.most_waited_seconds / self.seconds if self.seconds else 0.0

    def facts(self) -> dict[str, object]:
        """For the metrics."""
        return {
            "steps": self.steps,
            "seconds": self.seconds,
            "waited_seconds": self.waited_seconds,
            "share": self.share,
            "most_waited_seconds": self.most_waited_seconds,
            "most_share": self.most_share,
            "rank": self.rank,
        }

    def lines(self, ranks: int) -> list[str]:
        """The end of a run: what share of its time steps waited for data."""
        words = [f"steps waited for data {self.share:.1%} of the time"]
        if ranks > 1:
            words[0] += f" (mean of the ranks; rank {self.rank} {self.most_share:.1%})"
        if self.most_share > _NOTABLE_SHARE:
            words.append("`hpctrain bench data` tells what limits the data")
        return folded(words)


class DataAccount:
    """Tells how long steps waited for data. Every method is collective over the ranks that train.

    Attributes:
        waits: of this rank, which the trainer adds up.
    """

    def __init__(self, session: Session, reporter: Reporter) -> None:
        self._session, self._reporter = session, reporter
        self._every_step = np.zeros((session.groups.all_ranks.size, 4))
        self.waits = DataWaits()

    def tell(self, position: Position) -> None:
        """Record the steps of the epoch that has ended at a position, those of this run."""
        self._record(position.epoch, position)

    def finish(self, position: Position) -> None:
        """Record what is left of an epoch that has not ended, and say how it was in all steps of this run."""
        self._record(position.epoch + 1, position)
        whole = WaitsOfRanks.of(self._every_step)
        if whole.steps:
            for line in whole.lines(len(self._every_step)):
                self._reporter.say(line)

    def _record(self, epoch: int, position: Position) -> None:
        table = self._gathered()
        of_epoch = WaitsOfRanks.of(table)
        self._every_step[:, 0] = table[:, 0]
        self._every_step[:, 1:] += table[:, 1:]
        if of_epoch.steps:
            self._reporter.record("data", {"epoch": epoch, "step": position.global_step, **of_epoch.facts()})

    def _gathered(self) -> np.ndarray:
        """The sums of all ranks since the last time, a line for each."""
        comm, progress = self._session.groups.all_ranks, self._session.progress
        mine = self.waits.take()
        own = np.array([self._session.world.rank, mine.steps, mine.seconds, mine.waited_seconds])
        table = np.zeros((comm.size, len(own)))
        queue = progress.queue(comm)
        progress.wait(queue.post(lambda: comm.iallgather(own, table.reshape(-1), [len(own)] * comm.size), "waits for data"))
        return table
