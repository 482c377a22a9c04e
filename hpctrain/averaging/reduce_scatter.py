"""Averager in which each rank updates its own part of every slice: reduce-scatter, update, allgather.

Lee, Agrawal, Balaprakash, Choudhary and Liao, "Communication-efficient parallelization strategy for deep convolutional neural
network training", MLHPC 2018. Gradients are summed to the rank that owns a part of a slice. That rank holds the optimiser state
of its part and updates only this part. The updated parameters are gathered in place, and the next forward pass waits for them
layer by layer.

`ReduceScatterAverager.begin_step` queues all operations of a step in the schedule's order. Each operation starts once its events
on this rank have happened (gradient ready, data released) and the operations that it depends on are complete. The order therefore
never depends on timing. `OwnerOperations` defines what each operation posts and computes on this rank, and holds the buffers.
`reduce_scatter_strategy.py` plans the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from hpctrain.averaging.base import Agreement, AveragerSetup, GradientAverager
from hpctrain.averaging.collective_schedule import (
    CollectiveSchedule,
    Dependencies,
    EventKind,
    LocalEventKey,
    Operation,
    OperationKind,
    Stream,
    covered_slices,
    dependencies,
)
from hpctrain.averaging.group_sums import JointStep
from hpctrain.averaging.link_simulation import StepClock, Times, over_ranks
from hpctrain.averaging.sixteen_bits import RoundedParameters, caster
from hpctrain.averaging.slicing import layer_slices
from hpctrain.averaging.sufficient_factors import SufficientFactorExchange
from hpctrain.comm.base import Array, Communicator, Complete, GradientSums, Handle
from hpctrain.comm.order import Finished
from hpctrain.comm.progress import Dependency, LocalEvent, ProgressEngine
from hpctrain.nn.parameter import Parameter, Segment
from hpctrain.optim.base import Norms

_WARM_UP_STEPS = 2
_MEASURED_STEPS = 3
_NOTHING = LocalEvent("an operation that the step leaves out")
_NOTHING.happen()


class StepUpdate(NamedTuple):
    """Arguments of the updates of one step.

    Attributes:
        norms: norms for the updates; None if the optimiser needs none.
        joint: norms of all groups that travel together; None if the norms of this group travel separately.
        member: index of this group among the members of `joint`.
        left_out: slices that take no part in the step.
        number: number of the step; counted from 0 over the whole training if the averager restores it from a checkpoint.
        sum_reads: function that sums a slice's parameters, which the step has read, before they are written; None: not watched.
    """

    lr: float
    norms: Norms | None
    joint: JointStep | None
    member: int
    left_out: frozenset[int] = frozenset()
    number: int = 0
    sum_reads: Callable[[int], None] | None = None

    def contribute(self) -> None:
        """Announce to the other groups that this group's squares are in place."""
        assert self.joint is not None
        self.joint.contribute(self.member)


class OwnerOperations:
    """Operations of a schedule on this rank: its parts of slices, the buffers of their sums, and the starts of operations.

    Subclasses with other operations override `start`, `sum_slice`, `finish_gradient` and `gather_slice`.

    Args:
        streams: communicators by stream. Their ranks own the parts of a slice in rank order.
        batch: nominal samples of a step over all ranks, for the exchange of sufficient factors.
        sums: sums of gradients; None: sums of the stream's communicator.

    Attributes:
        owned: all segments that this rank updates, in the order of the flat buffers, including segments that every rank updates.
        touching: indices of the slices that contain elements of a parameter, by parameter.
        update_parts: segments that this rank updates, by slice.
        reads: sums of the parameters that a step reads; a part has the parameters of one slice. None: not watched.
        exchange_of: exchange of sufficient factors by weight.
        rounded: exact values and rounding errors that this rank owns; None if no parameters travel in 16 bits.
        comm: communicator of the ranks that own parts.
        sums: sum of the owned part as written by the last reduce-scatter, by slice; only slices with a reduce-scatter over
            several ranks.
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
        self._counts_replicated = setup.comm.rank == 0  # segments that every rank owns count once in a norm
        self.touching: dict[str, list[int]] = {name: [] for name in setup.group.parameters}
        self.exchange_of: dict[str, SufficientFactorExchange] = {}
        self._own: list[tuple[Segment, ...]] = []
        self._replicated: list[tuple[Segment, ...]] = []
        self._pieces: dict[int, tuple[SufficientFactorExchange, int]] = {}  # (its layer's exchange, index in it), by slice
        self.sums: dict[int, Array] = {}
        self._own_grad: list[Array] = []  # by slice, the owned part of its gradient
        self._data: list[Array] = []  # by slice, its parameters
        self._counts = [piece.counts(self.comm.size) for piece in schedule.slices]  # computed once; every operation uses them
        for k in range(len(schedule.slices)):
            self._add(k, batch)
        self.update_parts = [(*own, *replicated) for own, replicated in zip(self._own, self._replicated, strict=True)]
        self._covered = {first: self._places(slices) for first, slices in covered_slices(schedule).items()}
        self.rounded: RoundedParameters | None = None
        casts = None if schedule.rounding is None else caster(schedule.rounding.parameters)
        if casts is not None and self.comm.size > 1:
            rank, ranks = self.comm.rank, self.comm.size
            self.rounded = RoundedParameters(self.group, schedule.slices, self._own, rank, ranks, casts, watched=setup.watched)
        owned = [segment for parts in (self._own, self._replicated) for segments in parts for segment in segments]
        self.owned = tuple(sorted(owned, key=lambda segment: segment.start))
        parts = [(*self.group.covering(piece.start, piece.stop), *self._replicated[k]) for k, piece in enumerate(schedule.slices)]
        self.reads = setup.read_sums(parts, self.owned)

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
        self._own_grad.append(self.group.grad[begin:end])
        self._data.append(self.group.data[piece.start : piece.stop])

    def _places(self, slices: range) -> tuple[range, slice]:
        """Return the given slices, whose norms travel together, and the range of rows in the norms for their parameters."""
        if len(slices) == len(self.schedule.slices):
            return slices, slice(None)
        places = {segment.parameter: place for place, segment in enumerate(self.group.segments)}
        pieces = [self.schedule.slices[k] for k in slices]
        covered = {places[name] for piece in pieces for name in (*piece.parameters, *piece.replicated)}
        return slices, slice(min(covered), max(covered) + 1)

    def takes_part(self, operation: Operation, update: StepUpdate) -> bool:
        """Return whether a step that leaves out some slices posts `operation`.

        Norms are posted if they cover any slice that is not left out. They are always posted if norms of several groups travel
        together, because the other groups wait for this group's contribution.
        """
        left_out = update.left_out
        if operation.kind is OperationKind.NORMS:
            return update.joint is not None or not left_out.issuperset(self._covered[operation.slice][0])
        return operation.slice not in left_out

    def begin_step(self) -> None:
        """Begin a step. The base class does nothing."""

    # -- starts: called by the progress engine when an operation's turn has come; they may compute, and must not wait ----------

    def start(self, operation: Operation, update: StepUpdate) -> Handle:
        """Post an operation of a step, after the computations that must precede it."""
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
        """Post the reduce-scatter of a slice's gradient."""
        if self.comm.size == 1:
            return Complete()
        piece = self.schedule.slices[k]
        return self._sums_of.ireduce_scatter(self._terms(piece.start, piece.stop), self.sums[k], self._counts[k])

    def _start_norms(self, operation: Operation, update: StepUpdate) -> Handle:
        """Add up the squares of owned elements and post their allreduce, or contribute them to the norms of all groups."""
        norms = update.norms
        assert norms is not None
        slices, places = self._covered[operation.slice]
        norms.clear(places)
        segments: list[Segment] = []
        for k in slices:
            if k in update.left_out:
                continue
            self.finish_gradient(k)
            self._optimizer.prepare_norms(self.update_parts[k])
            if self.rounded is None:
                segments += self._counted(k)
            else:
                self.rounded.add_squares(norms, k, self._own[k])
                segments += self._replicated[k] if self._counts_replicated else ()
            if self.group.arithmetic.on_host:  # while the slice is in a cache; on a device a single wait is better
                norms.add_partial(self.group, segments)
                segments.clear()
        norms.add_partial(self.group, segments)
        if update.joint is not None:
            update.contribute()
            return Complete()
        handle = self._streams[operation.stream].iallreduce(norms.message(places))
        return Finished(handle, lambda: norms.complete(places))

    def counted(self) -> list[tuple[Segment, dict[str, Array]]]:
        """Return owned segments, with views of their state, that contain each element of the group once over all ranks."""
        segments = (segment for k in range(len(self.schedule.slices)) for segment in self._counted(k))
        return [(segment, self.owned_state(segment)) for segment in segments]

    def _counted(self, k: int) -> tuple[Segment, ...]:
        """Return the segments of a slice that this rank counts. Elements that several ranks update are counted on one of them."""
        counted = () if self.comm.rank % self.schedule.slices[k].copies else self._own[k]
        return (*counted, *self._replicated[k]) if self._counts_replicated else counted

    def _update_and_gather(self, operation: Operation, update: StepUpdate) -> Handle:
        """Update this rank's part of a slice, then post the allgather of the slice in place."""
        k = operation.slice
        if update.sum_reads is not None:  # before the update writes this rank's part and the gather the other parts
            update.sum_reads(k)
        if update.norms is None:
            self.finish_gradient(k)
        if self.rounded is not None:
            self.rounded.restore(k)
        self._optimizer.update(self.update_parts[k], update.lr, update.norms)
        return self.gather_slice(k, self._streams[operation.stream])

    def gather_slice(self, k: int, comm: Communicator) -> Handle:
        """Post the allgather of a slice's parameters, in place."""
        if self.rounded is not None:
            return self.rounded.gather(k, comm)
        return comm.iallgather(None, self._data[k], self._counts[k])

    def finish_gradient(self, k: int) -> None:
        """Write the sum over all ranks to the owned part of a slice's gradient. The slice's reduction must be complete."""
        if k in self._pieces:
            exchange, place = self._pieces[k]
            exchange.multiply(place)
        elif k in self.sums:
            self.group.arithmetic.copy(self._own_grad[k], self.sums[k])

    # -- the optimiser's state -----------------------------------------------------------------------------------------------

    def full_state(self, name: str, progress: ProgressEngine) -> dict[str, np.ndarray]:
        """Return the optimiser's state of one whole parameter by name, 1-D, gathered from its owners.

        Collective; nothing may be queued.
        """
        segment, comm = self.group.segment(name), self.comm
        if any(segment in segments for segments in self._replicated):
            return self._state(segment)
        # An empty part provides the names and dtypes of the states.
        whole = {key: np.empty(segment.size, values.dtype) for key, values in self._state(segment.part(0, 0)).items()}
        for piece in (self.schedule.slices[k] for k in self.touching[name]):
            owned = [segment.part(*piece.part(rank, comm.size)) for rank in range(comm.size)]
            # The first of the ranks that own the same part sends it.
            counts = [0 if rank % piece.copies else part.size for rank, part in enumerate(owned)]
            begin = max(segment.start, piece.start) - segment.start
            state = self._state(owned[comm.rank])
            for key, target in whole.items():
                handle = comm.iallgather(state[key][: counts[comm.rank]], target[begin : begin + sum(counts)], counts)
                progress.wait_handle(handle, f"{key} of {name}")
        return whole

    def state_names(self, name: str) -> Collection[str]:
        """Return the names of the states in `full_state`. Not collective."""
        segment = self.group.segment(name)
        replicated = any(segment in segments for segments in self._replicated)
        return tuple(self.owned_state(segment if replicated else segment.part(0, 0)))

    def gather_parameters(self, progress: ProgressEngine) -> None:
        """Gather the parameters of all slices from their owners, unrounded. Collective; nothing may be queued."""
        comm = self.comm
        for k, piece in enumerate(self.schedule.slices if comm.size > 1 else ()):
            # The first of the ranks that own the same part sends it.
            counts = [
                0 if rank % piece.copies else count
                for rank, count in enumerate(piece.owned_size(rank, comm.size) for rank in range(comm.size))
            ]
            begin, end = piece.part(comm.rank, comm.size)
            # The sum of the last step has been copied to the gradient, so its buffer is free.
            free = self.sums[k] if k in self.sums else self.group.arithmetic.zeros(end - begin, self.group.dtype)
            sent = free[: counts[comm.rank]]
            if counts[comm.rank]:
                self.group.arithmetic.copy(sent, self.group.data[begin:end])
            handle = comm.iallgather(sent, self.group.data[piece.start : piece.stop], counts)
            progress.wait_handle(handle, f"parameters of {piece.name}")

    def owned_state(self, segment: Segment) -> dict[str, Array]:
        """Return views of the state of a segment that this rank owns, or of an empty segment."""
        rounded = {} if self.rounded is None else self.rounded.state(segment)
        return {**self._optimizer.state(segment), **rounded}

    def _state(self, segment: Segment) -> dict[str, np.ndarray]:
        """Return the state of an owned segment on the host."""
        return {key: self.group.arithmetic.to_host(view) for key, view in self.owned_state(segment).items()}


@dataclass
class ReduceScatterStep:
    """State of one step. Operations that start late still find the state of their step.

    Attributes:
        update: arguments of the step's updates.
        events: events by kind and parameter.
        tickets: tickets by position in the schedule.
        gathered: tickets by slice, complete once the slice's parameters hold the step's values. If the step leaves a slice out,
            the ticket is that of an earlier step.
    """

    update: StepUpdate
    events: Mapping[EventKind, Mapping[str, LocalEvent]]
    tickets: list[Dependency] = field(default_factory=list)
    gathered: dict[int, Dependency] = field(default_factory=dict)


class ReduceScatterAverager(GradientAverager):
    """Averager that updates this rank's part of every slice and gathers the parameters from all ranks.

    A subclass may leave slices out of a step (`left_out_slices`), or use other operations.

    Args:
        exchanging: weight -> biases of the linear layers that exchange inputs and errors.
        nominal_batch: samples of a step over all ranks.
        order: ranks of `comm` in the rank order of the streams' communicators; None: the order of `comm`.
        replan: function that returns the schedule in another order, from times measured in the first steps; None: the order is
            fixed.
        operations: operations of the schedule on this rank; None: `OwnerOperations`.

    Attributes:
        operations: operations of the schedule on this rank.
        queues: posting queues by stream.
        posting: operations in order, each with its dependencies and its text.
        step: current step; None before the first.
        step_number: number of the next step, counted from 0; over the whole training if a subclass includes it in `counters`.
    """

    schedule: CollectiveSchedule

    def __init__(
        self,
        setup: AveragerSetup,
        agreement: Agreement,
        *,
        exchanging: Mapping[str, tuple[str, ...]],
        nominal_batch: int,
        order: Sequence[int] | None = None,
        replan: Callable[[CollectiveSchedule, Times], CollectiveSchedule] | None = None,
        operations: OwnerOperations | None = None,
    ) -> None:
        super().__init__(setup)
        assert agreement.schedule is not None
        self.schedule = agreement.schedule
        self.posting = _posting(self.schedule)
        self._comm = agreement.streams[Stream.GRADIENTS]
        self.queues = {stream: self.progress.queue(comm, self.schedule.window) for stream, comm in agreement.streams.items()}
        self.operations = operations or OwnerOperations(setup, self.schedule, agreement.streams, nominal_batch, agreement.sums)
        ranks = range(self._comm.size)
        self._norms = setup.own_norms(piece.part(rank, self._comm.size) for piece in self.schedule.slices for rank in ranks)
        self.optimizer.bind(self.group, self.operations.owned)
        self._state_of = self.operations.owned_state
        self.counted = self.operations.counted
        self.rounded = self.operations.rounded
        self.reads, self.update_parts = self.operations.reads, self.operations.update_parts
        self.complete_parameters = partial(self._wait_gathered, None)
        self.gather_parameters = partial(self.operations.gather_parameters, self.progress)
        self._exchanging = exchanging
        self._weight_of = {name: weight for weight, biases in exchanging.items() for name in (weight, *biases)}
        #: whether gathered parts need their shadows refreshed
        self._refreshes_shadows = self.group.shadow is not None and setup.comm.size > 1
        self._names = tuple(name for name, parameter in self.group.parameters.items() if parameter.size)
        named = {EventKind.GRADIENT: self._names, EventKind.INPUTS: self._exchanging, EventKind.LAST_READ: self._names}
        self._event_texts = {kind: {name: str(LocalEventKey(kind, name)) for name in names} for kind, names in named.items()}
        self._order, self._counts = order, [0] * setup.comm.size
        self._replan = replan
        self._clock = StepClock(self.progress)
        self._steps = self.step_number = 0
        self.step: ReduceScatterStep | None = None
        self._events: Mapping[EventKind, Mapping[str, LocalEvent]] = {}  # of the current step
        self._previous: ReduceScatterStep | None = None

    # -- a step --------------------------------------------------------------------------------------------------------------

    def begin_step(self, lr: float, counts: Sequence[int] | None = None) -> None:
        """Queue all operations of the step in the schedule's order. Each starts once its dependencies are complete."""
        if self._replan is not None and self._steps == _WARM_UP_STEPS + _MEASURED_STEPS:
            self._order_by_measured_times(self._replan)
        self._steps += 1
        self._clock.begin(self._steps > _WARM_UP_STEPS and self._replan is not None)
        assert counts is not None or not self._exchanging, "the exchange of inputs and errors requires the step's counts"
        if counts is not None:
            self._counts = list(counts) if self._order is None else [counts[rank] for rank in self._order]
        self._previous, self.step = self.step, self._new_step(lr)
        self._events = self.step.events
        for operation, needs, text in self.posting:
            self._post(operation, needs, text, self.step)

    def left_out_slices(self) -> frozenset[int]:
        """Return the slices that the step neither sums nor updates, the same on every rank."""
        return frozenset()

    def _new_step(self, lr: float) -> ReduceScatterStep:
        events = {kind: {name: LocalEvent(text) for name, text in texts.items()} for kind, texts in self._event_texts.items()}
        self.operations.begin_step()
        joint = None if self._joint is None else self._joint.begin_step(self._member)
        norms = self._norms if joint is None else joint.norms[self._member]
        left_out = self.left_out_slices()
        slices = self.schedule.slices
        self.optimizer.begin_step({name for k in left_out for name in (*slices[k].parameters, *slices[k].replicated)})
        sum_reads = None if self.reads is None else self.reads.begin()
        update = StepUpdate(lr, norms, joint, self._member, left_out, self.step_number, sum_reads)
        self.step_number += 1
        return ReduceScatterStep(update, events)

    def _post(self, operation: Operation, needs: Dependencies, text: str, step: ReduceScatterStep) -> None:
        if step.update.left_out and not self.operations.takes_part(operation, step.update):
            step.tickets.append(_NOTHING)
            if operation.kind is OperationKind.ALLGATHER:
                before = self._previous
                step.gathered[operation.slice] = _NOTHING if before is None else before.gathered[operation.slice]
            return
        after: list[Dependency] = [step.events[event.kind][event.parameter] for event in needs.events]
        after += map(step.tickets.__getitem__, needs.operations)
        if self._previous is not None:
            after += map(self._previous.gathered.__getitem__, needs.gathers_before)
        start = partial(self.operations.start, operation, step.update)
        ticket = self.queues[operation.stream].post(start, text, after)
        joint = step.update.joint
        if operation.kind is OperationKind.NORMS and joint is not None:
            ticket = joint.ticket  # later operations need the norms of all groups
        step.tickets.append(ticket)
        if operation.kind is OperationKind.ALLGATHER:
            step.gathered[operation.slice] = ticket

    def takes_sufficient_factors(self, parameters: Sequence[Parameter]) -> bool:
        return any(parameter.name in self._weight_of for parameter in parameters)

    def input_ready(self, parameters: Sequence[Parameter], x: Array) -> None:
        self._take_inputs(self._weight_of[parameters[0].name], x)
        self.progress.poll()

    def error_ready(self, parameters: Sequence[Parameter], dy: Array) -> None:
        self._take_errors(self._weight_of[parameters[0].name], dy)
        self.progress.poll()

    def _take_inputs(self, weight: str, x: Array | None) -> None:
        exchange = self.operations.exchange_of[weight]
        exchange.begin_step(self._counts)
        exchange.pack_inputs(x)
        self._events[EventKind.INPUTS][weight].happen()

    def _take_errors(self, weight: str, dy: Array | None) -> None:
        for name in (weight, *self._exchanging[weight]):
            if self._clock.on:
                self._clock.ready(name)
        self.operations.exchange_of[weight].pack_errors(dy)
        self._events[EventKind.GRADIENT][weight].happen()

    def grad_ready(self, parameter: Parameter) -> None:
        if not parameter.size:
            return
        assert parameter.name not in self._weight_of, f"{parameter.name} exchanges inputs and errors instead of a gradient"
        if self._clock.on:
            self._clock.ready(parameter.name)
        self._events[EventKind.GRADIENT][parameter.name].happen()
        self.progress.poll()

    def data_free(self, parameter: Parameter) -> None:
        if parameter.size:
            if self._clock.on:
                self._clock.free(parameter.name)
            self._events[EventKind.LAST_READ][parameter.name].happen()

    def end_backward(self) -> None:
        """Announce the parameters that this step did not use; the current values of their gradients are averaged."""
        events = self._events
        for name in [name for name, event in events[EventKind.INPUTS].items() if not event.done]:
            self._wait_gathered(name)
            self._take_inputs(name, None)
            self._take_errors(name, None)
        for kind in (EventKind.GRADIENT, EventKind.LAST_READ):
            for event in events[kind].values():
                if not event.done:
                    event.happen()
        self._clock.end(self._names)
        self.progress.poll()

    def before_forward(self, parameters: Sequence[Parameter]) -> None:
        for parameter in parameters:
            if self._clock.on and parameter.size:
                self._clock.needed(parameter.name)
            self._wait_gathered(parameter.name)
            if self._refreshes_shadows:
                segment = self.group.segment(parameter.name)
                self.group.refresh_shadow(segment.start, segment.stop)

    def _wait_gathered(self, name: str | None) -> None:
        """Wait until a parameter holds the values of the previous step's update; None: all parameters."""
        if self._previous is not None:
            for k in self._previous.gathered if name is None else self.operations.touching[name]:
                ticket = self._previous.gathered[k]
                if not ticket.done:
                    self.progress.wait(ticket)

    def drain(self) -> None:
        if self.step is None:
            return
        self.progress.wait(self.step.gathered.values())
        joint = self.step.update.joint
        if joint is not None:  # even if nothing is gathered: other ranks wait for this rank's contribution
            joint.complete()

    def _order_by_measured_times(self, replan: Callable[[CollectiveSchedule, Times], CollectiveSchedule]) -> None:
        """Reorder the schedule's operations by the measured times of all ranks. Collective; the averager calls it once."""
        self.drain()
        self._replan = None
        times = over_ranks(self._clock.times(), self._names, self._comm, self.progress)
        # All ranks plan alike; rank 0's plan is used everywhere in case floating-point results differ.
        self.schedule = self._comm.broadcast_object(replan(self.schedule, times))
        self.posting = _posting(self.schedule)
        for queue in self.queues.values():
            queue.window = self.schedule.window

    # -- the optimiser's state -----------------------------------------------------------------------------------------------

    def owned(self) -> Sequence[Segment]:
        return self.operations.owned

    def full_state(self, parameter: Parameter) -> dict[str, np.ndarray]:
        """Return the optimiser's state of one whole parameter, gathered from its owners. Collective; call it after `drain`."""
        return self.operations.full_state(parameter.name, self.progress)

    def state_names(self, parameter: Parameter) -> Collection[str]:
        return self.operations.state_names(parameter.name)


def _posting(schedule: CollectiveSchedule) -> list[tuple[Operation, Dependencies, str]]:
    """Return each operation with its dependencies and its text, which are the same in every step."""
    operations = zip(schedule.operations, dependencies(schedule), strict=True)
    return [(operation, needs, schedule.text(operation)) for operation, needs in operations]
