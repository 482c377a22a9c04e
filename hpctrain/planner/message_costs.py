"""Costs of an averager's operations as a group sends them: whole, rounded to 16 bits, or the largest elements across nodes.

Work beside the messages (rounding, adding up, choosing) is told as bytes of memory that would take as long on one core. That of
rounding and choosing was measured in ratio to a copy; a machine's rate of memory turns it into seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hpctrain.averaging.collective_schedule import OperationKind
from hpctrain.averaging.rounding import Rounding
from hpctrain.averaging.slicing import INDEX_BYTES, Compression
from hpctrain.comm.sums import Wire
from hpctrain.comm.groups import Levels
from hpctrain.planner.collective_costs import Stage, across_nodes, stages, within_nodes
from hpctrain.planner.machine import Machine, OperatorClass
from hpctrain.planner.tasks import GroupPlacement

#: bytes by element: to round it, and to read a rounded one (and add it to a sum)
_ROUNDING_BYTES: Mapping[Wire, tuple[int, int]] = {"float32": (0, 0), "bfloat16": (28, 13), "float16": (68, 42)}
#: bytes by element of a part, to add its residual, choose the largest ones and take these out
_SELECTION_BYTES = 36
#: bytes by element and position that arrive, to add it where it belongs
_PAIR_BYTES = 84


@dataclass(frozen=True)
class MessageCosts:
    """Prices the operations of one parameter group.

    Attributes:
        placement, levels: of the group's ranks. item_bytes: of an element. rounding: of its messages; None: they are whole.
    """

    machine: Machine
    placement: GroupPlacement
    levels: Levels | None
    item_bytes: int
    rounding: Rounding | None = None

    def stages(self, kind: OperationKind, n_bytes: float, compression: Compression | None = None) -> tuple[Stage, ...]:
        """The stages of one operation.

        Args:
            n_bytes: of the whole buffer, as `collective_costs.stages` counts, in the numbers that are computed with.
            compression: of the slice, if any.
        """
        if compression is not None:
            return self._compressed(kind, n_bytes, compression)
        wire = self._wire(kind)
        if wire == "float32" or self.placement.ranks == 1:
            return self._whole(kind, n_bytes)
        elements = n_bytes / self.item_bytes
        write, read = (count * elements for count in _ROUNDING_BYTES[wire])
        if kind is OperationKind.ALLREDUCE:  # each sum is rounded once more by its owner, and read by everybody
            return self._allreduce(n_bytes, write, read)
        if kind is OperationKind.REDUCE_SCATTER:
            return self._reduce(n_bytes, write + read)
        return self._working(self._whole(kind, self._sent(n_bytes)), read + write / self.placement.ranks)

    def selection_seconds(self, elements: float) -> float:
        """Seconds of a core, to choose the largest elements of a part of so many."""
        return self.memory_seconds(_SELECTION_BYTES * elements)

    def scatter_seconds(self, elements: float, compression: Compression) -> float:
        """Seconds of a core, to add up what all nodes sent of a part of so many elements."""
        pairs = compression.nodes * compression.kept(round(elements))
        return self.memory_seconds(elements * self.item_bytes + _PAIR_BYTES * pairs)

    def choice_seconds(self, elements: float, compression: Compression) -> float:
        """Both."""
        return self.selection_seconds(elements) + self.scatter_seconds(elements, compression)

    def memory_seconds(self, n_bytes: float) -> float:
        """Seconds of a core for bytes read and written."""
        rate = self.machine.rates.get(OperatorClass.MEMORY)
        return n_bytes / rate.bytes_per_second if rate is not None else 0.0

    def _wire(self, kind: OperationKind) -> Wire:
        if self.rounding is None or kind in (OperationKind.NORMS, OperationKind.INPUTS, OperationKind.ERRORS):
            return "float32"
        return self.rounding.parameters if kind is OperationKind.ALLGATHER else self.rounding.gradients

    def _sent(self, n_bytes: float) -> float:
        return 2 * n_bytes / self.item_bytes

    def _whole(self, kind: OperationKind, n_bytes: float) -> tuple[Stage, ...]:
        return stages(self.machine, kind, n_bytes, self.placement, self.levels)

    def _exchange(self, n_bytes: float, work_bytes: float, placement: GroupPlacement | None = None) -> tuple[Stage, ...]:
        """Rounded parts to their owners, who add them up."""
        exchanged = stages(self.machine, OperationKind.INPUTS, self._sent(n_bytes), placement or self.placement)
        return self._working(exchanged, work_bytes)

    def _reduce(self, n_bytes: float, work_bytes: float) -> tuple[Stage, ...]:
        if self.levels is None:
            return self._exchange(n_bytes, work_bytes)
        per_node = self.levels.per_node
        within = stages(self.machine, OperationKind.REDUCE_SCATTER, n_bytes, within_nodes(self.placement, per_node))
        across = across_nodes(self.placement, self.levels.nodes, per_node)
        return (*within, *self._exchange(n_bytes / per_node, work_bytes / per_node, across))

    def _allreduce(self, n_bytes: float, write: float, read: float) -> tuple[Stage, ...]:
        """A sum whose parts and results cross rounded. write, read: work of rounding the buffer once, and of reading it."""
        two, kind = self.levels, OperationKind.ALLGATHER
        if two is None:
            gathered = stages(self.machine, kind, self._sent(n_bytes), self.placement)
            return (*self._exchange(n_bytes, write + read), *self._working(gathered, read + write / self.placement.ranks))
        share, across = n_bytes / two.per_node, across_nodes(self.placement, two.nodes, two.per_node)
        gathered = stages(self.machine, kind, self._sent(share), across)
        work = (read + write / two.nodes) / two.per_node
        within = stages(self.machine, kind, n_bytes, within_nodes(self.placement, two.per_node))
        return (*self._reduce(n_bytes, write + read), *self._working(gathered, work), *within)

    def _compressed(self, kind: OperationKind, n_bytes: float, compression: Compression) -> tuple[Stage, ...]:
        """Sums and parameters stay within nodes; values and positions cross them."""
        nodes = compression.nodes
        per_node = self.placement.ranks // nodes
        if kind is not OperationKind.SPARSE:
            return stages(self.machine, kind, n_bytes, within_nodes(self.placement, per_node)) if per_node > 1 else ()
        across = self.placement if per_node == 1 else across_nodes(self.placement, nodes, per_node)
        kept = compression.kept(-(-round(n_bytes / self.item_bytes) // per_node))
        return stages(self.machine, OperationKind.ALLGATHER, nodes * kept * (self.item_bytes + INDEX_BYTES), across)

    def _working(self, stages_of: tuple[Stage, ...], work_bytes: float) -> tuple[Stage, ...]:
        """The stages with work of a core in the first of them."""
        if not stages_of:
            return ()
        seconds, first = self.memory_seconds(work_bytes), stages_of[0]
        latency, cpu = first.latency_seconds + seconds, first.cpu_seconds + seconds
        return (replace(first, latency_seconds=latency, cpu_seconds=cpu), *stages_of[1:])
