"""Who owns what of a group under a schedule, and how the sums over all ranks come into what this rank owns."""

from __future__ import annotations

import numpy as np

from hpctrain.averaging.collective_schedule import CollectiveSchedule
from hpctrain.averaging.slices import layer_slices
from hpctrain.averaging.state import gather_state
from hpctrain.averaging.sufficient_factors import SufficientFactorExchange
from hpctrain.comm.base import Array, Communicator, Handle
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import Complete
from hpctrain.nn.parameter import FlatGroup, Segment
from hpctrain.optim.base import Optimizer


class Ownership:
    """This rank's parts of a schedule's slices, with the buffers in which their sums arrive.

    Args:
        comm: gradients are summed on it; its ranks own the parts of a slice in their order. batch: nominal samples of a step over
            all ranks, for the exchange of inputs and errors.

    Attributes:
        own: by slice, the segments that this rank updates. replicated: by slice, those that every rank updates with it.
        owned: all of both, in the order of the flat buffers. touching: by parameter, the slices that hold some of it.
        together: by slice, those that exchange the same inputs and errors, itself included.
        exchange_of: by weight. pieces: by slice, its layer's exchange and its place among that layer's slices.
    """

    def __init__(self, group: FlatGroup, schedule: CollectiveSchedule, comm: Communicator, batch: int) -> None:
        self._group, self._schedule, self._comm, self._batch = group, schedule, comm, batch
        self.touching: dict[str, list[int]] = {name: [] for name in group.parameters}
        self.own: list[tuple[Segment, ...]] = []
        self.replicated: list[tuple[Segment, ...]] = []
        self.pieces: dict[int, tuple[SufficientFactorExchange, int]] = {}
        self.exchange_of: dict[str, SufficientFactorExchange] = {}
        self.together = [layer_slices(schedule.slices, k) for k in range(len(schedule.slices))]
        self._sums: dict[int, Array] = {}
        for k, each in enumerate(schedule.slices):
            begin, end = each.part(comm.rank, comm.size)
            parts = (group.segment(name).part(begin, end) for name in each.parameters)
            self.own.append(tuple(part for part in parts if part.size))
            self.replicated.append(tuple(group.segment(name) for name in each.replicated))
            for name in (*each.parameters, *each.replicated):
                self.touching[name].append(k)
            if each.factors:
                self._add_piece(k)
            elif comm.size > 1:
                self._sums[k] = np.empty_like(group.grad, shape=(end - begin,))
        owned = [segment for parts in (self.own, self.replicated) for segments in parts for segment in segments]
        self.owned = tuple(sorted(owned, key=lambda segment: segment.start))

    def _add_piece(self, k: int) -> None:
        together, weight = self.together[k], self._schedule.slices[k].parameters[0]
        if weight not in self.exchange_of:
            slices = [self._schedule.slices[each] for each in together]
            self.exchange_of[weight] = SufficientFactorExchange(self._group, slices, self._comm, self._batch)
        self.pieces[k] = self.exchange_of[weight], together.index(k)

    def start_sum(self, k: int) -> Handle:
        """Post the reduce-scatter of a slice's gradient."""
        if self._comm.size == 1:
            return Complete()
        each = self._schedule.slices[k]
        whole = self._group.grad[each.start : each.stop]
        return self._comm.ireduce_scatter(whole, self._sums[k], each.counts(self._comm.size))

    def finish_gradient(self, k: int) -> None:
        """Put the sum over all ranks into the owned part of the gradient."""
        if k in self.pieces:
            exchange, piece = self.pieces[k]
            exchange.multiply(piece)
        elif k in self._sums:
            begin, end = self._schedule.slices[k].part(self._comm.rank, self._comm.size)
            self._group.grad[begin:end] = self._sums[k]

    def full_state(self, optimizer: Optimizer, name: str, progress: ProgressEngine) -> dict[str, np.ndarray]:
        """The optimiser's state of one whole parameter, gathered from its owners. Collective; while nothing is queued."""
        segment = self._group.segment(name)
        if any(segment in segments for segments in self.replicated):
            return optimizer.state(segment)
        slices = [self._schedule.slices[k] for k in self.touching[name]]
        return gather_state(optimizer, segment, slices, self._comm, progress)
