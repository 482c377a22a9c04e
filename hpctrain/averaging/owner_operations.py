"""The operations of a schedule in which owners update: what each posts and computes on this rank, and in which buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hpctrain.averaging.base import AveragerSetup
from hpctrain.averaging.collective_schedule import CollectiveSchedule, Operation, OperationKind, Stream, covered_slices
from hpctrain.averaging.group_sums import JointStep, StepReads
from hpctrain.averaging.sixteen_bits import RoundedParameters, caster
from hpctrain.averaging.slicing import layer_slices
from hpctrain.averaging.sufficient_factors import SufficientFactorExchange
from hpctrain.comm.base import Array, Communicator, Complete, GradientSums, Handle
from hpctrain.comm.order import Finished
from hpctrain.comm.progress import ProgressEngine
from hpctrain.nn.parameter import Segment
from hpctrain.optim.base import Norms


@dataclass(frozen=True)
class StepUpdate:
    """What the updates of one step use.

    norms: None where the optimiser needs none. joint: of several groups. left_out: slices that take no part in the step.
    number: of the step, counted from 0 over the whole training, by averagers that count.
    reads: sums over the parameters that the step has read, taken before an update; None: not requested.
    """

    lr: float
    norms: Norms | None
    joint: JointStep | None
    member: int
    left_out: frozenset[int] = frozenset()
    number: int = 0
    reads: StepReads | None = None

    def contribute(self) -> None:
        """Tell the other groups that this one's squares are in place."""
        assert self.joint is not None
        self.joint.contribute(self.member)


class OwnerOperations:
    """The operations of a schedule on this rank: its parts of slices, the buffers of their sums, and the starts.

    Args:
        streams: by stream, its communicator; its ranks own the parts of a slice in their order.
        batch: nominal samples of a step over all ranks, for the exchange of sufficient factors.
        sums: of gradients; None: those of their stream.

    Attributes:
        owned: all segments that this rank updates, in the order of the flat buffers; those that every rank updates included.
        touching: by parameter, the slices that hold some of it. exchange_of: by weight.
        rounded: the exact values and rounding errors that this rank owns, if parameters travel in 16 bits; else None.
        group, schedule, comm: the parameters, the schedule and the ranks that own parts.
        sums: by slice, the sum of the owned part as its last reduce-scatter brought it; none where one rank has all.

    Subclasses with other operations override `start`, `sum_slice`, `finish_gradient` and `gather_slice`.
    """

    def __init__(
        self,
        setup: AveragerSetup,
        schedule: CollectiveSchedule,
        streams: Mapping[Stream, Communicator],
        batch: int,
        sums: GradientSums | None = None,
    ) -> None:
        self.group, self._optimizer, self.schedule = setup.group, setup.optimizer, schedule
        self._terms = setup.terms
        self._streams, self.comm = streams, streams[Stream.GRADIENTS]
        self._sums_of = self.comm if sums is None else sums
        self._counts_replicated = setup.comm.rank == 0  # what every rank owns counts once in a norm
        self.touching: dict[str, list[int]] = {name: [] for name in setup.group.parameters}
        self.exchange_of: dict[str, SufficientFactorExchange] = {}
        self._own: list[tuple[Segment, ...]] = []
        self._replicated: list[tuple[Segment, ...]] = []
        self._pieces: dict[int, tuple[SufficientFactorExchange, int]] = {}  # by slice: its layer's exchange, its place in it
        self.sums: dict[int, Array] = {}
        self._counts = [piece.counts(self.comm.size) for piece in schedule.slices]  # made once: every operation asks
        for k in range(len(schedule.slices)):
            self._add(k, batch)
        self._covered = {first: self._places(slices) for first, slices in covered_slices(schedule).items()}
        self.rounded: RoundedParameters | None = None
        casts = None if schedule.rounding is None else caster(schedule.rounding.parameters)
        if casts is not None and self.comm.size > 1:
            rank, ranks = self.comm.rank, self.comm.size
            self.rounded = RoundedParameters(self.group, schedule.slices, self._own, rank, ranks, casts)
        owned = [segment for parts in (self._own, self._replicated) for segments in parts for segment in segments]
        self.owned = tuple(sorted(owned, key=lambda segment: segment.start))

    def _add(self, k: int, batch: int) -> None:
        piece = self.schedule.slices[k]
        begin, end = piece.part(self.comm.rank, self.comm.size)
        parts = (self.group.segment(name).part(begin, end) for name in piece.parameters)
        self._own.append(tuple(segment for segment in parts if segment.size))
        self._replicated.append(tuple(self.group.segment(name) for name in piece.replicated))
        for name in (*piece.parameters, *piece.replicated):
            self.touching[name].append(k)
        if piece.sufficient_factors:
            together, weight = layer_slices(self.schedule.slices, k), piece.parameters[0]
            if weight not in self.exchange_of:
                slices = [self.schedule.slices[other] for other in together]
                self.exchange_of[weight] = SufficientFactorExchange(self.group, slices, self.comm, batch)
            self._pieces[k] = self.exchange_of[weight], together.index(k)
        elif self.comm.size > piece.copies:
            self.sums[k] = self.group.arithmetic.zeros(end - begin, self.group.dtype)

    def _places(self, slices: range) -> tuple[range, slice]:
        """Return slices whose norms travel together, with the places of their parameters in the norms, which no others have."""
        if len(slices) == len(self.schedule.slices):
            return slices, slice(None)
        places = {segment.parameter: place for place, segment in enumerate(self.group.segments)}
        pieces = [self.schedule.slices[k] for k in slices]
        covered = {places[name] for piece in pieces for name in (*piece.parameters, *piece.replicated)}
        return slices, slice(min(covered), max(covered) + 1)

    def takes_part(self, operation: Operation, update: StepUpdate) -> bool:
        """Return whether a step that leaves out some slices posts an operation.

        Norms are posted if they are those of any other slice.

        Or if those of several groups travel together: the others wait for this group's, of whatever takes part.
        """
        left_out = update.left_out
        if operation.kind is OperationKind.NORMS:
            return update.joint is not None or not left_out.issuperset(self._covered[operation.slice][0])
        return operation.slice not in left_out

    def begin_step(self) -> None:
        """Begin a step: nothing to prepare, by default."""

    # -- starts: called by the progress engine when an operation's turn has come; they may compute, and must not wait ----------

    def start(self, operation: Operation, update: StepUpdate) -> Handle:
        """Post an operation of a step, with what must be computed just before it."""
        match operation.kind:
            case OperationKind.INPUTS:
                return self._pieces[operation.slice][0].post_inputs()
            case OperationKind.ERRORS:
                return self._pieces[operation.slice][0].post_errors()
            case OperationKind.NORMS:
                return self._start_norms(operation, update)
            case OperationKind.ALLGATHER:
                return self._update_and_gather(operation, update)
            case _:
                return self.sum_slice(operation.slice)

    def sum_slice(self, k: int) -> Handle:
        """Post the sum of a slice's gradient over the ranks, each of which gets its part."""
        if self.comm.size == 1:
            return Complete()
        piece = self.schedule.slices[k]
        return self._sums_of.ireduce_scatter(self._terms(piece.start, piece.stop), self.sums[k], self._counts[k])

    def _start_norms(self, operation: Operation, update: StepUpdate) -> Handle:
        """Add up squares of what is owned here and post their sum over the ranks, unless all groups' travel together."""
        norms = update.norms
        assert norms is not None
        slices, places = self._covered[operation.slice]
        norms.clear(places)
        segments: list[Segment] = []
        for k in slices:
            if k in update.left_out:
                continue
            self.finish_gradient(k)
            self._optimizer.prepare_norms(self._updated(k))
            if self.rounded is None:
                segments += self._counted(k)
            else:
                self.rounded.add_squares(norms, k, self._own[k])
                segments += self._replicated[k] if self._counts_replicated else ()
            if self.group.arithmetic.on_host:  # while the slice is in a cache; elsewhere one wait for all is better
                norms.add_partial(self.group, segments)
                segments.clear()
        norms.add_partial(self.group, segments)
        if update.joint is not None:
            update.contribute()
            return Complete()
        handle = self._streams[operation.stream].iallreduce(norms.message(places))
        return Finished(handle, lambda: norms.complete(places))

    def read_parts(self) -> list[tuple[Segment, ...]]:
        """Return the segments of each slice, followed by its segments that every rank updates."""
        slices = self.schedule.slices
        return [(*self.group.covering(piece.start, piece.stop), *self._replicated[k]) for k, piece in enumerate(slices)]

    def update_parts(self) -> list[tuple[Segment, ...]]:
        """Return the segments of each slice that this rank updates."""
        return [self._updated(k) for k in range(len(self.schedule.slices))]

    def _updated(self, k: int) -> tuple[Segment, ...]:
        return (*self._own[k], *self._replicated[k])

    def counted(self) -> list[tuple[Segment, dict[str, Array]]]:
        """Return owned segments that have each element of the group once over the ranks, with views of their state."""
        segments = (segment for k in range(len(self.schedule.slices)) for segment in self._counted(k))
        return [(segment, self.owned_state(segment)) for segment in segments]

    def _counted(self, k: int) -> tuple[Segment, ...]:
        """Return the segments of a slice that count on this rank: elements that several ranks update count on one of them."""
        counted = () if self.comm.rank % self.schedule.slices[k].copies else self._own[k]
        return (*counted, *self._replicated[k]) if self._counts_replicated else counted

    def _update_and_gather(self, operation: Operation, update: StepUpdate) -> Handle:
        """Update what is owned of a slice, then gather all of it in place."""
        k = operation.slice
        if update.reads is not None:  # this is the last moment: the update writes this rank's part, the gather those of others
            update.reads.take(k)
        if update.norms is None:
            self.finish_gradient(k)
        if self.rounded is not None:
            self.rounded.restore(k)
        self._optimizer.update(self._updated(k), update.lr, update.norms)
        return self.gather_slice(k, self._streams[operation.stream])

    def gather_slice(self, k: int, comm: Communicator) -> Handle:
        """Post the allgather of a slice's parameters, in place."""
        if self.rounded is not None:
            return self.rounded.gather(k, comm)
        piece = self.schedule.slices[k]
        return comm.iallgather(None, self.group.data[piece.start : piece.stop], self._counts[k])

    def finish_gradient(self, k: int) -> None:
        """Put the sum over all ranks into the owned part of a slice's gradient. Its sum is complete."""
        if k in self._pieces:
            exchange, place = self._pieces[k]
            exchange.multiply(place)
        elif k in self.sums:
            begin, end = self.schedule.slices[k].part(self.comm.rank, self.comm.size)
            self.group.arithmetic.copy(self.group.grad[begin:end], self.sums[k])

    # -- the optimiser's state -----------------------------------------------------------------------------------------------

    def full_state(self, name: str, progress: ProgressEngine) -> dict[str, np.ndarray]:
        """Return the optimiser's state of one whole parameter, 1-D, by name, from its owners.

        Collective; while nothing is queued.
        """
        segment, comm = self.group.segment(name), self.comm
        if any(segment in segments for segments in self._replicated):
            return self._state(segment)
        # A part without elements, for the names and types of the states.
        whole = {key: np.empty(segment.size, values.dtype) for key, values in self._state(segment.part(0, 0)).items()}
        for piece in (self.schedule.slices[k] for k in self.touching[name]):
            owned = [segment.part(*piece.part(rank, comm.size)) for rank in range(comm.size)]
            # Of ranks that own the same part the first one sends it.
            counts = [0 if rank % piece.copies else part.size for rank, part in enumerate(owned)]
            begin = max(segment.start, piece.start) - segment.start
            state = self._state(owned[comm.rank])
            for key, target in whole.items():
                handle = comm.iallgather(state[key][: counts[comm.rank]], target[begin : begin + sum(counts)], counts)
                progress.wait_handle(handle, f"{key} of {name}")
        return whole

    def gather_parameters(self, progress: ProgressEngine) -> None:
        """Gather all slices as their owners have them, never rounded. Collective; while nothing is queued."""
        comm = self.comm
        for k, piece in enumerate(self.schedule.slices if comm.size > 1 else ()):
            # Of ranks that own the same part the first one sends it.
            counts = [
                0 if rank % piece.copies else count
                for rank, count in enumerate(piece.owned_size(rank, comm.size) for rank in range(comm.size))
            ]
            begin, end = piece.part(comm.rank, comm.size)
            # The sum of the last step is in the gradient: its buffer is free, and none has to be made.
            free = self.sums[k] if k in self.sums else self.group.arithmetic.zeros(end - begin, self.group.dtype)
            sent = free[: counts[comm.rank]]
            if counts[comm.rank]:
                self.group.arithmetic.copy(sent, self.group.data[begin:end])
            handle = comm.iallgather(sent, self.group.data[piece.start : piece.stop], counts)
            progress.wait_handle(handle, f"parameters of {piece.name}")

    def owned_state(self, segment: Segment) -> dict[str, Array]:
        """Return views of the state of an owned segment, or of one without elements."""
        rounded = {} if self.rounded is None else self.rounded.state(segment)
        return {**self._optimizer.state(segment), **rounded}

    def _state(self, segment: Segment) -> dict[str, np.ndarray]:
        """Return the state of an owned segment on the host."""
        return {key: self.group.arithmetic.to_host(view) for key, view in self.owned_state(segment).items()}
