"""Strategies in which owners update, and their averager: reduce-scatter, update of the own part, allgather, slice by slice.

Lee, Agrawal, Balaprakash, Choudhary and Liao, "Communication-efficient parallelization strategy for deep convolutional neural
network training", MLHPC 2018: gradients are summed to the rank that owns a part of a slice, which updates just that part and
holds just its optimiser state; the updated parameters are gathered in place and waited for layer by layer in the next forward.

`begin_step` queues all operations of a step in the schedule's order; each starts when its events on this rank have happened
(gradient ready, data released) and what it comes after is complete. So order never depends on timing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from hpctrain.averaging import slicing
from hpctrain.averaging.base import (
    Agreement,
    AveragerSetup,
    GradientAverager,
    PlannedGroup,
    Strategy,
    StrategyCosts,
    words_of_shards,
)
from hpctrain.averaging.collective_schedule import (
    ALL_SLICES,
    CollectiveSchedule,
    Dependencies,
    EventKind,
    LocalEventKey,
    Operation,
    OperationKind,
    Stream,
    dependencies,
    norm_groups,
    slices_of_groups,
)
from hpctrain.averaging.group_sums import NORM_BLOCK
from hpctrain.averaging.link_simulation import SliceTraffic, StepClock, Times, Urgency, best_order, over_ranks, reductions_first
from hpctrain.averaging.owner_operations import OwnerOperations, StepUpdate
from hpctrain.averaging.sixteen_bits import Rounding, words_of_rounding
from hpctrain.averaging.slicing import Slice, cut, fingerprint, fused, layer_slices, sufficient_factor_slices
from hpctrain.averaging.sufficient_factors import FcExchange, exchanging_layers
from hpctrain.comm.base import Array
from hpctrain.comm.groups import Levels, levels
from hpctrain.comm.link import LinkModel
from hpctrain.comm.posting_queue import LocalEvent, Ticket
from hpctrain.core.errors import OptionError
from hpctrain.nn.parameter import Parameter, Segment
from hpctrain.optim.base import NormsNeeded

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
    """Update this rank's own part of every slice, and gather the parameters from all ranks.

    Args:
        exchanging: weight -> biases of the linear layers that exchange inputs and errors. nominal_batch: samples of a step.
        order: the ranks of `comm` as the streams count them; None: as `comm` does.
        replan: returns the schedule in another order, from times measured in the first steps; None: its order stays.
        operations: of the schedule; None: those of `OwnerOperations`.

    A subclass may leave slices out of a step (`left_out_slices`), and have operations of its own.

    Attributes:
        operations: what each operation of the schedule posts and computes. queues: by stream, where they are posted.
        posting: the operations in order, each with what it comes after and its text. step: the step under way, if any.
        step_number: number of the next step, counted from 0 over the whole training where a subclass keeps it in `counters`.
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
        self.read_parts, self.update_parts = self.operations.read_parts(), self.operations.update_parts()
        self.complete_parameters = partial(self._wait_gathered, None)
        self.gather_parameters = partial(self.operations.gather_parameters, self.progress)
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
        self._steps = self.step_number = 0
        self.step: ReduceScatterStep | None = None
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
        self._previous, self.step = self.step, self._new_step(lr)
        for operation, needs, text in self.posting:
            self._post(operation, needs, text, self.step)

    def left_out_slices(self) -> frozenset[int]:
        """Return the slices that are neither summed nor updated in the step that begins, the same on every rank."""
        return frozenset()

    def _new_step(self, lr: float) -> ReduceScatterStep:
        events = {kind: {name: LocalEvent(text) for name, text in texts.items()} for kind, texts in self._event_texts.items()}
        self.operations.begin_step()
        joint = None if self._joint is None else self._joint.begin_step(self._member)
        norms = self._norms if joint is None else joint.norms[self._member]
        left_out = self.left_out_slices()
        slices = self.schedule.slices
        self.optimizer.begin_step({name for k in left_out for name in (*slices[k].parameters, *slices[k].replicated)})
        reads = None if self.reads is None else self.reads.begin()
        update = StepUpdate(lr, norms, joint, self._member, left_out, self.step_number, reads)
        self.step_number += 1
        return ReduceScatterStep(update, events)

    def _post(self, operation: Operation, needs: Dependencies, text: str, step: ReduceScatterStep) -> None:
        if not self.operations.takes_part(operation, step.update):
            step.tickets.append(_NOTHING)
            if operation.kind is OperationKind.ALLGATHER:
                before = self._previous
                step.gathered[operation.slice] = _NOTHING if before is None else before.gathered[operation.slice]
            return
        after: list[Ticket] = [step.events[event.kind][event.parameter] for event in needs.events]
        after += [step.tickets[position] for position in needs.operations]
        if self._previous is not None:
            after += [self._previous.gathered[k] for k in needs.gathers_before]
        start = partial(self.operations.start, operation, step.update)
        ticket = self.queues[operation.stream].post(start, text, after)
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
        exchange = self.operations.exchange_of[weight]
        exchange.begin_step(self._counts)
        exchange.pack_inputs(x)
        self._happens(EventKind.INPUTS, weight)

    def _take_errors(self, weight: str, dy: Array | None) -> None:
        for name in (weight, *self._exchanging[weight]):
            self._clock.ready(name)
        self.operations.exchange_of[weight].pack_errors(dy)
        self._happens(EventKind.GRADIENT, weight)

    def _happens(self, kind: EventKind, name: str) -> None:
        assert self.step is not None, "begin_step comes first"
        self.step.events[kind][name].happen()

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
        """Announce parameters that this step did not use, with whatever gradient they hold."""
        assert self.step is not None, "begin_step comes first"
        events = self.step.events
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
            for k in self._previous.gathered if name is None else self.operations.touching[name]:
                self.progress.wait(self._previous.gathered[k])

    def drain(self) -> None:
        if self.step is None:
            return
        self.progress.wait(self.step.gathered.values())
        joint = self.step.update.joint
        if joint is not None:  # where nothing is gathered, too: others wait for this rank's contribution
            joint.complete()

    def _order_by_measured_times(self, replan: Callable[[CollectiveSchedule, Times], CollectiveSchedule]) -> None:
        """Put the schedule's operations into the order that the measured times of all ranks ask for. Collective; once."""
        self.drain()
        self._replan = None
        times = over_ranks(self._clock.times(), self._names, self._comm, self.progress)
        # All ranks plan alike; were one's arithmetic another, rank 0's plan would still be that of all.
        self.schedule = self._comm.broadcast_object(replan(self.schedule, times))
        self.posting = _posting(self.schedule)
        for queue in self.queues.values():
            queue.window = self.schedule.window

    # -- the optimiser's state -----------------------------------------------------------------------------------------------

    def owned(self) -> Sequence[Segment]:
        return self.operations.owned

    def full_state(self, parameter: Parameter) -> dict[str, np.ndarray]:
        """Return the optimiser's state of one whole parameter, gathered from its owners. Collective; after `drain`."""
        return self.operations.full_state(parameter.name, self.progress)


def _posting(schedule: CollectiveSchedule) -> list[tuple[Operation, Dependencies, str]]:
    """Return each operation with what it comes after and its text; made once, as every step posts the same."""
    operations = zip(schedule.operations, dependencies(schedule), strict=True)
    return [(operation, needs, schedule.text(operation)) for operation, needs in operations]


class ReduceScatterStrategy(Strategy):
    """The base of strategies of reduce-scatter, update by the owner and allgather.

    Linear layers may exchange sufficient factors instead of gradients.

    A strategy defines `words`. It may choose `streams`, sizes (`slice_elements`), an `urgency` or an `order`, a `window`, other
    `slices` and `operations`, and an averager that takes `averager_arguments`. Besides its own, its options have `fc_exchange`,
    `sizes`, `two_level` and `replan`, as those of `Sharded` do.

    Attributes:
        streams: with one stream, gathers and reductions follow each other in one order; with two, they may overtake each other.
        exchanging: weight -> biases of the linear layers that exchange inputs and errors.
        apart: parameters that share no slice with others.

    Raises:
        OptionError: fc_exchange "always" with several micro-batches: their inputs would have to be kept.
    """

    adds_norms = True
    sums_shards = True
    streams: ClassVar[tuple[Stream, ...]] = (Stream.GRADIENTS, Stream.PARAMETERS)

    def __init__(self, group: PlannedGroup, options: Any = None) -> None:
        super().__init__(group, options)
        self.apart: frozenset[str] = frozenset()
        options = self.options
        if options.fc_exchange == "always" and group.micro_batches > 1:
            raise OptionError(
                f"fc_exchange is always, but micro_batches is {group.micro_batches}; the exchange needs micro_batches 1, "
                f"or set fc_exchange to auto or never.",
                "fc_exchange",
            )
        two_level = options.two_level and group.shards is None  # the order of shards is independent of nodes
        self._levels = levels(group.nodes) if two_level and group.nodes is not None else None
        # In two levels a node counts as one rank: the rule is about what crosses its link.
        links = group.ranks if self._levels is None else self._levels.nodes
        sent_share = 1.0 if self.rounding is None else self.rounding.sent_share(group.layout.item_bytes)
        exchange: FcExchange = "never" if options.fc_exchange == "auto" and not group.on_host else options.fc_exchange
        exchange = exchange if group.shards is None else "never"  # products of inputs and errors add up in another order
        self.exchanging = exchanging_layers(group.layout, links, exchange, group.nominal_batch, group.micro_batches, sent_share)

    @classmethod
    def costs(cls, options: Any) -> StrategyCosts:
        return StrategyCosts(
            (OperationKind.REDUCE_SCATTER, OperationKind.ALLGATHER),
            partial(slicing.fused_bytes, getattr(options, "bucket_bytes", None)),
            0.0,
            in_levels=options.two_level,
            fc_exchange=options.fc_exchange,
            gradients=getattr(options, "wire", "float32"),
            parameters=getattr(options, "wire_parameters", "float32"),
        )

    # -- hooks of a strategy ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def words(self) -> str:
        """Return the strategy and its options, as a stored schedule names what it was made for: other words, another schedule."""

    def slice_elements(self, link: LinkModel | None) -> tuple[int, int]:
        """Return the elements of a slice, least and most.

        Neighbours are fused until they have the first number; what has more than the second is cut. By default by the option
        `bucket_bytes`, if there is one; else by rule.

        link: the measured one or, by default, that of the rule.
        """
        return slicing.slice_elements(getattr(self.options, "bucket_bytes", None), self.group.layout, self.group.ranks, link)

    @property
    def urgency(self) -> Urgency:
        """The key by which a link chooses among what it could send: the least goes first. By default reductions go first."""
        return reductions_first

    def order(self, traffic: SliceTraffic, times: Times, link: LinkModel) -> list[tuple[int, bool]]:
        """Return (slice, whether it is its gather) in the order in which they are to be sent."""
        if self.streams[-1] is Stream.GRADIENTS:  # one queue: what is sent next must be ready, or all after it waits
            times = times.late()
        return best_order(traffic, times, link, self.urgency)

    def window(self, slices: Sequence[Slice], link: LinkModel | None, times: Times | None) -> int | None:
        """Return the maximum number of operations in flight per stream, by default the option `window`; None if unlimited."""
        limit: int | None = getattr(self.options, "window", None)
        return limit

    # -- the plan --------------------------------------------------------------------------------------------------------------

    @property
    def levels(self) -> Levels | None:
        return self._levels

    @property
    def posted_streams(self) -> tuple[Stream, ...]:
        """The streams of schedules; norms of some parameters have one of their own, so that nothing else waits for them."""
        return (*self.streams, Stream.NORMS) if self._layer_norms else self.streams

    @property
    def _layer_norms(self) -> bool:
        """Whether an update waits for the norms of its own layers only.

        Norms of several groups of parameters travel together. On one rank nothing travels, and a device is waited for once.
        """
        return self.group.norms_needed is NormsNeeded.LAYER and self.group.ranks > 1 and not self.group.several_groups

    def request(self) -> str:
        nodes = "" if self._levels is None else self._levels.words
        words = f"{self.words()}{words_of_shards(self.group.shards)}{words_of_rounding(self.rounding)}"
        return f"{words}; {fingerprint(self.group.layout, self.exchanging)}{nodes}"

    def accepts(self, stored: CollectiveSchedule | None) -> bool:
        """Return whether a stored schedule fits, and has the norms that the optimiser needs: an option may have changed."""
        if stored is None or not super().accepts(stored):
            return False
        norms = [operation.slice for operation in stored.operations if operation.kind is OperationKind.NORMS]
        if self._layer_norms:
            return bool(norms) or not stored.slices
        return norms == ([ALL_SLICES] if self.group.needs_norms else [])

    def needs_link(self, usable: CollectiveSchedule | None) -> bool:
        """Return whether a measured link is needed, also for an order that is still to be planned by measured times."""
        return self.replans(usable) or (usable is None and self.options.sizes == "measured")

    def replans(self, schedule: CollectiveSchedule | None) -> bool:
        """Return whether the operations of a schedule are still to be ordered by measured times."""
        return self.options.replan and not (schedule is not None and schedule.timed)

    def plan(self, link: LinkModel | None) -> CollectiveSchedule:
        slices = self.slices(link if self.options.sizes == "measured" else slicing.RULE_LINK)
        operations = self.operations(slices, Times.unknown(tuple(self.group.layout.specs)), link)
        window = self.window(slices, link, None)
        return CollectiveSchedule(self.request(), self.group.ranks, slices, operations, window, rounding=self.rounding)

    def replan(self, schedule: CollectiveSchedule, times: Times, link: LinkModel | None) -> CollectiveSchedule:
        """Return the same slices in the order that follows from measured times. No bit of any sum changes."""
        operations = self.operations(schedule.slices, times, link)
        window = self.window(schedule.slices, link, times)
        return replace(schedule, operations=operations, window=window, timed=True)

    def averager(self, setup: AveragerSetup, agreement: Agreement) -> GradientAverager:
        return ReduceScatterAverager(setup, agreement, **self.averager_arguments(agreement))

    def averager_arguments(self, agreement: Agreement) -> dict[str, Any]:
        """Return the keywords of a `ReduceScatterAverager` that runs the plan."""
        return {
            "exchanging": self.exchanging,
            "nominal_batch": self.group.nominal_batch or 0,
            "order": None if self._levels is None else self._levels.order,
            "replan": partial(self.replan, link=agreement.link) if self.replans(agreement.schedule) else None,
        }

    def slices(self, link: LinkModel | None) -> tuple[Slice, ...]:
        """Return slices of all parameters, in forward order. link: that sizes follow from."""
        layout, (least, most) = self.group.layout, self.slice_elements(link)
        exchanging = {name for weight, biases in self.exchanging.items() for name in (weight, *biases)}
        block = NORM_BLOCK if self.group.shards is not None and self.group.needs_norms else 1
        slices = list(cut(layout, fused(layout, least, exchanging, self.apart), most, block))
        for weight, biases in self.exchanging.items():
            slices += sufficient_factor_slices(layout, weight, biases, self.group.ranks, most)
        return tuple(sorted(slices, key=lambda piece: piece.start))

    def operations(self, slices: Sequence[Slice], times: Times, link: LinkModel | None) -> tuple[Operation, ...]:
        """Return the operations of a step on these slices, in the order in which they are posted."""
        norms: tuple[int, ...] = ()  # the slices of the operations of norms, ascending
        if self.group.needs_norms:
            norms = norm_groups(self.group.layout, slices) if self._layer_norms else (ALL_SLICES,)
        gathered_together = () if ALL_SLICES in norms else tuple(slices_of_groups(norms, len(slices)).values())
        group, rounding = self.group, self.rounding or Rounding()
        traffic = SliceTraffic(
            slices, group.ranks, group.layout.item_bytes, group.nominal_batch or 0, rounding, gathered_together
        )
        sent = self.order(traffic, times, link or LinkModel(0.0, 0.0))
        return operations_in_order(slices, sent, self.streams[-1], norms)


def operations_in_order(
    slices: Sequence[Slice], sent: Sequence[tuple[int, bool]], gathers: Stream, norms: Sequence[int] = ()
) -> tuple[Operation, ...]:
    """Return a step of reductions and gathers.

    Inputs in forward's order, then what a link sends, norms between the two where needed.

    Args:
        sent: (slice, whether it is its gather) in order. gathers: the stream of these; all else is on that of the gradients,
            but norms of some slices only, which have their own.
        norms: slices of the operations of norms, ascending. `ALL_SLICES`: norms of everything, after the last reduction. Else
            every gather in `sent` must stand after the last reduction of those whose norms travel with its own.
    """
    first = [layer_slices(slices, k)[0] == k for k in range(len(slices))]
    exchanged = (k for k, piece in enumerate(slices) if piece.sufficient_factors and first[k])
    inputs = [Operation(OperationKind.INPUTS, k, Stream.GRADIENTS) for k in exchanged]
    reduction = [OperationKind.ERRORS if piece.sufficient_factors else OperationKind.REDUCE_SCATTER for piece in slices]
    order = [
        Operation(OperationKind.ALLGATHER, k, gathers) if gather else Operation(reduction[k], k, Stream.GRADIENTS)
        for k, gather in sent
    ]
    if not norms:
        return (*inputs, *order)
    if ALL_SLICES not in norms:
        return (*inputs, *_with_norms(slices, order, norms))
    gathered = (operation for operation in order if operation.kind is OperationKind.ALLGATHER)
    # Updates wait for the norms, and these for all sums: no gather can go under backward, so front layers go first.
    late = sorted(gathered, key=lambda operation: slices[operation.slice].order)
    reductions = (operation for operation in order if operation.kind is not OperationKind.ALLGATHER)
    return (*inputs, *reductions, Operation(OperationKind.NORMS, ALL_SLICES, Stream.GRADIENTS), *late)


def _with_norms(slices: Sequence[Slice], order: Sequence[Operation], starts: Sequence[int]) -> list[Operation]:
    """Return the operations, and norms of each group of slices right after the last of its reductions."""
    groups = slices_of_groups(starts, len(slices))
    start_of = {k: start for start, group in groups.items() for k in group}
    unsummed = {start: len(group) for start, group in groups.items()}
    operations: list[Operation] = []
    for operation in order:
        operations.append(operation)
        summed = () if operation.kind is OperationKind.ALLGATHER else layer_slices(slices, operation.slice)
        for k in summed:
            unsummed[start_of[k]] -= 1
        for start in dict.fromkeys(start_of[k] for k in summed):
            if unsummed[start] == 0:
                operations.append(Operation(OperationKind.NORMS, start, Stream.NORMS))
    return operations
