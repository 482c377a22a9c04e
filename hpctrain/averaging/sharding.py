"""The core of sharded averaging: runs a schedule of reduce-scatters, own updates and allgathers of parameters.

Lee, Agrawal, Balaprakash, Choudhary and Liao, MLHPC 2018: gradients are summed to the rank that owns a part of a slice, which
updates just that part and holds just its optimiser state; the updated parameters are gathered in place and waited for layer by
layer in the next forward. `begin_step` queues all operations of a step in the schedule's order; each starts when gates of this
rank have opened (gradient ready, data free) and what it comes after is complete. So order never depends on timing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from hpctrain.averaging import planning
from hpctrain.averaging.base import GradientAverager
from hpctrain.averaging.collective_schedule import CollectiveSchedule, Operation, OperationKind, Stream, agree, sharded_operations
from hpctrain.averaging.local_event import LocalEvent
from hpctrain.averaging.norms import JointNorms, JointStep
from hpctrain.averaging.ownership import Ownership
from hpctrain.averaging.planning import Times, Urgency, best_order
from hpctrain.averaging.slices import Slice, cut, fingerprint, fused, with_factors
from hpctrain.averaging.sufficient_factors import FcExchange, exchanging_layers
from hpctrain.averaging.timing import StepClock
from hpctrain.comm.base import Array, Communicator, Handle
from hpctrain.comm.link import LinkModel, calibrate
from hpctrain.comm.progress import PostingQueue, ProgressEngine, Ticket
from hpctrain.comm.single import Complete
from hpctrain.comm.two_level import in_levels, levels
from hpctrain.errors import ConfigError
from hpctrain.nn.parameter import FlatGroup, Parameter, Segment
from hpctrain.optim.base import Norms, Optimizer

_WARM_UP_STEPS = 2
_MEASURED_STEPS = 3


@dataclass
class _Step:
    """What belongs to one step; operations that start late still find their own."""

    lr: float
    ready: dict[str, LocalEvent]
    inputs: dict[str, LocalEvent]
    free: dict[str, LocalEvent]
    reduced: dict[int, list[Ticket]] = field(default_factory=dict)
    gathered: dict[int, Ticket] = field(default_factory=dict)
    norms: Norms | None = None
    norms_complete: Ticket | None = None
    joint: JointStep | None = None


class ShardedAverager(GradientAverager):
    """Reduce-scatter, own update, allgather; linear layers may exchange inputs and errors. Strategies give the schedule.

    Args (beside every averager's):
        fc_exchange: linear layers exchange inputs and errors instead of gradients where that moves less ("auto"; needs the
            nominal batch), "always" or "never". Never with micro-batches: their inputs would have to be kept.
        nominal_batch: samples of a step over all ranks. micro_batches: passes that a rank splits a step into.
        replan: order operations anew by times measured in the first steps.
        nodes: the node of each rank of `comm`; None: unknown. two_level: sum within nodes first, where these are several of as
            many ranks each, so that gradients and parameters cross a node's link once.
    """

    def __init__(
        self,
        group: FlatGroup,
        optimizer: Optimizer,
        comm: Communicator,
        progress: ProgressEngine,
        *,
        norms: JointNorms | None,
        fc_exchange: FcExchange,
        nominal_batch: int | None,
        micro_batches: int,
        replan: bool,
        nodes: Sequence[int] | None,
        two_level: bool,
    ) -> None:
        super().__init__(group, optimizer, comm, progress, norms)
        if fc_exchange == "always" and micro_batches > 1:
            raise ConfigError(
                f"fc_exchange is always, but micro_batches is {micro_batches}; the exchange needs micro_batches 1, "
                f"or set fc_exchange to auto or never."
            )
        self._levels = levels(nodes) if two_level and nodes is not None else None
        self.order = None if self._levels is None else self._levels.order
        links = comm.size if self._levels is None else self._levels.nodes
        self._exchanging = exchanging_layers(group, links, fc_exchange, nominal_batch, micro_batches)
        self._exchanging_names = {name for weight, biases in self._exchanging.items() for name in (weight, *biases)}
        self._batch = nominal_batch or 0
        self._replan = replan
        self._norms = Norms(group) if optimizer.needs_norms and self._joint is None else None
        self._names = tuple(name for name, parameter in group.parameters.items() if parameter.size)
        self._step: _Step | None = None
        self._previous: _Step | None = None
        self._steps = 0
        self._clock = StepClock(progress)

    # -- what a strategy says ------------------------------------------------------------------------------------------------

    @abstractmethod
    def _request(self) -> str:
        """The strategy and its options, in words: what a stored schedule must have been made for."""

    @abstractmethod
    def _slice_elements(self, link: LinkModel | None) -> tuple[int, int]:
        """Elements of a slice: neighbours are fused until they have the first, what has more than the second is cut.

        link: the measured one or, by default, that of the rule.
        """

    @abstractmethod
    def _urgency(self) -> Urgency:
        """What the link sends first."""

    def _window_for(self, slices: Sequence[Slice], link: LinkModel | None, times: Times | None) -> int | None:
        """Most operations in flight in a stream; None: no limit. times: measured ones, later."""
        return self._window

    _streams = 2
    _window: int | None = None
    _sizes: planning.Sizes = "rule"
    _measures_link = False

    # -- set-up --------------------------------------------------------------------------------------------------------------

    def agree(self, stored: CollectiveSchedule | None = None) -> None:
        comm = self.comm
        reduce = in_levels(comm, self._levels, f"{comm.name} gradients")
        gather = in_levels(comm, self._levels, f"{comm.name} parameters") if self._streams == 2 else reduce
        self._comms = {Stream.GRADIENTS: reduce, Stream.PARAMETERS: gather}
        usable = stored if self.accepts(stored) else None
        if usable is not None and usable.timed:
            self._replan = False
        needs_link = self._replan or (self._measures_link and usable is None)
        measures = any(reduce.allgather_object(needs_link))  # the same on every rank
        self._link = calibrate(reduce, self.progress) if measures else None
        self.schedule = self.plan(self._link) if usable is None else usable
        agree(reduce, self.schedule)
        self._queues = {stream: self.progress.queue(each, self.schedule.window) for stream, each in self._comms.items()}
        super().agree(stored)
        self._ownership = Ownership(self.group, self.schedule, reduce, self._batch)
        self.optimizer.bind(self.group, self._ownership.owned)

    def plan(self, link: LinkModel | None) -> CollectiveSchedule:
        """The schedule of the first steps, from sizes alone. Not collective; `agree` calls it with the link, if it measures."""
        slices = self._slices(*self._slice_elements(link if self._sizes == "measured" else planning.RULE_LINK))
        operations = self._operations(slices, Times.unknown(tuple(self.group.parameters)), link)
        return CollectiveSchedule(self.request(), self.comm.size, slices, operations, self._window_for(slices, link, None))

    def accepts(self, stored: CollectiveSchedule | None) -> bool:
        """Also, the optimiser still needs norms, or still does not: it may have got, or lost, an option."""
        if stored is None or not super().accepts(stored):
            return False
        return self.optimizer.needs_norms == any(operation.kind is OperationKind.NORMS for operation in stored.operations)

    def request(self) -> str:
        nodes = "" if self._levels is None else f"; {self._levels.nodes} nodes of {self._levels.per_node}"
        return f"{self._request()}; {fingerprint(self.group, self._exchanging)}{nodes}"

    def _slices(self, least: int, most: int) -> tuple[Slice, ...]:
        """Slices of all parameters, in forward order."""
        slices = list(cut(self.group, fused(self.group, least, self._exchanging_names), most))
        for weight, biases in self._exchanging.items():
            slices += with_factors(self.group, weight, biases, self.comm.size, most)
        return tuple(sorted(slices, key=lambda each: each.start))

    def _operations(self, slices: Sequence[Slice], times: Times, link: LinkModel | None) -> tuple[Operation, ...]:
        link = link or LinkModel(0.0, 0.0)
        if self._streams == 1:
            times = times.late()
        sent = best_order(slices, times, link, self.comm.size, self.group.grad.itemsize, self._batch, self._urgency())
        gathers = Stream.PARAMETERS if self._streams == 2 else Stream.GRADIENTS
        return sharded_operations(slices, sent, gathers, norms=self.optimizer.needs_norms)

    # -- a step --------------------------------------------------------------------------------------------------------------

    def begin_step(self, lr: float, counts: Sequence[int] | None = None) -> None:
        if self.schedule is None:
            self.agree()
        assert self.schedule is not None
        if self._replan and self._steps == _WARM_UP_STEPS + _MEASURED_STEPS:
            self._order_anew()
        self._steps += 1
        self._clock.begin(self._steps > _WARM_UP_STEPS and self._replan)
        assert counts is not None or not self._ownership.pieces, "the exchange of inputs and errors needs the step's counts"
        self._counts = counts or ()
        if self.order is not None and counts is not None:
            self._counts = [counts[rank] for rank in self.order]
        previous = self._previous = self._step
        step = self._step = _Step(
            lr,
            {name: LocalEvent(f"gradient of {name}") for name in self._names},
            {name: LocalEvent(f"inputs of {name}") for name in self._exchanging},
            {name: LocalEvent(f"backward's last use of {name}") for name in self._names},
            norms=self._norms,
        )
        if self._joint is not None:
            step.joint = self._joint.begin_step(self._member)
            step.norms = step.joint.norms[self._member]
        for operation in self.schedule.operations:
            self._post(operation, step, previous)

    def _post(self, operation: Operation, step: _Step, previous: _Step | None) -> None:
        assert self.schedule is not None
        k = operation.slice
        queue: PostingQueue = self._queues[operation.stream]
        if operation.kind is OperationKind.NORMS:
            reduced = [ticket for tickets in step.reduced.values() for ticket in tickets]
            own = queue.post(partial(self._start_norms, step), str(operation.kind), reduced)
            step.norms_complete = own if step.joint is None else step.joint.ticket
            return
        each = self.schedule.slices[k]
        whole = operation.kind in (OperationKind.INPUTS, OperationKind.ERRORS)
        what = f"{operation.kind} of {each.parameters[0] if whole else each.name}"
        if operation.kind is OperationKind.ALLGATHER:
            after: list[Ticket] = [step.free[name] for name in (*each.parameters, *each.replicated)]
            after += step.reduced[k]
            if step.norms_complete is not None:
                after.append(step.norms_complete)
            step.gathered[k] = queue.post(partial(self._start_gather, step, k), what, after)
            return
        gates: list[Ticket] = []
        if operation.kind is OperationKind.INPUTS:
            gates.append(step.inputs[each.parameters[0]])
            start = self._ownership.pieces[k][0].post_inputs
        else:
            gates += [step.ready[name] for name in each.parameters]
            start = self._ownership.pieces[k][0].post_errors if each.factors else partial(self._ownership.start_sum, k)
        together = self._ownership.together[k]
        if previous is not None:  # the previous step's sums are used until then
            gates += [previous.gathered[piece] for piece in together]
        ticket = queue.post(start, what, gates)
        for piece in together:
            step.reduced.setdefault(piece, []).append(ticket)

    def takes_sufficient_factors(self, parameters: Sequence[Parameter]) -> bool:
        return any(parameter.name in self._exchanging_names for parameter in parameters)

    def input_ready(self, parameters: Sequence[Parameter], x: Array) -> None:
        self._take_inputs(self._weight(parameters), x)
        self.progress.poll()

    def error_ready(self, parameters: Sequence[Parameter], dy: Array) -> None:
        self._take_errors(self._weight(parameters), dy)
        self.progress.poll()

    def _weight(self, parameters: Sequence[Parameter]) -> str:
        return next(parameter.name for parameter in parameters if parameter.name in self._exchanging)

    def _take_inputs(self, weight: str, x: Array | None) -> None:
        assert self._step is not None
        exchange = self._ownership.exchange_of[weight]
        exchange.begin_step(self._counts)
        exchange.pack_inputs(x)
        self._step.inputs[weight].open()

    def _take_errors(self, weight: str, dy: Array | None) -> None:
        assert self._step is not None
        for name in (weight, *self._exchanging[weight]):
            self._clock.ready(name)
        self._ownership.exchange_of[weight].pack_errors(dy)
        self._step.ready[weight].open()

    def grad_ready(self, parameter: Parameter) -> None:
        if not parameter.size:
            return
        assert parameter.name not in self._exchanging_names, f"{parameter.name} exchanges inputs and errors, and no gradient"
        assert self._step is not None
        self._clock.ready(parameter.name)
        self._step.ready[parameter.name].open()
        self.progress.poll()

    def data_free(self, parameter: Parameter) -> None:
        if parameter.size:
            assert self._step is not None
            self._clock.free(parameter.name)
            self._step.free[parameter.name].open()

    def end_backward(self) -> None:
        """Parameters that this step did not use are announced here, with whatever gradient they hold."""
        step = self._step
        assert step is not None
        unused = [name for name in self._exchanging if not step.inputs[name].done]
        for name in unused:
            self._wait_gathered(name)
            self._take_inputs(name, None)
            self._take_errors(name, None)
        for gates in (step.ready, step.free):
            for gate in gates.values():
                gate.open()
        self._clock.end(self._names)
        self.progress.poll()

    def before_forward(self, parameters: Sequence[Parameter]) -> None:
        for parameter in parameters:
            if parameter.size:
                self._clock.needed(parameter.name)
            self._wait_gathered(parameter.name)

    def _wait_gathered(self, name: str) -> None:
        """Until one parameter holds what the previous step made of it."""
        if self._previous is not None:
            for k in self._ownership.touching[name]:
                self.progress.wait(self._previous.gathered[k])

    def drain(self) -> None:
        step = self._step
        if step is None:
            return
        self.progress.wait(step.gathered.values())
        if step.joint is not None:  # where nothing is gathered, too: others wait for this rank's part
            step.joint.complete()

    # -- starts of operations: called by the engine when their turn has come; they may compute, and must not wait ----

    def _start_norms(self, step: _Step) -> Handle:
        """Squares of what is owned here; what every rank owns counts once. Their sum, unless all groups' travel together."""
        norms = step.norms
        assert norms is not None
        norms.squares[...] = 0.0
        for k, own in enumerate(self._ownership.own):
            self._ownership.finish_gradient(k)
            norms.add_partial(self.group, own)
            if self.comm.rank == 0:
                norms.add_partial(self.group, self._ownership.replicated[k])
        if step.joint is not None:
            step.joint.contribute(self._member)
            return Complete()
        return self._comms[Stream.GRADIENTS].iallreduce(norms.squares)

    def _start_gather(self, step: _Step, k: int) -> Handle:
        """Update what is owned of a slice, then gather all of it in place."""
        assert self.schedule is not None
        if step.norms is None:
            self._ownership.finish_gradient(k)
        self.optimizer.update((*self._ownership.own[k], *self._ownership.replicated[k]), step.lr, step.norms)
        each, comm = self.schedule.slices[k], self._comms[Stream.PARAMETERS]
        return comm.iallgather(None, self.group.data[each.start : each.stop], each.counts(comm.size))

    # -- order from measured times --------------------------------------------------------------------------------------------

    def _order_anew(self) -> None:
        """Order the schedule's operations by times measured on rank 0. Collective; once."""
        self.drain()
        assert self.schedule is not None
        self._replan = False
        slices, times = self.schedule.slices, self._clock.times()
        planned = self._operations(slices, times, self._link), self._window_for(slices, self._link, times)
        operations, window = self._comms[Stream.GRADIENTS].broadcast_object(planned)
        self.schedule = replace(self.schedule, operations=operations, window=window, timed=True)
        for queue in self._queues.values():
            queue.window = window

    # -- the optimiser's state -----------------------------------------------------------------------------------------------

    def owned(self) -> Sequence[Segment]:
        return self._ownership.owned

    def full_state(self, parameter: Parameter) -> dict[str, np.ndarray]:
        """The optimiser's state of one whole parameter, gathered from its owners. Collective; after `drain`."""
        return self._ownership.full_state(self.optimizer, parameter.name, self.progress)
