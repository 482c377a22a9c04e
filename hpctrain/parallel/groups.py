"""All communicators of a process grid, each with one use, so that no order of messages is tied to another's."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

from hpctrain.backend.kernels.base import StatisticsMerger
from hpctrain.comm.base import Communicator
from hpctrain.comm.grid import GridAxis, ProcessGrid
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import SingleCommunicator
from hpctrain.nn.network import ALL, MODEL
from hpctrain.parallel.batch_norm import RankStatistics
from hpctrain.parallel.split_group import SplitGroup


class GridGroups:
    """This rank's groups on a grid. Making it is collective over the grid's world.

    Ranks are counted by position, c * Pr + r: the ranks of a column, who share samples, are neighbours.

    Attributes:
        samples: all ranks, by position. messages: the same, for the small message. rows, row: Pr and r. position: this rank's.
        gradients: the ranks that average a parameter group ("all", and "model" where there are rows), by the group's name.
        nodes: by a parameter group's name, the node of each rank that averages it.
        norms: all ranks, for norms over several groups. parts: the ROW axis for putting split parameters together; None where
            nothing can be split.
    """

    def __init__(self, grid: ProcessGrid) -> None:
        self.rows, self.row = grid.rows, grid.row
        self.position = grid.col * grid.rows + grid.row
        self.samples = _copy(grid.world, self.position, "samples" if grid.rows > 1 else GridAxis.DATA.value)
        self.messages = _copy(self.samples, self.position, "messages")
        self.gradients: dict[str, Communicator] = {ALL: self.samples}
        self._statistics: dict[str, Communicator] = {"all": _copy(self.samples, self.position, "statistics")}
        self._row: Communicator | None = None
        self.norms: Communicator = self.samples
        self.parts: Communicator | None = None
        if grid.rows > 1:
            row, column = grid.along(GridAxis.SPLIT), grid.along(GridAxis.DATA)
            self.gradients[MODEL] = column
            self._statistics["split"] = _copy(row, row.rank, "split statistics")
            self._statistics["data"] = _copy(column, column.rank, "data statistics")
            self.parts = _copy(row, row.rank, "parts of parameters")
            self._row = row
        here = grid.node_of[grid.world.rank]
        self.nodes: dict[str, tuple[int, ...]] = {
            name: tuple(comm.allgather_object(here)) for name, comm in self.gradients.items()
        }

    def alone(self) -> GridGroups:
        """The same place of a rank whose gradients, statistics and messages stay in its column, whose ranks cannot compute alone.

        Collective over the column.
        """
        found = copy.copy(self)
        found.gradients = {group: SingleCommunicator(f"gradients of {group} alone") for group in self.gradients}
        found.nodes = dict.fromkeys(self.gradients, (0,))
        found.norms = SingleCommunicator("norms alone")
        row = self._row
        if row is None:
            found.messages = SingleCommunicator("messages alone")
            found._statistics = {"all": SingleCommunicator("statistics alone")}
        else:
            found.messages = _copy(row, row.rank, "messages of the split group")
            world = _copy(row, row.rank, "statistics of the split group")
            found._statistics = {**self._statistics, "all": world, "data": SingleCommunicator("data statistics alone")}
        return found

    def split_group(self, progress: ProgressEngine) -> SplitGroup | None:
        """The group that exchanges activations; None where every rank has samples of its own."""
        return None if self._row is None else SplitGroup(self._row, progress)

    def mergers(self, progress: ProgressEngine) -> Mapping[str, StatisticsMerger]:
        """Of batch statistics, by the group of ranks that `BatchNormSpec.merge` names."""
        return {name: RankStatistics(comm, progress) for name, comm in self._statistics.items()}

    def split_counts(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Samples of the ranks of this rank's column, from those of all positions."""
        first = self.position - self.row
        return tuple(counts[first : first + self.rows])

    def counts_of(self, group: str, counts: Sequence[int]) -> Sequence[int]:
        """Samples that each rank of a group's communicator computes on: its column's where layers are split."""
        if group == ALL or self.rows == 1:
            return counts
        return tuple(sum(counts[first : first + self.rows]) for first in range(0, len(counts), self.rows))


def _copy(comm: Communicator, key: int, name: str) -> Communicator:
    made = comm.split(0, key, name)
    assert made is not None
    return made
