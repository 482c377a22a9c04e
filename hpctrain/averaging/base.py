"""The seam between backward and the network: gradients in, agreed parameters out.

An averager turns this rank's gradients into the update of every `Parameter.data` that the whole group agrees on. It sums and
never divides: the loss has divided by the global count of the step. It owns the order of its collectives, which follows from
the step alone and is the same on every rank.

Its operations are planned before it exists: a `Strategy` plans a schedule without any rank, and `agreement` makes the averager
that runs it, once the ranks have agreed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import numpy as np

from hpctrain.averaging.collective_schedule import CollectiveSchedule, Stream
from hpctrain.averaging.lazy_interval import LazyInterval
from hpctrain.averaging.group_sums import JointNorms
from hpctrain.averaging.read_sums import ReadSums
from hpctrain.averaging.sixteen_bits import RoundedParameters
from hpctrain.averaging.shard_gradients import ShardGradients
from hpctrain.averaging.tree_norms import TreeNorms
from hpctrain.core.intervals import Interval
from hpctrain.comm.base import Array, Communicator, GradientSums
from hpctrain.comm.link import LinkModel
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.transports_rest import Transport
from hpctrain.nn.parameter import FlatGroup, Parameter, Segment
from hpctrain.optim.base import Norms, Optimizer


@dataclass(frozen=True)
class AveragerSetup:
    """The things of this rank that an averager of one group of parameters works on.

    Attributes:
        group: the parameters, on this rank. optimizer: unbound; the averager binds it to what this rank updates, and owns it.
        comm: the group of ranks that hold these parameters. progress: the process's progress engine.
        norms: of all groups, where the network has several; None where this one has all parameters.
        interval: of lazy averaging, where the network has several groups that must share it.
        transport: of arrays that lie on a device; of others there is nothing to choose.
        gradients: of this rank's shards, where sums are added in their order; None: the rank has one gradient.
    """

    group: FlatGroup
    optimizer: Optimizer
    comm: Communicator
    progress: ProgressEngine
    norms: JointNorms | None = None
    interval: LazyInterval | None = None
    transport: Transport = "staged"
    gradients: ShardGradients | None = None

    def own_norms(self, parts: Iterable[Interval]) -> Norms | None:
        """The norms of this group alone, where it has all parameters and its optimiser needs some; else None.

        Args:
            parts: of all ranks, the elements that one of them adds up at once.
        """
        if not self.optimizer.needs_norms or self.norms is not None:
            return None
        return Norms(self.group) if self.gradients is None else TreeNorms(self.group, parts)

    def terms(self, start: int, stop: int) -> Array | tuple[Array, ...]:
        """Elements [start, stop) of the gradient, as they are summed over ranks: one array, or several in a fixed order."""
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
        pending: the state, named "<strategy>_gradient", of gradients that are kept back and not applied yet; None where there is
            none. It is empty at the start, and a checkpoint without it says just that. Only its sum over the holders is applied,
            so a run on other ranks goes on with the sum.
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
        counted: gives owned segments that have each element of the group once over the ranks of `comm`, with views of their
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
        """Names of the states that are (holders, size), of which only the sum over the holders matters to later steps."""
        return () if self.pending is None else (self.pending,)

    @abstractmethod
    def begin_step(self, lr: float, counts: Sequence[int] | None = None) -> None:
        """A step starts; its update will use learning rate `lr`. counts: the step's samples on each rank of `comm`."""

    def takes_sufficient_factors(self, parameters: Sequence[Parameter]) -> bool:
        """True where the gradients of a linear layer (weight, and bias if any) are made from exchanged inputs and errors.

        Fixed at set-up from the nominal global batch; such a layer's parameters are not announced by `grad_ready`.
        """
        return False

    def input_ready(self, parameters: Sequence[Parameter], x: Array) -> None:  # noqa: B027  most take gradients only
        """Forward: x (N, in) of a layer that gives sufficient factors; copied before this returns. May post, must not wait."""

    def error_ready(self, parameters: Sequence[Parameter], dy: Array) -> None:  # noqa: B027
        """Backward, before the input's gradient: dy (N, out) of such a layer; copied before this returns."""

    @abstractmethod
    def grad_ready(self, parameter: Parameter) -> None:
        """`parameter.grad` is final on this rank, once per step (the last micro-batch). May post, must not wait."""

    def data_free(self, parameter: Parameter) -> None:  # noqa: B027
        """Backward no longer reads `parameter.data`. Nothing writes it before: updates and posted receives included."""

    @abstractmethod
    def end_backward(self) -> None:
        """All gradients of the step are announced."""

    @abstractmethod
    def before_forward(self, parameters: Sequence[Parameter]) -> None:
        """Wait until these parameters hold the values of this step. Nobody reads them earlier."""

    @abstractmethod
    def drain(self) -> None:
        """Complete everything everywhere: before evaluation, checkpoint and hash. Collective."""

    def owned(self) -> Sequence[Segment]:
        """The parts of the group that this rank updates, and whose optimiser state it holds. All of it, unless sharded."""
        return self.group.segments

    def changed(self) -> Sequence[Array]:
        """Flat arrays of this rank that steps change and later ones go on from, each element in one of them; always the same."""
        owned = (segment for segment in self.owned() if segment.size)
        return [self.group.data, *(view for segment in owned for view in self._state_of(segment).values())]

    def undone(self) -> None:  # noqa: B027  most have nothing else
        """The last step was undone: what `changed` and `counters` gave before it is in place again. The same on every rank."""

    def held_gradients(self) -> Mapping[str, Array]:
        """By parameter, gradients of earlier steps that this rank still keeps back from every update. None, by default."""
        return {}

    def full_state(self, parameter: Parameter) -> dict[str, np.ndarray]:
        """The optimiser's state of one whole parameter, 1-D, by name: what a checkpoint writes. After `drain`.

        Those of `by_holder` are (holders, size) instead. Collective where the state is sharded; here it is a view of what this
        rank holds.
        """
        state = self.optimizer.state(self.group.segment(parameter.name))
        return {name: self.group.arithmetic.to_host(values) for name, values in state.items()}

    def state_names(self, parameter: Parameter) -> Collection[str]:
        """The names that `load_state` takes for a parameter; it is given all of them. Collective where the state is sharded."""
        return tuple(self.full_state(parameter))

    def load_state(self, parameter: Parameter, state: Mapping[str, np.ndarray]) -> None:
        """Take this rank's part of one parameter's whole state, as `full_state` gave it."""
        begin = self.group.segment(parameter.name).start
        for segment in self.owned():
            if segment.parameter == parameter.name and segment.size:
                for name, view in self._state_of(segment).items():
                    self.group.arithmetic.from_host(view, state[name][segment.start - begin : segment.stop - begin])

    def counters(self) -> dict[str, int]:
        """Numbers by name, the same on every rank, that later steps depend on beside what they are given. After `drain`."""
        return self.optimizer.counters()

    def load_counters(self, counters: Mapping[str, int]) -> None:
        """Take what `counters` gave; names that are missing, as in a checkpoint of another strategy, start as in a new run."""
        self.optimizer.load_counters(counters)


def for_holders(kept_back: np.ndarray, holders: int) -> np.ndarray:
    """Gradients (as many as kept them back, ...) as `holders` go on with them: each its own, or the first one their sum.

    Zeros behind those of `holders` are of nobody: a checkpoint has them where other parts of a parameter have more holders.
    """
    if len(kept_back) == holders or (len(kept_back) > holders and not kept_back[holders:].any()):
        return kept_back[:holders]
    shared_out = np.zeros((holders, *kept_back.shape[1:]), kept_back.dtype)
    shared_out[0] = kept_back.sum(axis=0)
    return shared_out
