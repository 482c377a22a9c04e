"""All communicators of a process grid, each with one use, so that no order of messages is tied to another's.

`RankStatistics` merges batch statistics over several ranks: exact for uneven and empty shares, and without sums of squares in
float32, which cancel.
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
    """Return total count, mean (C,) and sum of squared deviations (C,) of P groups; counts (P,), means and m2s (P, C), float64.

    Groups of count 0 are left out, whatever they hold; if all are, the moments are 0. The pairwise update of Chan, Golub and
    LeVeque (The American Statistician 37, 1983) for all groups at once, relative to the first one's mean, so that a large common
    offset does not cancel.
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
    """A `StatisticsMerger` over the ranks of `comm`. All ranks gather all moments and merge them in rank order: the same bits.

    Both calls are collective and wait. They pass through the queue of `comm`, after everything posted there before, so it should
    be a communicator of their own: on that of the gradients they would wait for these.

    Args:
        comm: the ranks that share the step. progress: the process's engine.
    """

    def __init__(self, comm: Communicator, progress: ProgressEngine) -> None:
        self._comm = comm
        self._progress = progress
        self._queue = progress.queue(comm)
        self._gathered: dict[int, np.ndarray] = {}  # by width: one for each channel count, made at its first step

    @property
    def alone(self) -> bool:
        """Whether there is one rank, so that there is nothing to merge."""
        return self._comm.size == 1

    def merge(self, count: int, mean: np.ndarray, m2: np.ndarray) -> int:
        """Replace `mean` and `m2`, float64 (C,), by those of all ranks; return the total count. At count 0 they are not read."""
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

    Ranks are counted by position, c * Pr + r: the ranks of a split group, which share samples, are neighbours.

    Attributes:
        all_ranks: all ranks, by position. messages: the same ranks, for the step's small message.
        split_size, split_rank: Pr and r: the size of this rank's split group and its rank in it. position: this rank's.
        gradients: the ranks that average a parameter group ("all", and "model" where layers are split), by the group's name.
        nodes: by a parameter group's name, the node of each rank that averages it.
        norms: all ranks, for norms over several parameter groups.
        shard_holders: the split group, to put split parameters together; None if nothing can be split.
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
        """Return the groups of a rank that trains without other split groups; ranks of one split group cannot compute apart.

        Collective over the split group.
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
        """Return the groups with a `SingleCommunicator` in place of each communicator that has one rank. Not collective.

        Such a rank sends nothing, so its arrays may lie where transports between processes do not reach them.
        """
        groups = copy.copy(self)
        groups.gradients = {name: _local(comm) for name, comm in self.gradients.items()}
        groups._statistics = {name: _local(comm) for name, comm in self._statistics.items()}
        groups.norms, groups.messages = _local(self.norms), _local(self.messages)
        return groups

    def split_group(self, progress: ProgressEngine, arithmetic: Arithmetic | None = None) -> SplitGroup | None:
        """Return the group that exchanges activations; None if every rank has samples of its own.

        Args:
            arithmetic: of the activations; by default the host's.
        """
        return None if self._split is None else SplitGroup(self._split, progress, arithmetic)

    def mergers(self, progress: ProgressEngine) -> Mapping[str, StatisticsMerger]:
        """Return the mergers of batch statistics, by the group of ranks that `BatchNormSpec.merge` names."""
        return {name: RankStatistics(comm, progress) for name, comm in self._statistics.items()}

    def counts_of(self, group: str, counts: Sequence[int]) -> Sequence[int]:
        """Return the samples that each rank of a parameter group's communicator computes on: for "model" its split group's."""
        if group == ALL or self.split_size == 1:
            return counts
        return tuple(sum(counts[first : first + self.split_size]) for first in range(0, len(counts), self.split_size))


def _local(comm: Communicator) -> Communicator:
    return comm if comm.size > 1 else SingleCommunicator(comm.name)


def _copy(comm: Communicator, key: int, name: str) -> Communicator:
    copied = comm.split(0, key, name)
    assert copied is not None
    return copied
