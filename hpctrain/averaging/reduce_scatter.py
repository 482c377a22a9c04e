"""Runs a schedule of reduce-scatters, own updates and allgathers of parameters.

Lee, Agrawal, Balaprakash, Choudhary and Liao, MLHPC 2018: gradients are summed to the rank that owns a part of a slice, which
updates just that part and holds just its optimiser state; the updated parameters are gathered in place and waited for layer by
layer in the next forward. `begin_step` queues all operations of a step in the schedule's order; each starts when its events on
this rank have happened (gradient ready, data let go) and what it comes after is complete. So order never depends on timing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from hpctrain.averaging.base import Agreement, AveragerSetup, GradientAverager
from hpctrain.averaging.collective_schedule import CollectiveSchedule, Operation, OperationKind, Stream
from hpctrain.averaging.step_times import Times
from hpctrain.averaging.dependencies import Dependencies, EventKind, LocalEventKey, dependencies
from hpctrain.averaging.local_event import LocalEvent
from hpctrain.averaging.owner_operations import OwnerOperations, StepUpdate
from hpctrain.averaging.step_clock import StepClock, over_ranks
from hpctrain.comm.base import Array
from hpctrain.comm.posting_queue import Ticket
from hpctrain.nn.parameter import Parameter, Segment

_WARM_UP_STEPS = 2
_MEASURED_STEPS = 3
_NOTHING = LocalEvent("an operation that the step leaves out")
_NOTHING.happen()


@dataclass
class ReduceScatterStep:
    """The state of one step; operations that start late still find their own.

    tickets: by position in the schedule. gathered: by slice; complete once its parameters hold the step's values, which are
    those of an earlier step where this one leaves the slice out.
    """

    update: StepUpdate
    events: Mapping[EventKind, Mapping[str, LocalEvent]]
    tickets: list[Ticket] = field(default_factory=list)
    gathered: dict[int, Ticket] = field(default_factory=dict)


class ReduceScatterAverager(GradientAverager):
    """Each rank updates its own part of every slice; the parameters are gathered from all of them.

    Args:
        exchanging: weight -> biases of the linear layers that exchange inputs and errors. nominal_batch: samples of a step.
        order: the ranks of `comm` as the streams count them; None: as `comm` does.
        replan: gives the schedule in another order, from times measured in the first steps; None: its order stays.
        operations: of the schedule, where they are special ones.
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
        self._posting = _posting(self.schedule)
        self._comm = agreement.streams[Stream.GRADIENTS]
        self._queues = {stream: self.progress.queue(comm, self.schedule.window) for stream, comm in agreement.streams.items()}
        self._operations = operations or OwnerOperations(setup, self.schedule, agreement.streams, nominal_batch, agreement.sums)
        ranks = range(self._comm.size)
        self._norms = setup.own_norms(piece.part(rank, self._comm.size) for piece in self.schedule.slices for rank in ranks)
        self.optimizer.bind(self.group, self._operations.owned)
        self._state_of = self._operations.owned_state
        self.counted = self._operations.counted
        self.rounded = self._operations.rounded
        self.read_parts, self.update_parts = self._operations.read_parts(), self._operations.update_parts()
        self.complete_parameters = partial(self._wait_gathered, None)
        self.gather_parameters = partial(self._operations.gather_parameters, self.progress)
        self._exchanging = exchanging
        self._weight_of = {name: weight for weight, biases in exchanging.items() for name in (weight, *biases)}
        #: parts of others arrive without theirs
        self._refreshes_shadows = self.group.shadow is not None and setup.comm.size > 1
        self._names = tuple(name for name, parameter in self.group.parameters.items() if parameter.size)
        named = {EventKind.GRADIENT: self._names, EventKind.INPUTS: self._exchanging, EventKind.LAST_READ: self._names}
        self._event_texts = {kind: {name: str(LocalEventKey(kind, name)) for name in names} for kind, names in named.items()}
        self._order, self._counts = order, [0] * setup.comm.size
        self._replan = replan
        self._clock = StepClock(self.progress)
        self._steps = 0
        self._step: ReduceScatterStep | None = None
        self._previous: ReduceScatterStep | None = None

    # -- a step --------------------------------------------------------------------------------------------------------------

    def begin_step(self, lr: float, counts: Sequence[int] | None = None) -> None:
        """Queue all operations of the step, in the schedule's order: this is where gradients are sent, once they are ready."""
        if self._replan is not None and self._steps == _WARM_UP_STEPS + _MEASURED_STEPS:
            self._order_by_measured_times(self._replan)
        self._steps += 1
        self._clock.begin(self._steps > _WARM_UP_STEPS and self._replan is not None)
        assert counts is not None or not self._exchanging, "the exchange of inputs and errors needs the step's counts"
        if counts is not None:
            self._counts = list(counts) if self._order is None else [counts[rank] for rank in self._order]
        self._previous, self._step = self._step, self._new_step(lr)
        for operation, needs, text in self._posting:
            self._post(operation, needs, text, self._step)

    def _left_out(self) -> frozenset[int]:
        """The slices that take no part in the step that begins, the same on every rank: neither summed nor updated."""
        return frozenset()

    def _new_step(self, lr: float) -> ReduceScatterStep:
        events = {kind: {name: LocalEvent(text) for name, text in texts.items()} for kind, texts in self._event_texts.items()}
        joint = None if self._joint is None else self._joint.begin_step(self._member)
        norms = self._norms if joint is None else joint.norms[self._member]
        left_out = self._left_out()
        slices = self.schedule.slices
        self.optimizer.begin_step({name for k in left_out for name in (*slices[k].parameters, *slices[k].replicated)})
        reads = None if self.reads is None else self.reads.begin()
        return ReduceScatterStep(StepUpdate(lr, norms, joint, self._member, left_out, reads=reads), events)

    def _post(self, operation: Operation, needs: Dependencies, text: str, step: ReduceScatterStep) -> None:
        if not self._operations.takes_part(operation, step.update):
            step.tickets.append(_NOTHING)
            if operation.kind is OperationKind.ALLGATHER:
                before = self._previous
                step.gathered[operation.slice] = _NOTHING if before is None else before.gathered[operation.slice]
            return
        after: list[Ticket] = [step.events[event.kind][event.parameter] for event in needs.events]
        after += [step.tickets[position] for position in needs.operations]
        if self._previous is not None:
            after += [self._previous.gathered[k] for k in needs.gathers_before]
        start = partial(self._operations.start, operation, step.update)
        ticket = self._queues[operation.stream].post(start, text, after)
        joint = step.update.joint
        if operation.kind is OperationKind.NORMS and joint is not None:
            ticket = joint.ticket  # this group's squares are only a part: what comes after needs those of all groups
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
        exchange = self._operations.exchange_of[weight]
        exchange.begin_step(self._counts)
        exchange.pack_inputs(x)
        self._happens(EventKind.INPUTS, weight)

    def _take_errors(self, weight: str, dy: Array | None) -> None:
        for name in (weight, *self._exchanging[weight]):
            self._clock.ready(name)
        self._operations.exchange_of[weight].pack_errors(dy)
        self._happens(EventKind.GRADIENT, weight)

    def _happens(self, kind: EventKind, name: str) -> None:
        assert self._step is not None, "begin_step comes first"
        self._step.events[kind][name].happen()

    def grad_ready(self, parameter: Parameter) -> None:
        if not parameter.size:
            return
        assert parameter.name not in self._weight_of, f"{parameter.name} exchanges inputs and errors, and no gradient"
        self._clock.ready(parameter.name)
        self._happens(EventKind.GRADIENT, parameter.name)
        self.progress.poll()

    def data_free(self, parameter: Parameter) -> None:
        if parameter.size:
            self._clock.free(parameter.name)
            self._happens(EventKind.LAST_READ, parameter.name)

    def end_backward(self) -> None:
        """Parameters that this step did not use are announced here, with whatever gradient they hold."""
        assert self._step is not None, "begin_step comes first"
        events = self._step.events
        for name in [name for name, event in events[EventKind.INPUTS].items() if not event.done]:
            self._wait_gathered(name)
            self._take_inputs(name, None)
            self._take_errors(name, None)
        for kind in (EventKind.GRADIENT, EventKind.LAST_READ):
            for event in events[kind].values():
                event.happen()
        self._clock.end(self._names)
        self.progress.poll()

    def before_forward(self, parameters: Sequence[Parameter]) -> None:
        for parameter in parameters:
            if parameter.size:
                self._clock.needed(parameter.name)
            self._wait_gathered(parameter.name)
            if self._refreshes_shadows:
                segment = self.group.segment(parameter.name)
                self.group.refresh_shadow(segment.start, segment.stop)

    def _wait_gathered(self, name: str | None) -> None:
        """Wait until a parameter holds the values of the previous step's update; None: all parameters."""
        if self._previous is not None:
            for k in self._previous.gathered if name is None else self._operations.touching[name]:
                self.progress.wait(self._previous.gathered[k])

    def drain(self) -> None:
        if self._step is None:
            return
        self.progress.wait(self._step.gathered.values())
        joint = self._step.update.joint
        if joint is not None:  # where nothing is gathered, too: others wait for this rank's contribution
            joint.complete()

    def _order_by_measured_times(self, replan: Callable[[CollectiveSchedule, Times], CollectiveSchedule]) -> None:
        """Put the schedule's operations into the order that the measured times of all ranks ask for. Collective; once."""
        self.drain()
        self._replan = None
        times = over_ranks(self._clock.times(), self._names, self._comm, self.progress)
        # All ranks plan alike; were one's arithmetic another, rank 0's plan would still be that of all.
        self.schedule = self._comm.broadcast_object(replan(self.schedule, times))
        self._posting = _posting(self.schedule)
        for queue in self._queues.values():
            queue.window = self.schedule.window

    # -- the optimiser's state -----------------------------------------------------------------------------------------------

    def owned(self) -> Sequence[Segment]:
        return self._operations.owned

    def full_state(self, parameter: Parameter) -> dict[str, np.ndarray]:
        """The optimiser's state of one whole parameter, gathered from its owners. Collective; after `drain`."""
        return self._operations.full_state(parameter.name, self.progress)


def _posting(schedule: CollectiveSchedule) -> list[tuple[Operation, Dependencies, str]]:
    """Each operation, with what it comes after and its text: made once, as every step posts the same."""
    operations = zip(schedule.operations, dependencies(schedule), strict=True)
    return [(operation, needs, schedule.text(operation)) for operation, needs in operations]
