"""The seam between backward and the network: gradients in, agreed parameters out.

A `Strategy` plans how the gradients of one group of parameters are averaged: a schedule, without ranks, communicators and
arrays. Once the ranks have agreed on it (`agreement`), the strategy makes the `GradientAverager` that runs it.

An averager turns this rank's gradients into the update of every `Parameter.data` that the whole group agrees on. It sums and
never divides: the loss has divided by the global count of the step. It owns the order of its collectives, which follows from
the step alone and is the same on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np

from hpctrain.averaging.collective_schedule import CollectiveSchedule, OperationKind, Stream
from hpctrain.averaging.group_sums import JointNorms, ReadSums, ShardGradients, TreeNorms
from hpctrain.averaging.sixteen_bits import RoundedParameters, Rounding, check_wire
from hpctrain.averaging.slicing import Sizes, whole_bytes
from hpctrain.averaging.sufficient_factors import FcExchange
from hpctrain.comm.base import Array, Communicator, GradientSums
from hpctrain.comm.groups import Levels
from hpctrain.comm.link import LinkModel
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.sums import Wire
from hpctrain.comm.transports import Transport
from hpctrain.core.errors import OptionError
from hpctrain.core.intervals import Interval
from hpctrain.nn.parameter import FlatGroup, GroupLayout, Parameter, Segment
from hpctrain.optim.base import Norms, NormsNeeded, Optimizer


@dataclass(frozen=True)
class NoOptions:
    """The options of a strategy that has none."""


@dataclass(frozen=True)
class WireOptions:
    """Options of strategies that send each gradient once, in messages of fixed sizes.

    Args:
        wire: How gradients travel: "float32" as they are computed; "bfloat16" and "float16" rounded to 16 bits, and added up in
            full precision.

    Raises:
        OptionError: an unknown value of wire.
    """

    wire: Wire = "float32"

    def __post_init__(self) -> None:
        check_wire(wire=self.wire)


def check_at_least_one(**values: int | None) -> None:
    """Check options that are counts; None: not set by hand.

    Raises:
        OptionError: a value is below 1; the first one.
    """
    for name, value in values.items():
        if value is not None and value < 1:
            raise OptionError(f"{name} is {value}, but must be at least 1.", name)


def check_sizes(sizes: Sizes, **by_hand: int | None) -> None:
    """Check that sizes are not to be measured where an option sets them by hand.

    Raises:
        OptionError: both are given.
    """
    for name, value in by_hand.items():
        if sizes == "measured" and value is not None:
            raise OptionError(f"sizes is measured, but {name} is {value}, which sets them; leave one of the two out.", "sizes")


def words_of_sizes(sizes: Sizes) -> str:
    """Return the words that the option adds to a stored schedule's request: none for sizes by rule, the default."""
    return ", sizes measured" if sizes == "measured" else ""


@dataclass(frozen=True)
class AveragerSetup:
    """The objects of this rank that an averager of one group of parameters works on.

    Attributes:
        group: the parameters, on this rank. optimizer: unbound; the averager binds it to what this rank updates, and owns it.
        comm: the group of ranks that hold these parameters. progress: the process's progress engine.
        norms: of all groups, where the network has several; None where this one has all parameters.
        shared: what the strategy's averagers of all groups share (`Strategy.shared`).
        transport: of arrays that lie on a device; of others there is nothing to choose.
        gradients: of this rank's shards, where sums are added in their order; None: the rank has one gradient.
    """

    group: FlatGroup
    optimizer: Optimizer
    comm: Communicator
    progress: ProgressEngine
    norms: JointNorms | None = None
    shared: Any = None
    transport: Transport = "staged"
    gradients: ShardGradients | None = None

    def own_norms(self, parts: Iterable[Interval]) -> Norms | None:
        """Return the norms of this group alone if it has all parameters and its optimiser needs some; else None.

        Args:
            parts: of all ranks, the elements that one of them adds up at once.
        """
        if not self.optimizer.needs_norms or self.norms is not None:
            return None
        return Norms(self.group) if self.gradients is None else TreeNorms(self.group, parts)

    def terms(self, start: int, stop: int) -> Array | tuple[Array, ...]:
        """Return elements [start, stop) of the gradient as ranks sum them: one array, or several in a fixed order."""
        return self.group.grad[start:stop] if self.gradients is None else self.gradients.terms(start, stop)


@dataclass(frozen=True)
class Agreement:
    """All that the ranks of a group have agreed on before an averager is made.

    Attributes:
        schedule: the operations of a step; None for a strategy that has no schedule.
        streams: the communicators that the strategy asked for. link: measured, where the strategy needs it; else None.
        sums: of gradients over the group's ranks, which may travel in 16 bits, or be made in a fixed order; None: the stream's.
    """

    schedule: CollectiveSchedule | None = None
    streams: Mapping[Stream, Communicator] = field(default_factory=dict)
    link: LinkModel | None = None
    sums: GradientSums | None = None


class GradientAverager(ABC):
    """Run the operations that the ranks have agreed on.

    A step calls in this order: begin_step(lr, counts); per layer in forward: before_forward, input_ready; per layer in
    backward: error_ready, grad_ready, data_free; end_backward(). `drain` may be called between steps.

    Attributes:
        schedule: the operations of a step, as they are now; None where a strategy has no schedule.
        pending: the state, named "<strategy>_gradient", of gradients that are kept back and not applied yet; None if there is
            none. It is empty at the start, and in a checkpoint without it. Only its sum over the holders is applied, so a run on
            other ranks continues with the sum.
        gradients: of this rank's shards, which passes add up; None: passes are added one after another.
        gather_parameters: lets every rank have what owners have of the parameters, exactly; collective, while nothing is queued.
            None: every rank updates all.
        reads: sums over the parameters that a step reads; None: not requested.
        read_parts: the parts of the parameters that are written together; empty if it is unknown what a step has read. Ranks
            with a copy must hold the same bits from `before_forward` until the last operator of backward is done. If a part is
            written before `end_backward` is called, the averager takes its sums from `reads` before the write.
        update_parts: the owned segments of each update of the optimiser, the same in every step; empty if they are unknown.
        complete_parameters: waits until all parameters hold the values of this step, including those that its forward did not
            use.
        rounded: the exact values and rounding errors that this rank owns, if parameters travel in 16 bits; else None.
        counted: returns owned segments that have each element of the group once over the ranks of `comm`, with views of their
            state, 1-D, by name, without what is kept back; where ranks own parts. None: every rank has all.
        holders: the number of those that keep back gradients of one parameter, such as the ranks of `comm`, or the nodes.
    """

    pending: ClassVar[str | None] = None
    holders: int = 1
    schedule: CollectiveSchedule | None = None

    def __init__(self, setup: AveragerSetup) -> None:
        self.group = setup.group
        self.optimizer = setup.optimizer
        self.comm = setup.comm
        self.progress = setup.progress
        self.gradients = setup.gradients
        self._joint = setup.norms if setup.optimizer.needs_norms else None
        self._member = -1 if self._joint is None else self._joint.member(setup.group)
        #: of this group alone, where it has all parameters of the network
        self._norms = setup.own_norms([(0, setup.group.size)])
        #: views of the state of one owned segment, 1-D, by name
        self._state_of: Callable[[Segment], dict[str, Array]] = setup.optimizer.state
        self.gather_parameters: Callable[[], None] | None = None
        self.reads: ReadSums | None = None
        self.read_parts: Sequence[Sequence[Segment]] = ()
        self.update_parts: Sequence[Sequence[Segment]] = ()
        self.complete_parameters: Callable[[], None] = partial(self.before_forward, tuple(self.group.parameters.values()))
        self.rounded: RoundedParameters | None = None
        self.counted: Callable[[], Sequence[tuple[Segment, dict[str, Array]]]] | None = None

    @property
    def by_holder(self) -> Collection[str]:
        """Names of the states of shape (holders, size); only their sum over the holders matters to later steps."""
        return () if self.pending is None else (self.pending,)

    @abstractmethod
    def begin_step(self, lr: float, counts: Sequence[int] | None = None) -> None:
        """Begin a step, whose update uses learning rate `lr`. counts: the step's samples on each rank of `comm`."""

    def takes_sufficient_factors(self, parameters: Sequence[Parameter]) -> bool:
        """Return whether the gradients of a linear layer are made from exchanged inputs and errors.

        Its parameters are the weight, and the bias if any.

        Fixed at set-up from the nominal global batch; such a layer's parameters are not announced by `grad_ready`.
        """
        return False

    def input_ready(self, parameters: Sequence[Parameter], x: Array) -> None:  # noqa: B027  most take gradients only
        """Take x (N, in) of a layer with sufficient factors, in forward. Copies it; may post, must not wait."""

    def error_ready(self, parameters: Sequence[Parameter], dy: Array) -> None:  # noqa: B027
        """Take dy (N, out) of such a layer, in backward before the input's gradient. Copies it; may post, must not wait."""

    @abstractmethod
    def grad_ready(self, parameter: Parameter) -> None:
        """Note that `parameter.grad` is final on this rank, once per step (the last micro-batch). May post, must not wait."""

    def data_free(self, parameter: Parameter) -> None:  # noqa: B027
        """Note that backward no longer reads `parameter.data`.

        Nothing writes it before: neither updates nor posted receives.
        """

    @abstractmethod
    def end_backward(self) -> None:
        """Note that all gradients of the step are announced."""

    @abstractmethod
    def before_forward(self, parameters: Sequence[Parameter]) -> None:
        """Wait until these parameters hold the values of this step. They are not read earlier."""

    @abstractmethod
    def drain(self) -> None:
        """Complete everything everywhere: before evaluation, checkpoint and hash. Collective."""

    def owned(self) -> Sequence[Segment]:
        """Return the segments that this rank updates, and whose optimiser state it holds: all of the group, unless sharded."""
        return self.group.segments

    def changed(self) -> Sequence[Array]:
        """Return flat arrays of this rank that steps change and later steps depend on; each element is in one of them.

        The arrays are the same ones in every call.
        """
        owned = (segment for segment in self.owned() if segment.size)
        return [self.group.data, *(view for segment in owned for view in self._state_of(segment).values())]

    def undone(self) -> None:  # noqa: B027  most have nothing else
        """Note that the last step was undone, on every rank: the arrays of `changed` and the counters are as before it."""

    def held_gradients(self) -> Mapping[str, Array]:
        """Return, by parameter, gradients of earlier steps that this rank keeps back from every update. None, by default."""
        return {}

    def full_state(self, parameter: Parameter) -> dict[str, np.ndarray]:
        """Return the optimiser's state of one whole parameter, 1-D, by name: what a checkpoint writes. After `drain`.

        Those of `by_holder` are (holders, size) instead. Collective where the state is sharded; here it is a view of what this
        rank holds.
        """
        state = self.optimizer.state(self.group.segment(parameter.name))
        return {name: self.group.arithmetic.to_host(values) for name, values in state.items()}

    def state_names(self, parameter: Parameter) -> Collection[str]:
        """Return the names that `load_state` takes for a parameter, which is given all of them.

        Collective where the state is sharded.
        """
        return tuple(self.full_state(parameter))

    def load_state(self, parameter: Parameter, state: Mapping[str, np.ndarray]) -> None:
        """Take this rank's part of one parameter's whole state, as `full_state` returned it."""
        begin = self.group.segment(parameter.name).start
        for segment in self.owned():
            if segment.parameter == parameter.name and segment.size:
                for name, view in self._state_of(segment).items():
                    self.group.arithmetic.from_host(view, state[name][segment.start - begin : segment.stop - begin])

    def counters(self) -> dict[str, int]:
        """Return numbers by name, the same on every rank, that later steps depend on besides their arguments. After `drain`."""
        return self.optimizer.counters()

    def load_counters(self, counters: Mapping[str, int]) -> None:
        """Take what `counters` returned; missing names, as in a checkpoint of another strategy, start as in a new run."""
        self.optimizer.load_counters(counters)


def for_holders(kept_back: np.ndarray, holders: int) -> np.ndarray:
    """Distribute gradients that were kept back, (previous holders, ...): to each holder its own, or to the first one their sum.

    Zeros after those of `holders` belong to no rank: a checkpoint has them where other parts of a parameter have more holders.
    """
    if len(kept_back) == holders or (len(kept_back) > holders and not kept_back[holders:].any()):
        return kept_back[:holders]
    shared_out = np.zeros((holders, *kept_back.shape[1:]), kept_back.dtype)
    shared_out[0] = kept_back.sum(axis=0)
    return shared_out


@dataclass(frozen=True)
class PlannedGroup:
    """A group of parameters on a number of ranks: all that a schedule depends on, besides a strategy's options and a link.

    Attributes:
        layout: the parameters' sizes and places. ranks: P, of the ranks that hold them.
        nodes: the node of each rank; None: unknown. nominal_batch: samples of a step over all ranks; None: unknown.
        micro_batches: passes that a rank splits a step into. norms_needed: the norms that updates are made with.
        several_groups: the network has other groups, as some layers are split over a split group.
        momentum: of the optimiser; 0 where it has none.
        names: of all parameters of the network, in forward order; None: those of this group are all.
        on_host: arrays lie where the host computes, so that it may take inputs and errors of layers without waiting.
        shards: terms that gradients are sums of, added in one order on any number of ranks; None: each rank has one term.
    """

    layout: GroupLayout
    ranks: int
    nodes: Sequence[int] | None = None
    nominal_batch: int | None = None
    micro_batches: int = 1
    norms_needed: NormsNeeded = NormsNeeded.NONE
    several_groups: bool = False
    momentum: float = 0.0
    names: Sequence[str] | None = None
    on_host: bool = True
    shards: int | None = None

    @property
    def network_parameters(self) -> Sequence[str]:
        """All parameters of the network, in forward order."""
        return tuple(self.layout.specs) if self.names is None else self.names

    @property
    def total_bytes(self) -> int:
        """Bytes of all gradients."""
        return self.layout.size * self.layout.item_bytes

    @property
    def needs_norms(self) -> bool:
        """The optimiser needs norms of whole parameters."""
        return self.norms_needed is not NormsNeeded.NONE


#: of a step's program; backward computes two gradients for what forward computes once
FORWARD_SHARE = 1 / 3


@dataclass(frozen=True)
class StrategyCosts:
    """The messages of a strategy in the terms of a machine model, before any schedule is planned: what a planner prices.

    Hidden and exposed time follow Lee et al., MLHPC 2018. Communication that overlaps backward only is exposed for the time by
    which it exceeds backward; communication that also overlaps the next forward, for the time by which it exceeds both.

    Attributes:
        kinds: the collectives of one slice of the gradients, in order.
        slice_bytes: (bytes of all gradients of a group, ranks) -> bytes of a typical slice. A function of a module, or a partial
            one, as costs are pickled.
        exposed_share: share of the compute time that cannot overlap communication: 1 if communication starts after all
            computation, `FORWARD_SHARE` if it overlaps backward only, 0 if it also overlaps the next forward.
        in_levels: sums are made within nodes first, where nodes have several ranks each.
        fc_exchange: whether linear layers exchange inputs and errors instead of gradients.
        per_parameter: each parameter has an operation of its own, which costs at least a latency.
        density: share of a slice's elements that cross between nodes, where that takes less time; None: all.
        gradients, parameters: how they travel.
        note: a sentence about steps that move less, or more, than the one that is priced; None where all are alike.
    """

    kinds: tuple[OperationKind, ...]
    slice_bytes: Callable[[int, int], int]
    exposed_share: float
    in_levels: bool = False
    fc_exchange: FcExchange = "never"
    per_parameter: bool = False
    density: float | None = None
    gradients: Wire = "float32"
    parameters: Wire = "float32"
    note: str | None = None

    @property
    def owners_update(self) -> bool:
        """Each rank updates a part, and parameters are gathered."""
        return OperationKind.ALLGATHER in self.kinds

    def rounding(self, per_node: int) -> Rounding | None:
        """Return the rounding of the messages; None: they are whole. per_node: ranks of a node, which sum in full precision."""
        whole = self.gradients == self.parameters == "float32"
        return None if whole else Rounding(self.gradients, self.parameters, per_node)

    def step_seconds(self, program_seconds: float, averaging_seconds: float) -> float:
        """Return a lower bound of a step from the time of the program and that of the averaging's messages."""
        return max(program_seconds, averaging_seconds + self.exposed_share * program_seconds)

    def hidden_seconds(self, program_seconds: float) -> float:
        """Return the time of messages that adds nothing to a program of `program_seconds`."""
        return (1 - self.exposed_share) * program_seconds


class Strategy(ABC):
    """The plan of averaging one group of parameters. Pure but for `averager`: the same result on every rank, and without ranks.

    A strategy of your own is one class in a module of its name in `averaging/strategies`. The short way is to derive from
    `AllreduceStrategy`, which sums slices of the gradients, and to define the slices:

        class Halves(AllreduceStrategy):
            '''Two allreduces, of half of the parameters each.'''

            def words(self) -> str:
                return "halves"

            def slices(self, link: LinkModel | None) -> tuple[Slice, ...]:
                return fused(self.group.layout, (self.group.layout.size + 1) // 2)

    `ReduceScatterStrategy` does the same for a reduce-scatter, an update by the owner and an allgather. A strategy with another
    protocol derives from `Strategy` and returns its own `GradientAverager` from `averager`.

    Args:
        options: an instance of `Options`; None: the defaults.

    Attributes:
        Options: a frozen dataclass of the options that a configuration may give, which checks them in `__post_init__`. A
            constructor without the keyword `options` takes them as keywords next to `group`.
        adds_norms: adds up the norms that LARS and clipping need; refused together with these if it does not.
        sums_shards: adds up gradients and nothing else, each once per step, so that their order may be that of shards.
        streams: the communicators that it posts on, besides the group's own.
        messages_vary: whether messages differ from the slices of the schedule, and change from step to step.
        chooses_on_host: whether the host chooses the elements to send, which NCCL cannot do.

    Raises:
        ConfigError: options that do not fit the group.
    """

    Options: ClassVar[type] = NoOptions
    adds_norms: ClassVar[bool] = False
    sums_shards: ClassVar[bool] = False
    streams: ClassVar[tuple[Stream, ...]] = ()
    messages_vary: ClassVar[bool] = False
    chooses_on_host: ClassVar[bool] = False

    def __init__(self, group: PlannedGroup, options: Any = None) -> None:
        self.group = group
        self.options = self.Options() if options is None else options

    @property
    def levels(self) -> Levels | None:
        """The levels in which its streams sum and gather, on nodes with several ranks each; None: one level."""
        return None

    @property
    def posted_streams(self) -> tuple[Stream, ...]:
        """The streams that schedules of this group have."""
        return self.streams

    @property
    def rounding(self) -> Rounding | None:
        """The rounding of its messages, by the options `wire` and `wire_parameters`, if it has them; None: no rounding."""
        gradients: Wire = getattr(self.options, "wire", "float32")
        parameters: Wire = getattr(self.options, "wire_parameters", "float32")
        per_node = 1 if self.levels is None else self.levels.per_node
        return None if gradients == parameters == "float32" else Rounding(gradients, parameters, per_node)

    @classmethod
    def costs(cls, options: Any) -> StrategyCosts:
        """Return the costs of the strategy with these options, for a planner; by default those of one allreduce after backward.

        `AllreduceStrategy` and `ReduceScatterStrategy` have costs of their own, which follow from the options.
        """
        return StrategyCosts((OperationKind.ALLREDUCE,), whole_bytes, 1.0, gradients=getattr(options, "wire", "float32"))

    def request(self) -> str | None:
        """Return the words for what a stored schedule must have been made for; None if the strategy has no schedule."""
        return None

    def plan(self, link: LinkModel | None) -> CollectiveSchedule | None:
        """Return the schedule of the first steps; None if the strategy has none.

        Args:
            link: None where no size or order follows from it.
        """
        return None

    def accepts(self, stored: CollectiveSchedule | None) -> bool:
        """Return whether a stored schedule fits: the same strategy, options and parameters on as many ranks."""
        return stored is not None and (stored.request, stored.ranks) == (self.request(), self.group.ranks)

    def needs_link(self, usable: CollectiveSchedule | None) -> bool:
        """Return whether something follows from a measured link that a usable stored schedule, if any, does not contain."""
        return False

    def needs_operation_seconds(self, usable: CollectiveSchedule | None) -> bool:
        """Return whether measuring the link includes the time that an operation takes of a core."""
        return False

    def shared(self, comm: Communicator, progress: ProgressEngine, members: int) -> Any:
        """Return a state that the averagers of all groups of a network share, such as an interval; None: there is none.

        Collective over `comm`.

        Args:
            comm: all ranks that hold a part of the network. members: its parameter groups.
        """
        return None

    @abstractmethod
    def averager(self, setup: AveragerSetup, agreement: Agreement) -> GradientAverager:
        """Make the averager that runs the agreed schedule on this rank. Collective over the group, once its ranks agree."""


def words_of_shards(shards: int | None) -> str:
    """Return the words that shards add to a stored schedule's request: none without shards."""
    return "" if shards is None else f", exact {shards} shards"
