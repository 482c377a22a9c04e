"""All communicators of a process grid. Operations that overlap in time have separate ones, so their orders are independent.

`RankStatistics` merges batch statistics over several ranks. It is exact for uneven and empty shares, and avoids sums of squares
in float32, which suffer from cancellation.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import numpy as np

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.backend.operators import StatisticsMerger
from hpctrain.comm.base import Communicator, SingleCommunicator
from hpctrain.comm.groups import GridAxis, ProcessGrid
from hpctrain.comm.progress import ProgressEngine
from hpctrain.nn.network import ALL, MODEL
from hpctrain.parallel.moves import SplitGroup


def merge_moments(counts: np.ndarray, means: np.ndarray, m2s: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    """Return the count, the mean (C,) and the sum of squared deviations (C,) of the union of P groups.

    Groups of count 0 are ignored, even if their values are not finite; if all are empty, the moments are 0. The method is the
    pairwise update of Chan, Golub and LeVeque (The American Statistician 37, 1983) for all groups at once, relative to the first
    group's mean, so that a large common offset does not cancel.

    Args:
        counts: number of samples of each group, float64 (P,).
        means, m2s: mean and sum of squared deviations of each group, float64 (P, C).
    """
    present = counts > 0
    n, mean, m2 = counts[present], means[present], m2s[present]
    if not n.size:
        return 0, np.zeros(means.shape[1]), np.zeros(means.shape[1])
    total = n.sum()
    shift = mean - mean[0]
    center = (n[:, None] * shift).sum(axis=0) / total
    spread = (n[:, None] * (shift - center) ** 2).sum(axis=0)
    return int(total), mean[0] + center, m2.sum(axis=0) + spread


class RankStatistics:
    """A `StatisticsMerger` over the ranks of `comm`. All ranks gather all moments and merge them in rank order, to the same bits.

    `merge` and `sum` are collective and wait. They are posted to the queue of `comm` after all earlier operations, so `comm`
    should have no other use: on the gradients' communicator they would wait for the gradients.

    Args:
        comm: ranks over whose samples the statistics are computed.
    """

    def __init__(self, comm: Communicator, progress: ProgressEngine) -> None:
        self._comm = comm
        self._progress = progress
        self._queue = progress.queue(comm)
        self._gathered: dict[int, np.ndarray] = {}  # buffer of each width, made at its first use

    @property
    def alone(self) -> bool:
        """Whether there is only one rank, so that there is nothing to merge."""
        return self._comm.size == 1

    def merge(self, count: int, mean: np.ndarray, m2: np.ndarray) -> int:
        """Replace `mean` and `m2`, float64 (C,), by the moments over all ranks, and return the total count.

        If `count` is 0, this rank's values are ignored.
        """
        channels = mean.size
        moments = self._buffer(2 * channels + 1)
        own_moments = moments[self._comm.rank]
        own_moments[0] = count
        own_moments[1 : channels + 1] = mean
        own_moments[channels + 1 :] = m2
        self._gather(moments, "batch statistics")
        total, mean[...], m2[...] = merge_moments(moments[:, 0], moments[:, 1 : channels + 1], moments[:, channels + 1 :])
        return total

    def sum(self, values: np.ndarray) -> None:
        """Replace `values`, float64, by their sum over the ranks, in rank order."""
        summands = self._buffer(values.size)
        summands[self._comm.rank] = values.reshape(-1)
        self._gather(summands, "sums of batch norm's backward")
        np.sum(summands, axis=0, out=values.reshape(-1))

    def _buffer(self, width: int) -> np.ndarray:
        if width not in self._gathered:
            self._gathered[width] = np.zeros((self._comm.size, width))
        return self._gathered[width]

    def _gather(self, by_rank: np.ndarray, purpose: str) -> None:
        size, width = by_rank.shape
        self._progress.wait(self._queue.post(lambda: self._comm.iallgather(None, by_rank, [width] * size), purpose))


class GridGroups:
    """This rank's groups on a grid. Creation is collective over the grid's world.

    Rank r of split group c has position c * Pr + r, so the ranks of a split group, which share samples, are neighbours.

    Attributes:
        all_ranks: communicator of all ranks, ordered by position.
        messages: communicator of the same ranks for the step's small message.
        split_size: size Pr of this rank's split group.
        split_rank: rank r of this rank in its split group.
        position: position of this rank.
        gradients: communicator that averages each parameter group ("all", and "model" if layers are split), by name.
        nodes: node of each rank that averages a parameter group, by name.
        norms: communicator of all ranks for norms over several parameter groups.
        shard_holders: communicator of the split group for gathering split parameters; None if layers are never split.
    """

    def __init__(self, grid: ProcessGrid) -> None:
        self.split_size, self.split_rank = grid.rows, grid.row
        self.position = grid.col * grid.rows + grid.row
        self.all_ranks = _copy(grid.world, self.position, "samples" if grid.rows > 1 else GridAxis.DATA.value)
        self.messages = _copy(self.all_ranks, self.position, "messages")
        self.gradients: dict[str, Communicator] = {ALL: self.all_ranks}
        self._statistics: dict[str, Communicator] = {"all": _copy(self.all_ranks, self.position, "statistics")}
        self._split: Communicator | None = None
        self.norms: Communicator = self.all_ranks
        self.shard_holders: Communicator | None = None
        if grid.rows > 1:
            split, data = grid.along(GridAxis.SPLIT), grid.along(GridAxis.DATA)
            self.gradients[MODEL] = data
            self._statistics["split"] = _copy(split, split.rank, "split statistics")
            self._statistics["data"] = _copy(data, data.rank, "data statistics")
            self.shard_holders = _copy(split, split.rank, "parts of parameters")
            self._split = split
        here = grid.node_of[grid.world.rank]
        self.nodes: dict[str, tuple[int, ...]] = {
            name: tuple(comm.allgather_object(here)) for name, comm in self.gradients.items()
        }

    def alone(self) -> GridGroups:
        """Return the groups of a rank that trains without other split groups. Collective over the split group.

        The ranks of one split group cannot compute separately, so they stay together.
        """
        groups = copy.copy(self)
        groups.gradients = {name: SingleCommunicator(f"gradients of {name} alone") for name in self.gradients}
        groups.nodes = dict.fromkeys(self.gradients, (0,))
        groups.norms = SingleCommunicator("norms alone")
        split = self._split
        if split is None:
            groups.messages = SingleCommunicator("messages alone")
            groups._statistics = {"all": SingleCommunicator("statistics alone")}
        else:
            groups.messages = _copy(split, split.rank, "messages of the split group")
            statistics = _copy(split, split.rank, "statistics of the split group")
            groups._statistics = {**self._statistics, "all": statistics, "data": SingleCommunicator("data statistics alone")}
        return groups

    def local_where_alone(self) -> GridGroups:
        """Return the groups with every communicator of size 1 replaced by a `SingleCommunicator`. Not collective.

        A rank that is alone in a communicator sends nothing, so its arrays may lie in memory that transports between processes
        cannot reach.
        """
        groups = copy.copy(self)
        groups.gradients = {name: _local(comm) for name, comm in self.gradients.items()}
        groups._statistics = {name: _local(comm) for name, comm in self._statistics.items()}
        groups.norms, groups.messages = _local(self.norms), _local(self.messages)
        return groups

    def split_group(self, progress: ProgressEngine, arithmetic: Arithmetic | None = None) -> SplitGroup | None:
        """Return the group that exchanges activations; None if no ranks share samples.

        Args:
            arithmetic: arithmetic of the activations; default: the host's.
        """
        return None if self._split is None else SplitGroup(self._split, progress, arithmetic)

    def mergers(self, progress: ProgressEngine) -> Mapping[str, StatisticsMerger]:
        """Return the mergers of batch statistics by the group of ranks that `BatchNormSpec.merge` names."""
        return {name: RankStatistics(comm, progress) for name, comm in self._statistics.items()}

    def counts_of(self, group: str, counts: Sequence[int]) -> Sequence[int]:
        """Return the number of samples of each member of a parameter group's communicator.

        A member of the group "all" is a rank. A member of "model" represents its split group, with the samples of all ranks in
        it.

        Args:
            group: name of the parameter group.
            counts: number of samples of each rank, by position.
        """
        if group == ALL or self.split_size == 1:
            return counts
        return tuple(sum(counts[first : first + self.split_size]) for first in range(0, len(counts), self.split_size))


def _local(comm: Communicator) -> Communicator:
    return comm if comm.size > 1 else SingleCommunicator(comm.name)


def _copy(comm: Communicator, key: int, name: str) -> Communicator:
    copied = comm.split(0, key, name)
    assert copied is not None
    return copied
