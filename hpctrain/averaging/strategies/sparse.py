"""The operations of a schedule with compressed slices: sums within nodes, largest elements across them.

Shi et al., "Towards scalable distributed training of deep learning on public cloud clusters", arXiv 2010.10458 (HiTopKComm): a
dense reduce-scatter within the node, the largest elements of each part across nodes among ranks of equal number, a dense
allgather within the node; here of parameters, as ranks of equal number update the part, each for its node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from hpctrain.averaging.base import AveragerSetup
from hpctrain.averaging.collective_schedule import CollectiveSchedule, Operation, OperationKind, Stream
from hpctrain.averaging.owner_operations import OwnerOperations, StepUpdate
from hpctrain.averaging.sparse_residual import SparsePart, SparseSettings
from hpctrain.comm.base import Array, Communicator, Handle
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import Complete
from hpctrain.comm.groups import Levels, within_node
from hpctrain.compress.selection import Selection
from hpctrain.nn.parameter import Segment


class SparseOperations(OwnerOperations):
    """Those of owners, with the exchange of largest elements. Making it is collective.

    Args:
        two: the levels of the streams; None: every rank is a node.

    Attributes:
        nodes: those that exchange; 1 where one rank is alone.
    """

    def __init__(
        self,
        setup: AveragerSetup,
        schedule: CollectiveSchedule,
        streams: Mapping[Stream, Communicator],
        settings: SparseSettings,
        two: Levels | None,
    ) -> None:
        super().__init__(setup, schedule, streams, 0)
        self.nodes = self._comm.size if two is None else two.nodes
        self._settings = settings
        self._number, self._node = divmod(self._comm.rank, self.nodes)
        # Each has one order of operations, that of the stream on which they are posted.
        self._reduce_within, self._gather_within = (
            None if two is None else within_node(streams[stream], two, f"{setup.comm.name} {stream}")
            for stream in (Stream.GRADIENTS, Stream.PARAMETERS)
        )
        scratch = Selection(setup.group.dtype)
        self._parts: dict[int, SparsePart] = {}
        for k, piece in enumerate(schedule.slices):
            if piece.compression is not None:
                size, dtype = piece.owned_size(self._comm.rank, self._comm.size), setup.group.dtype
                self._parts[k] = SparsePart(size, dtype, piece.compression, settings, streams[Stream.NODES], scratch, (k,))
        #: of dense slices: momentum that the owner keeps, as compressed ones have theirs before the choice
        self._velocities: dict[int, np.ndarray] = {}
        #: of dense slices: what an earlier run kept back of them, until the first step adds it; the same ones on every rank
        self._left: dict[int, np.ndarray] = {}
        self._added: dict[int, np.ndarray] = {}  # those that the step under way has added
        if settings.momentum_correction:
            sizes = {k: self._bounds(k)[1] - self._bounds(k)[0] for k in range(len(schedule.slices)) if k not in self._parts}
            self._velocities = {k: np.zeros(size, setup.group.dtype) for k, size in sizes.items()}

    def _bounds(self, k: int) -> tuple[int, int]:
        """[start, stop) of this rank's part of a slice."""
        return self._schedule.slices[k].part(self._comm.rank, self._comm.size)

    def begin_step(self) -> None:
        """A step begins, and the one before can no longer be undone."""
        self._added.clear()

    def undo(self) -> None:
        """The last step was undone: what it has added of what an earlier run kept back is still to be added."""
        self._left |= self._added

    def kept_back(self) -> list[np.ndarray]:
        """The arrays of residuals and momentum that steps change."""
        of_parts = (array for part in self._parts.values() for array in (part.residual, part.velocity))
        return [*of_parts, *self._velocities.values()]

    # -- starts ----------------------------------------------------------------------------------------------------------------

    def start(self, operation: Operation, update: StepUpdate) -> Handle:
        if operation.kind is not OperationKind.SPARSE:
            return super().start(operation, update)
        begin, end = self._bounds(operation.slice)
        gradient = self._sums.get(operation.slice, self._group.grad[begin:end])
        return self._parts[operation.slice].send(self._group.arithmetic.to_host(gradient), update.number)

    def _start_sum(self, k: int) -> Handle:
        if k not in self._parts:
            return super()._start_sum(k)
        assert self._reduce_within is not None, "a node of one rank has nothing to sum"
        piece = self._schedule.slices[k]
        gradient = self._group.grad[piece.start : piece.stop]
        return self._reduce_within.ireduce_scatter(gradient, self._sums[k], piece.counts(self._comm.size))

    def _gather(self, k: int, comm: Communicator) -> Handle:
        if k not in self._parts:
            return super()._gather(k, comm)
        if self._gather_within is None:
            return Complete()
        piece = self._schedule.slices[k]
        return self._gather_within.iallgather(None, self._group.data[piece.start : piece.stop], piece.counts(self._comm.size))

    def _finish_gradient(self, k: int) -> None:
        begin, end = self._bounds(k)
        gradient = self._group.grad[begin:end]
        if k in self._parts:
            self._receive(k, gradient)
            return
        super()._finish_gradient(k)
        if k in self._left or k in self._velocities:
            values = self._group.arithmetic.to_host(gradient)
            self._group.arithmetic.from_host(gradient, self._corrected(k, values))

    def _receive(self, k: int, gradient: Array) -> None:
        """Write the sum of what all nodes sent; messages, and what is kept back, lie on the host."""
        if self._group.arithmetic.on_host:
            self._parts[k].receive(gradient)
            return
        total = np.empty(gradient.size, self._group.dtype)
        self._parts[k].receive(total)
        self._group.arithmetic.from_host(gradient, total)

    def _corrected(self, k: int, gradient: np.ndarray) -> np.ndarray:
        """The gradient of a dense slice with what was left of it, and the momentum that both give."""
        left = self._left.pop(k, None)
        if left is not None:
            self._added[k] = left
            gradient = gradient + left
        velocity = self._velocities.get(k)
        if velocity is None:
            return gradient
        velocity *= self._settings.momentum_correction
        velocity += gradient
        return velocity

    # -- what is kept back, in a checkpoint: an array of each node, of which the sum matters -----------------------------------

    def keeps_back(self, name: str) -> bool:
        """Whether some of a parameter's gradient is kept back, or may be; the same on every rank."""
        return any(k in self._parts or k in self._left for k in self.touching[name])

    def residual(self, name: str, progress: ProgressEngine) -> np.ndarray:
        """(nodes, size) of what is kept back of one whole parameter; for dense slices the first node has it. Collective."""
        return self._by_node(name, lambda k: self._parts[k].residual if k in self._parts else self._left.get(k), progress)

    def velocity(self, name: str, progress: ProgressEngine) -> np.ndarray:
        """The momentum before the choice, as `residual`. Collective."""
        return self._by_node(name, lambda k: self._parts[k].velocity if k in self._parts else self._velocities[k], progress)

    def load_residual(self, name: str, by_node: np.ndarray) -> None:
        """Take what `residual` gave, that of other nodes included."""
        segment = self._group.segment(name)
        for k in self.touching[name]:
            begin, end = self._bounds(k)
            if k in self._parts:
                self._load(segment, begin, by_node[self._node], self._parts[k].residual)
                continue
            piece = self._schedule.slices[k]
            inside = segment.part(piece.start, piece.stop)
            if by_node[:, inside.start - segment.start : inside.stop - segment.start].any():
                left = self._left.setdefault(k, np.zeros(end - begin, by_node.dtype))
                self._load(segment, begin, by_node.sum(axis=0), left)

    def load_velocity(self, name: str, by_node: np.ndarray) -> None:
        """Take what `velocity` gave."""
        segment = self._group.segment(name)
        for k in self.touching[name]:
            begin, _ = self._bounds(k)
            if k in self._parts:
                self._load(segment, begin, by_node[self._node], self._parts[k].velocity)
            else:
                self._load(segment, begin, by_node.sum(axis=0), self._velocities[k])

    def _load(self, segment: Segment, begin: int, whole: np.ndarray, part: np.ndarray) -> None:
        """Copy what a rank's part, which begins at `begin`, has of one whole parameter."""
        inside = segment.part(begin, begin + part.size)
        part[inside.start - begin : inside.stop - begin] = whole[inside.start - segment.start : inside.stop - segment.start]

    def _by_node(self, name: str, of_slice: Callable[[int], np.ndarray | None], progress: ProgressEngine) -> np.ndarray:
        """(nodes, size) of a parameter from all ranks' parts. of_slice: gives this rank's; None: no rank has anything."""
        segment, comm = self._group.segment(name), self._comm
        by_node = np.zeros((self.nodes, segment.size), self._group.dtype)
        for k in self.touching[name]:
            values = of_slice(k)
            if values is None:
                continue
            piece, begin = self._schedule.slices[k], self._bounds(k)[0]
            parts = [segment.part(*piece.part(rank, comm.size)) for rank in range(comm.size)]
            mine, counts = parts[comm.rank], [share.size for share in parts]
            gathered = np.empty(sum(counts), self._group.dtype)
            handle = comm.iallgather(np.ascontiguousarray(values[mine.start - begin : mine.stop - begin]), gathered, counts)
            progress.wait_handle(handle, f"gradients kept back of {name}")
            place = 0
            for rank, share in enumerate(parts):
                target = by_node[rank % piece.copies, share.start - segment.start : share.stop - segment.start]
                target[...] = gathered[place : place + share.size]
                place += share.size
        return by_node
