"""Interface of gradient averaging: an averager receives gradients from backward and updates the parameters.

A `Strategy` plans how the gradients of one group of parameters are averaged. Its plan is a schedule, made without ranks,
communicators and arrays. Once the ranks have agreed on it (`averagers.make_averager`), the strategy creates the
`GradientAverager` that runs it.

An averager computes the update of every `Parameter.data` from the gradients of all ranks, with the same result on all ranks of
the group. It sums and never divides, because the loss has already been divided by the global number of samples. The order of its
collectives depends on the step alone and is the same on every rank.
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
from hpctrain.averaging.slicing import whole_bytes
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
    """Options of a strategy without options."""


@dataclass(frozen=True)
class WireOptions:
    """Options of strategies that send each gradient once, in messages of fixed sizes.

    Args:
        wire: Number format in which gradients travel: "float32" sends them unchanged; "bfloat16" rounds them to 16 bits,
            and sums are still computed in full precision.

    Raises:
        OptionError: wire is unknown.
    """

    wire: Wire = "float32"

    def __post_init__(self) -> None:
        check_wire(wire=self.wire)


def check_at_least_one(**values: int | None) -> None:
    """Check that counts are at least 1. None means that the option is not set.

    Raises:
        OptionError: a value is below 1; the message names the first one.
    """
    for name, value in values.items():
        if value is not None and value < 1:
            raise OptionError(f"{name} is {value}, but must be at least 1.", name)


@dataclass(frozen=True)
class AveragerSetup:
    """Objects of this rank that an averager of one parameter group works with.

    Attributes:
        group: the parameters on this rank.
        optimizer: an unbound optimiser. The averager binds it to the segments that this rank updates, and owns it.
        comm: communicator of the ranks that hold these parameters.
        norms: norms over all groups; None if this group has all parameters of the network, or no group needs norms.
        shared: state shared by the strategy's averagers of all groups (`Strategy.shared`).
        transport: transport of arrays on a device; unused for arrays on the host.
        gradients: gradients of this rank's shards, which are summed in the order of the shards; None: the rank has one gradient.
        watched: whether ranks compare the parameters that steps read, and owners the values that they write.
    """

    group: FlatGroup
    optimizer: Optimizer
    comm: Communicator
    progress: ProgressEngine
    norms: JointNorms | None = None
    shared: Any = None
    transport: Transport = "staged"
    gradients: ShardGradients | None = None
    watched: bool = False

    def read_sums(self, parts: Sequence[Sequence[Segment]], owned: Sequence[Segment] = ()) -> ReadSums | None:
        """Return sums of the parameters that a step reads; None if they are not watched or no other rank has them.

        Args:
            parts: parts of the parameters that are written together.
            owned: segments that this rank updates. Of two ranks, the owner counts as correct; of more, the majority.
        """
        ranks = self.comm.size if self.watched else 1
        return None if ranks == 1 else ReadSums(self.group, parts, owned if ranks == 2 else ())

    def own_norms(self, parts: Iterable[Interval]) -> Norms | None:
        """Return norms of this group; None if its optimiser needs none or the network has several groups.

        Args:
            parts: element ranges that ranks update, over all ranks. Each rank sums the squares of a whole range.
        """
        if not self.optimizer.needs_norms or self.norms is not None:
            return None
        return Norms(self.group) if self.gradients is None else TreeNorms(self.group, parts)

    def terms(self, start: int, stop: int) -> Array | tuple[Array, ...]:
        """Return this rank's terms of the sum of gradient elements [start, stop): one array, or several in a fixed order."""
        return self.group.grad[start:stop] if self.gradients is None else self.gradients.terms(start, stop)


@dataclass(frozen=True)
class Agreement:
    """Everything that the ranks of a group agree on before an averager is created.

    Attributes:
        schedule: the operations of a step; None for a strategy without a schedule.
        streams: communicator of each stream on which the averager posts operations.
        link: the measured link; None if the strategy does not need it.
        sums: sums of gradients over the group's ranks, in 16 bits or in a fixed order; None: sums of the stream's communicator.
    """

    schedule: CollectiveSchedule | None = None
    streams: Mapping[Stream, Communicator] = field(default_factory=dict)
    link: LinkModel | None = None
    sums: GradientSums | None = None


class GradientAverager(ABC):
    """Base of the averagers, which run the operations that the ranks have agreed on.

    A step calls, in this order: `begin_step(lr, counts)`; for each layer in forward `before_forward` and `input_ready`; for each
    layer in backward `error_ready`, `grad_ready` and `data_free`; finally `end_backward()`. `drain` may be called between steps.

    Attributes:
        schedule: current operations of a step; None for a strategy without a schedule.
        pending: name, "<strategy>_gradient", of the state with gradients that are kept back and not applied yet; None if there is
            none. The state is empty at the start, and if a checkpoint lacks it. Only its sum over the holders is applied, so a
            run on another number of ranks continues with the sum.
        gradients: gradients of this rank's shards, which passes accumulate; None: passes are added one after another.
        gather_parameters: callable that copies the owners' exact parameters to all ranks. Collective, while nothing is queued.
            None: every rank updates all parameters.
        reads: sums of the parameters that a step reads (`AveragerSetup.read_sums`); None: not watched, or it is unknown what a
            step has read. Ranks with a copy must hold the same bits from `before_forward` until the last operator of backward is
            done. If a part is written before `end_backward` is called, the averager sums it before the write.
        complete_parameters: callable that waits until all parameters hold the values of this step, including parameters that its
            forward did not use.
        update_parts: owned segments of each optimiser update, the same in every step; empty if they are unknown.
        rounded: exact values and rounding errors of the parameters that this rank owns, if parameters travel in 16 bits; else
            None.
        counted: callable that returns owned segments, with views of their state (1-D, by name) without gradients that are kept
            back. Over the ranks of `comm`, the segments have each element of the group once. None: every rank has all elements.
        holders: number of holders that keep back gradients of one parameter, such as the ranks of `comm` or the nodes.
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
        #: norms of this group, if it has all parameters of the network
        self._norms = setup.own_norms([(0, setup.group.size)])
        #: views of the state of one owned segment, 1-D, by name
        self._state_of: Callable[[Segment], dict[str, Array]] = setup.optimizer.state
        self.gather_parameters: Callable[[], None] | None = None
        self.reads: ReadSums | None = None
        self.complete_parameters = partial(self.before_forward, tuple(self.group.parameters.values()))
        self.update_parts: Sequence[Sequence[Segment]] = ()
        self.rounded: RoundedParameters | None = None
        self.counted: Callable[[], Sequence[tuple[Segment, dict[str, Array]]]] | None = None

    @property
    def by_holder(self) -> Collection[str]:
        """Names of the states of shape (holders, size). Later steps depend only on their sum over the holders."""
        return () if self.pending is None else (self.pending,)

    @abstractmethod
    def begin_step(self, lr: float, counts: Sequence[int] | None = None) -> None:
        """Begin a step.

        Args:
            counts: samples of the step on each rank of `comm`; None only if no layer exchanges inputs and errors.
        """

    def takes_sufficient_factors(self, parameters: Sequence[Parameter]) -> bool:
        """Return whether the gradients of a linear layer are computed from exchanged inputs and errors.

        The averager decides at set-up, from the nominal global batch. The step does not call `grad_ready` for such parameters.

        Args:
            parameters: weight of the layer, and its bias if it has one.
        """
        return False

    def input_ready(self, parameters: Sequence[Parameter], x: Array) -> None:  # noqa: B027  most averagers take gradients only
        """Copy the input x (N, in) of a layer with sufficient factors, in forward. It may post, but must not wait."""

    def error_ready(self, parameters: Sequence[Parameter], dy: Array) -> None:  # noqa: B027
        """Copy the error dy (N, out), the gradient of a layer's output, of a layer with sufficient factors.

        The step calls it in backward, before it computes the gradient of the layer's input. It may post, but must not wait.
        """

    @abstractmethod
    def grad_ready(self, parameter: Parameter) -> None:
        """Announce that `parameter.grad` is final on this rank. It may post operations, but must not wait.

        The step calls it once for each parameter, in the last micro-batch.
        """

    def data_free(self, parameter: Parameter) -> None:  # noqa: B027
        """Announce that backward no longer reads `parameter.data`. Before this call, neither updates nor receives write it."""

    @abstractmethod
    def end_backward(self) -> None:
        """Announce the end of backward: all gradients of the step are final."""

    @abstractmethod
    def before_forward(self, parameters: Sequence[Parameter]) -> None:
        """Wait until these parameters hold the values of this step. Forward must not read them earlier."""

    @abstractmethod
    def drain(self) -> None:
        """Complete all operations and updates, for example before an evaluation, a checkpoint or a hash. Collective."""

    def owned(self) -> Sequence[Segment]:
        """Return the segments that this rank updates and whose optimiser state it holds; all of the group by default."""
        return self.group.segments

    def changed(self) -> Sequence[Array]:
        """Return flat arrays of this rank, without overlap, that steps change and on which later steps depend.

        Every call returns the same arrays.
        """
        owned = (segment for segment in self.owned() if segment.size)
        return [self.group.data, *(view for segment in owned for view in self._state_of(segment).values())]

    def undone(self) -> None:  # noqa: B027  most averagers have nothing else to undo
        """Complete the undoing of the last step, after counters and the arrays of `changed` were restored on every rank."""

    def held_gradients(self) -> Mapping[str, Array]:
        """Return, by parameter, gradients of earlier steps that this rank has not applied yet; by default none."""
        return {}

    def full_state(self, parameter: Parameter) -> dict[str, np.ndarray]:
        """Return the optimiser's state of one whole parameter by name, as a checkpoint stores it. Call it after `drain`.

        States are 1-D; those of `by_holder` have shape (holders, size). Collective if the state is sharded. Otherwise the values
        are views of this rank's state.
        """
        state = self.optimizer.state(self.group.segment(parameter.name))
        return {name: self.group.arithmetic.to_host(values) for name, values in state.items()}

    def state_names(self, parameter: Parameter) -> Collection[str]:
        """Return the names of the states that `load_state` needs. Override it if `full_state` is collective: this is not."""
        return tuple(self.full_state(parameter))

    def load_state(self, parameter: Parameter, state: Mapping[str, np.ndarray]) -> None:
        """Load this rank's part of the state of one whole parameter, as returned by `full_state`."""
        begin = self.group.segment(parameter.name).start
        for segment in self.owned():
            if segment.parameter == parameter.name and segment.size:
                for name, view in self._state_of(segment).items():
                    self.group.arithmetic.from_host(view, state[name][segment.start - begin : segment.stop - begin])

    def counters(self) -> dict[str, int]:
        """Return integers, by name, on which later steps depend. They are the same on every rank. Call it after `drain`."""
        return self.optimizer.counters()

    def load_counters(self, counters: Mapping[str, int]) -> None:
        """Load the integers that `counters` returned.

        Counters that are missing, as in a checkpoint of another strategy, start as in a new run.
        """
        self.optimizer.load_counters(counters)


def for_holders(kept_back: np.ndarray, holders: int) -> np.ndarray:
    """Return gradients that were kept back, (previous holders, ...), distributed over a new number of holders, (holders, ...).

    If their number is unchanged, each holder receives its own gradients. Otherwise the first holder receives the sum. Rows after
    the first `holders` rows are ignored if they are zero: a checkpoint contains such rows if other parts of a parameter have more
    holders.
    """
    if len(kept_back) == holders or (len(kept_back) > holders and not kept_back[holders:].any()):
        return kept_back[:holders]
    shared_out = np.zeros((holders, *kept_back.shape[1:]), kept_back.dtype)
    shared_out[0] = kept_back.sum(axis=0)
    return shared_out


@dataclass(frozen=True)
class PlannedGroup:
    """Parameter group on a number of ranks. Together with a strategy's options and a link, it determines the schedule.

    Attributes:
        ranks: number P of the ranks that hold the parameters.
        nodes: node of each rank; None: unknown.
        nominal_batch: samples of a step over all ranks; None: unknown.
        micro_batches: number of passes into which a rank splits a step.
        norms_needed: norms that the updates need.
        several_groups: whether the network has other groups, because some layers are split over a split group.
        momentum: momentum of the optimiser; 0 if it has none.
        names: all parameters of the network in forward order; None: this group has all parameters.
        on_host: whether kernels run on the host, so that inputs and errors of layers can be copied without waiting for a device.
        shards: number of terms of a gradient, which are summed in the same order on any number of ranks; None: one term per rank.
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
        """Whether the optimiser needs norms of whole parameters."""
        return self.norms_needed is not NormsNeeded.NONE


#: share of forward in a step's program; backward computes two gradients per product of forward
FORWARD_SHARE = 1 / 3


@dataclass(frozen=True)
class StrategyCosts:
    """Messages of a strategy in the terms of a machine model, for a planner that has no schedule yet.

    Hidden and exposed time follow Lee et al., MLHPC 2018. If communication overlaps only backward, the time by which it exceeds
    backward is exposed. If it also overlaps the next forward, only the time by which it exceeds both is exposed.

    Attributes:
        kinds: collectives for one slice of the gradients, in order.
        slice_bytes: function (bytes of all gradients of a group, ranks) -> bytes of a typical slice. It must be picklable: a
            function of a module, or a `partial` of one.
        exposed_share: share of the compute time that cannot overlap communication: 1 if communication starts after all
            computation, `FORWARD_SHARE` if it overlaps only backward, 0 if it also overlaps the next forward.
        in_levels: whether sums are computed within nodes first, if nodes have several ranks each.
        fc_exchange: choice of the linear layers that exchange inputs and errors instead of gradients.
        per_parameter: whether each parameter has a separate operation, which costs at least one latency.
        density: share of a slice's elements that cross between nodes, if sending them takes less time than the whole slice; None:
            all elements do.
        gradients: number format in which gradients travel.
        parameters: number format in which parameters travel.
        note: sentence about steps that move less or more than the modelled step; None if all steps are alike.
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
        """Whether each rank updates a part and the parameters are gathered."""
        return OperationKind.ALLGATHER in self.kinds

    def rounding(self, per_node: int) -> Rounding | None:
        """Return the rounding of the messages, with sums of `per_node` ranks in full precision; None if nothing is rounded."""
        whole = self.gradients == self.parameters == "float32"
        return None if whole else Rounding(self.gradients, self.parameters, per_node)

    def step_seconds(self, program_seconds: float, averaging_seconds: float) -> float:
        """Return a lower bound for the time of a step from the times of its passes and of its averaging messages."""
        return max(program_seconds, averaging_seconds + self.exposed_share * program_seconds)

    def hidden_seconds(self, program_seconds: float) -> float:
        """Return the maximum time of messages that can overlap with a program of `program_seconds`."""
        return (1 - self.exposed_share) * program_seconds


class Strategy(ABC):
    """Plan for averaging one group of parameters. Only `shared` and `averager` need ranks; all other methods are pure.

    A strategy of your own derives from `AllreduceStrategy`, which sums slices of the gradients, or from `ReduceScatterStrategy`,
    in which owners update parts that all ranks gather; it defines the slices (docs/own-code.md has an example). A strategy with
    another protocol derives from `Strategy` and returns its own `GradientAverager` from `averager`.

    Args:
        group: the parameters to plan for.
        options: an instance of `Options`; None: the defaults.

    Attributes:
        Options: frozen dataclass of the options that a configuration may set; `__post_init__` checks them. A constructor without
            the keyword `options` receives them as keywords next to `group`.
        adds_norms: whether the averager computes the norms that LARS, LAMB and clipping need; if not, a configuration with one
            of them is an error.
        sums_shards: whether the averager sums the unchanged gradients of each step once, so that sums may follow the order of
            shards.
        streams: streams on which the averager posts operations, in addition to the group's communicator.
        accumulated: parameters whose gradients are added to those of earlier steps.
        chooses_on_host: whether the host chooses the elements to send, which NCCL cannot do.

    Raises:
        ConfigError: the options do not fit the group.
    """

    Options: ClassVar[type] = NoOptions
    adds_norms: ClassVar[bool] = False
    sums_shards: ClassVar[bool] = False
    streams: ClassVar[tuple[Stream, ...]] = ()
    chooses_on_host: ClassVar[bool] = False
    accumulated: Collection[str] = ()

    def __init__(self, group: PlannedGroup, options: Any = None) -> None:
        self.group = group
        self.options = self.Options() if options is None else options
        self.check(group, self.options)

    @classmethod
    def check(cls, group: PlannedGroup, options: Any) -> None:
        """Raise a ConfigError unless the options fit the group. The constructor calls this method.

        A check of a configuration calls it for a group without parameters on one rank.
        """
        if getattr(options, "fc_exchange", "never") == "always" and group.micro_batches > 1:
            raise OptionError(
                f"fc_exchange is always, but micro_batches is {group.micro_batches}; set micro_batches to 1, or fc_exchange to "
                f"auto or never.",
                "fc_exchange",
            )

    @property
    def levels(self) -> Levels | None:
        """Levels of sums and gathers within and across nodes, if nodes have several ranks each; None: one level."""
        return None

    @property
    def posted_streams(self) -> tuple[Stream, ...]:
        """Streams that the schedules of this group use."""
        return self.streams

    @property
    def rounding(self) -> Rounding | None:
        """Rounding of messages, set by the options `wire` and `wire_parameters` if the strategy has them; None: no rounding."""
        gradients: Wire = getattr(self.options, "wire", "float32")
        parameters: Wire = getattr(self.options, "wire_parameters", "float32")
        per_node = 1 if self.levels is None else self.levels.per_node
        return None if gradients == parameters == "float32" else Rounding(gradients, parameters, per_node)

    @classmethod
    def costs(cls, options: Any) -> StrategyCosts:
        """Return the costs of the strategy with these options, for a planner. The default is one allreduce after backward.

        `AllreduceStrategy` and `ReduceScatterStrategy` derive their costs from the options.
        """
        return StrategyCosts((OperationKind.ALLREDUCE,), whole_bytes, 1.0, gradients=getattr(options, "wire", "float32"))

    def request(self) -> str | None:
        """Return the text that identifies the inputs of a stored schedule; None if the strategy has no schedule."""
        return None

    def plan(self, link: LinkModel | None) -> CollectiveSchedule | None:
        """Return the schedule of the first steps; None if the strategy has none.

        Args:
            link: measured link; None if the order does not depend on it.
        """
        return None

    def accepts(self, stored: CollectiveSchedule | None) -> bool:
        """Return whether a stored schedule is for the same strategy, options, parameters and number of ranks."""
        return stored is not None and (stored.request, stored.ranks) == (self.request(), self.group.ranks)

    def needs_link(self, usable: CollectiveSchedule | None) -> bool:
        """Return whether the plan depends on a measured link.

        Args:
            usable: stored schedule that will be used, if any; it may make the measurement unnecessary.
        """
        return False

    def shared(self, comm: Communicator, progress: ProgressEngine, members: int) -> Any:
        """Return an object that the averagers of all groups of a network share, such as an interval; None if there is none.

        Collective over `comm`.

        Args:
            comm: communicator of all ranks that hold a part of the network.
            members: number of parameter groups.
        """
        return None

    @abstractmethod
    def averager(self, setup: AveragerSetup, agreement: Agreement) -> GradientAverager:
        """Create the averager that runs the agreed schedule on this rank. Collective over the group."""


def words_of_shards(shards: int | None) -> str:
    """Return the text about shards that is appended to the request of a stored schedule; empty without shards."""
    return "" if shards is None else f", exact {shards} shards"
