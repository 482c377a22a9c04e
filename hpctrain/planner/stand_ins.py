"""Stand-ins for the other ranks of a split group, so that one process can run and time what a rank of it computes.

Nothing travels: messages are complete at once and hold whatever their buffers held, so packing, copies and unpacking take their
time and the numbers mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpctrain.comm.base import Handle
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.posting_queue import Ticket
from hpctrain.comm.single import SingleCommunicator
from hpctrain.parallel.batch_norm import merge_moments
from hpctrain.parallel.split_group import SplitGroup


class _Nothing:
    """The handle of an operation that never began."""

    def test(self) -> bool:
        return True


class StandInGroup(SplitGroup):
    """A split group of `size` ranks, of which only this one is there."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(SingleCommunicator("split"), ProgressEngine(rank=0, deadline_seconds=1.0, abort=lambda code: None))
        self.rank, self.size = rank, size
        self._done = Ticket(_begin_nothing, "nothing", (), "stand-in", 0)
        self._done.done = True

    def alltoall(
        self, send: np.ndarray, recv: np.ndarray, send_counts: Sequence[int], recv_counts: Sequence[int], purpose: str
    ) -> Ticket:
        """Do nothing, and be done."""
        return self._done

    def wait(self, ticket: Ticket) -> None:
        """Return at once."""


class StandInStatistics:
    """A `StatisticsMerger` of `ranks` ranks that all hold what this one holds."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    @property
    def alone(self) -> bool:
        """One rank: there is nothing to merge."""
        return self._ranks == 1

    def merge(self, count: int, mean: np.ndarray, m2: np.ndarray) -> int:
        """Merge as many copies of the moments as there are ranks; give the total count."""
        counts = np.full(self._ranks, float(count))
        means, m2s = (np.broadcast_to(values, (self._ranks, values.size)) for values in (mean.copy(), m2.copy()))
        total, mean[...], m2[...] = merge_moments(counts, means, m2s)
        return total

    def sum(self, values: np.ndarray) -> None:
        """Add up as many copies as there are ranks."""
        np.multiply(values, self._ranks, out=values)


def _begin_nothing() -> Handle:
    raise AssertionError("an operation of a stand-in is never begun")


def stand_in_mergers(split: int, data: int) -> dict[str, StandInStatistics]:
    """The mergers of a rank of a split group of `split` ranks and a data group of `data`, as `BatchNormSpec.merge` names them."""
    return {"all": StandInStatistics(split * data), "split": StandInStatistics(split), "data": StandInStatistics(data)}
