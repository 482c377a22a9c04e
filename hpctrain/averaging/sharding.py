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

from hpctrain.averaging.base import GradientAverager
from hpctrain.averaging.exchange import FactorExchange, FcExchange, exchanging_layers
from hpctrain.averaging.gate import Gate
from hpctrain.averaging.norms import JointNorms, JointStep
from hpctrain.averaging.planning import Times, Urgency, best_order
from hpctrain.averaging.schedule import Kind, Operation, Schedule, Stream, agree, sharded_operations
from hpctrain.averaging.slices import Slice, cut, fingerprint, fused, layer_slices, with_factors
from hpctrain.averaging.state import gather_state
from hpctrain.averaging.timing import StepClock
from hpctrain.comm.base import Array, Communicator, Handle
from hpctrain.comm.link import LinkModel, calibrate
from hpctrain.comm.progress import PostingQueue, ProgressEngine, Ticket
from hpctrain.comm.single import Complete
from hpctrain.errors import ConfigError
from hpctrain.nn.parameter import FlatGroup, Parameter, Segment
from hpctrain.optim.base import Norms, Optimizer

_WARM_UP_STEPS = 2
_MEASURED_STEPS = 3


@dataclass
class _Step:
    """What belongs to one step; operations that start late still find their own."""

    lr: float
    ready: dict[str, Gate]
    inputs: dict[str, Gate]
    free: dict[str, Gate]
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
    ) -> None:
        super().__init__(group, optimizer, comm, progress, norms)
        if fc_exchange == "always" and micro_batches > 1:
            raise ConfigError(
                f"fc_exchange is always, but micro_batches is {micro_batches}; the exchange needs micro_batches 1, "
                f"or set fc_exchange to auto or never."
            )
        self._exchanging = exchanging_layers(group, comm.size, fc_exchange, nominal_batch, micro_batches)
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
    def _sizes(self, link: LinkModel | None) -> tuple[int, int]:
        """Elements of a slice: neighbours are fused until they have the first, what has more than the second is cut."""

    @abstractmethod
    def _urgency(self) -> Urgency:
        """What the link sends first."""

    def _window_for(self, slices: Sequence[Slice], link: LinkModel | None, times: Times | None) -> int | None:
        """Most operations in flight in a stream; None: no limit. times: measured ones, later."""
        return self._window

    _streams = 2
    _window: int | None = None
    _measures_link = True

    # -- set-up --------------------------------------------------------------------------------------------------------------

    def agree(self, stored: Schedule | None = None) -> None:
        comm = self.comm
        reduce = comm.split(0, comm.rank, f"{comm.name} gradients")
        assert reduce is not None
        gather = comm.split(0, comm.rank, f"{comm.name} parameters") if self._streams == 2 else reduce
        assert gather is not None
        self._comms = {Stream.GRADIENTS: reduce, Stream.PARAMETERS: gather}
        usable = stored is not None and (stored.request, stored.ranks) == (self._full_request(), comm.size)
        if stored is not None and usable and stored.timed:
            self._replan = False
        needs_link = self._replan or (self._measures_link and not usable)
        measures = any(reduce.allgather_object(needs_link))  # the same on every rank
        self._link = calibrate(reduce, self.progress) if measures else None
        self.schedule = stored if stored is not None and usable else self.plan(self._link)
        agree(reduce, self.schedule)
        self._queues = {stream: self.progress.queue(each, self.schedule.window) for stream, each in self._comms.items()}
        super().agree(stored)
        self._prepare(self.schedule)

    def plan(self, link: LinkModel | None) -> Schedule:
        """The schedule of the first steps, from sizes alone. Not collective; `agree` calls it with the measured link."""
        slices = self._slices(*self._sizes(link))
        operations = self._operations(slices, Times.unknown(tuple(self.group.parameters)), link)
        return Schedule(self._full_request(), self.comm.size, slices, operations, self._window_for(slices, link, None))

    def _full_request(self) -> str:
        return f"{self._request()}; {fingerprint(self.group, self._exchanging)}"

    def _prepare(self, schedule: Schedule) -> None:
        """Who owns what, buffers, the optimiser's state."""
        rank, ranks = self.comm.rank, self.comm.size
        self._touching: dict[str, list[int]] = {name: [] for name in self.group.parameters}
        self._own: list[tuple[Segment, ...]] = []
        self._replicated: list[tuple[Segment, ...]] = []
        self._pieces: dict[int, tuple[FactorExchange, int]] = {}  # by slice: its layer's exchange, its place among the layer's
        self._exchange_of: dict[str, FactorExchange] = {}
        self._sums: dict[int, Array] = {}
        self._together = [layer_slices(schedule.slices, k) for k in range(len(schedule.slices))]
        for k, each in enumerate(schedule.slices):
            begin, end = each.part(rank, ranks)
            parts = (self.group.segment(name).part(begin, end) for name in each.parameters)
            self._own.append(tuple(part for part in parts if part.size))
            self._replicated.append(tuple(self.group.segment(name) for name in each.replicated))
            for name in (*each.parameters, *each.replicated):
                self._touching[name].append(k)
            if each.factors:
                self._add_piece(k)
            elif ranks > 1:
                self._sums[k] = np.empty_like(self.group.grad, shape=(end - begin,))
        owned = [segment for parts in (self._own, self._replicated) for segments in parts for segment in segments]
        self._owned = tuple(sorted(owned, key=lambda segment: segment.start))
        self.optimizer.bind(self.group, self._owned)

    def _add_piece(self, k: int) -> None:
        assert self.schedule is not None
        together, weight = self._together[k], self.schedule.slices[k].parameters[0]
        if weight not in self._exchange_of:
            slices = [self.schedule.slices[each] for each in together]
            self._exchange_of[weight] = FactorExchange(self.group, slices, self._comms[Stream.GRADIENTS], self._batch)
        self._pieces[k] = self._exchange_of[weight], together.index(k)

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
        assert counts is not None or not self._pieces, "the exchange of inputs and errors needs the step's counts"
        self._counts = counts or ()
        previous = self._previous = self._step
        step = self._step = _Step(
            lr,
            {name: Gate(f"gradient of {name}") for name in self._names},
            {name: Gate(f"inputs of {name}") for name in self._exchanging},
            {name: Gate(f"backward's last use of {name}") for name in self._names},
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
        if operation.kind is Kind.NORMS:
            reduced = [ticket for tickets in step.reduced.values() for ticket in tickets]
            own = queue.post(partial(self._start_norms, step), str(operation.kind), reduced)
            step.norms_complete = own if step.joint is None else step.joint.ticket
            return
        each = self.schedule.slices[k]
        whole = operation.kind in (Kind.INPUTS, Kind.ERRORS)
        what = f"{operation.kind} of {each.parameters[0] if whole else each.name}"
        if operation.kind is Kind.ALLGATHER:
            after: list[Ticket] = [step.free[name] for name in (*each.parameters, *each.replicated)]
            after += step.reduced[k]
            if step.norms_complete is not None:
                after.append(step.norms_complete)
            step.gathered[k] = queue.post(partial(self._start_gather, step, k), what, after)
            return
        gates: list[Ticket] = []
        if operation.kind is Kind.INPUTS:
            gates.append(step.inputs[each.parameters[0]])
            start = self._pieces[k][0].post_inputs
        else:
            gates += [step.ready[name] for name in each.parameters]
            start = self._pieces[k][0].post_errors if each.factors else partial(self._start_reduce, k)
        together = self._together[k]
        if previous is not None:  # the previous step's sums are used until then
            gates += [previous.gathered[piece] for piece in together]
        ticket = queue.post(start, what, gates)
        for piece in together:
            step.reduced.setdefault(piece, []).append(ticket)

    def takes_factors(self, parameters: Sequence[Parameter]) -> bool:
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
        exchange = self._exchange_of[weight]
        exchange.begin_step(self._counts)
        exchange.pack_inputs(x)
        self._step.inputs[weight].open()

    def _take_errors(self, weight: str, dy: Array | None) -> None:
        assert self._step is not None
        for name in (weight, *self._exchanging[weight]):
            self._clock.ready(name)
        self._exchange_of[weight].pack_errors(dy)
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
            for k in self._touching[name]:
                self.progress.wait(self._previous.gathered[k])

    def drain(self) -> None:
        if self._step is not None:
            self.progress.wait(self._step.gathered.values())

    # -- starts of operations: called by the engine when their turn has come; they may compute, and must not wait ----

    def _start_reduce(self, k: int) -> Handle:
        assert self.schedule is not None
        each, comm = self.schedule.slices[k], self._comms[Stream.GRADIENTS]
        if comm.size == 1:
            return Complete()
        return comm.ireduce_scatter(self.group.grad[each.start : each.stop], self._sums[k], each.counts(comm.size))

    def _start_norms(self, step: _Step) -> Handle:
        """Squares of what is owned here; what every rank owns counts once. Their sum, unless all groups' travel together."""
        norms = step.norms
        assert norms is not None
        norms.squares[...] = 0.0
        for k, own in enumerate(self._own):
            self._finish_gradient(k)
            norms.add_partial(self.group, own)
            if self.comm.rank == 0:
                norms.add_partial(self.group, self._replicated[k])
        if step.joint is not None:
            step.joint.contribute(self._member)
            return Complete()
        return self._comms[Stream.GRADIENTS].iallreduce(norms.squares)

    def _start_gather(self, step: _Step, k: int) -> Handle:
        """Update what is owned of a slice, then gather all of it in place."""
        assert self.schedule is not None
        if step.norms is None:
            self._finish_gradient(k)
        self.optimizer.update((*self._own[k], *self._replicated[k]), step.lr, step.norms)
        each, comm = self.schedule.slices[k], self._comms[Stream.PARAMETERS]
        return comm.iallgather(None, self.group.data[each.start : each.stop], each.counts(comm.size))

    def _finish_gradient(self, k: int) -> None:
        """Put the sum over all ranks into the owned part of the gradient."""
        if k in self._pieces:
            exchange, piece = self._pieces[k]
            exchange.multiply(piece)
        elif k in self._sums:
            assert self.schedule is not None
            begin, end = self.schedule.slices[k].part(self.comm.rank, self.comm.size)
            self.group.grad[begin:end] = self._sums[k]

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
        return self._owned

    def full_state(self, parameter: Parameter) -> dict[str, np.ndarray]:
        """The optimiser's state of one whole parameter, gathered from its owners. Collective; after `drain`."""
        segment = self.group.segment(parameter.name)
        if any(segment in segments for segments in self._replicated):
            return self.optimizer.state(segment)
        assert self.schedule is not None
        slices = [self.schedule.slices[k] for k in self._touching[parameter.name]]
        return gather_state(self.optimizer, segment, slices, self._comms[Stream.GRADIENTS], self.progress)
