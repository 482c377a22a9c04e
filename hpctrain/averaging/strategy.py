"""Strategies: how the gradients of one group of parameters are averaged, planned without ranks, communicators and arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hpctrain.averaging.base import Agreement, AveragerSetup, GradientAverager
from hpctrain.averaging.collective_schedule import CollectiveSchedule, Stream
from hpctrain.averaging.lazy_interval import LazyInterval
from hpctrain.averaging.options import NoOptions
from hpctrain.averaging.rounding import Rounding
from hpctrain.comm.base import Communicator
from hpctrain.comm.link import LinkModel
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.sums import Wire
from hpctrain.comm.groups import Levels
from hpctrain.nn.parameter import GroupLayout
from hpctrain.optim.base import NormsNeeded


@dataclass(frozen=True)
class PlannedGroup:
    """A group of parameters on so many ranks: all that a schedule follows from, beside a strategy's options and a link.

    Attributes:
        layout: the parameters' sizes and places. ranks: P, of the ranks that hold them.
        nodes: the node of each rank; None: unknown. nominal_batch: samples of a step over all ranks; None: unknown.
        micro_batches: passes that a rank splits a step into. norms_needed: the norms that updates are made with.
        several_groups: the network has other groups beside this one, as some layers are split over a split group.
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


class Strategy(ABC):
    """One strategy for one group of parameters. All but `averager` is pure: the same answer on every rank, and without any.

    A strategy of your own is one class in a module of its name in `averaging/strategies`. The short way is to derive from
    `AllreduceStrategy`, which sums slices of the gradients, and to say what the slices are:

        class Halves(AllreduceStrategy):
            '''Two allreduces, of half of the parameters each.'''

            def words(self) -> str:
                return "halves"

            def slices(self, link: LinkModel | None) -> tuple[Slice, ...]:
                return fused(self.group.layout, (self.group.layout.size + 1) // 2)

    `ReduceScatterStrategy` does the same for a reduce-scatter, an update by the owner and an allgather. A strategy with another
    protocol derives from `Strategy` and gives its own `GradientAverager` in `averager`.

    Args:
        options: an instance of `Options`; None: the defaults.

    Attributes:
        Options: a frozen dataclass of the options that a configuration may give, which checks them in `__post_init__`. A
            constructor without the keyword `options` takes them as keywords beside `group`.
        adds_norms: adds up the norms that LARS and clipping need; refused beside these where it does not.
        sums_shards: adds up gradients and nothing else, each once per step, so that their order may be that of shards.
        streams: the communicators that it posts on, beside the group's own.

    Raises:
        ConfigError: options that do not fit the group.
    """

    Options: ClassVar[type] = NoOptions
    adds_norms: ClassVar[bool] = False
    sums_shards: ClassVar[bool] = False
    streams: ClassVar[tuple[Stream, ...]] = ()

    def __init__(self, group: PlannedGroup, options: Any = None) -> None:
        self.group = group
        self.options = self.Options() if options is None else options

    @property
    def levels(self) -> Levels | None:
        """The levels in which its streams sum and gather, where nodes have several ranks each; None: in one."""
        return None

    @property
    def posted_streams(self) -> tuple[Stream, ...]:
        """The streams that schedules of this group have."""
        return self.streams

    @property
    def rounding(self) -> Rounding | None:
        """The numbers of its messages, as the options `wire` and `wire_parameters` say, where it has them; None: as they are."""
        gradients: Wire = getattr(self.options, "wire", "float32")
        parameters: Wire = getattr(self.options, "wire_parameters", "float32")
        per_node = 1 if self.levels is None else self.levels.per_node
        return None if gradients == parameters == "float32" else Rounding(gradients, parameters, per_node)

    def request(self) -> str | None:
        """The words for what a stored schedule must have been made for; None where the strategy has no schedule."""
        return None

    def plan(self, link: LinkModel | None) -> CollectiveSchedule | None:
        """The schedule of the first steps; None where the strategy has none.

        Args:
            link: None where no size or order follows from it.
        """
        return None

    def accepts(self, stored: CollectiveSchedule | None) -> bool:
        """Whether a stored schedule fits: the same strategy, options and parameters on as many ranks."""
        return stored is not None and (stored.request, stored.ranks) == (self.request(), self.group.ranks)

    def needs_link(self, usable: CollectiveSchedule | None) -> bool:
        """Whether something follows from a measured link that a usable stored schedule, if any, does not say."""
        return False

    def needs_operation_seconds(self, usable: CollectiveSchedule | None) -> bool:
        """Whether a link that is measured is to say what an operation takes of a core, too."""
        return False

    def interval(self, comm: Communicator, progress: ProgressEngine, members: int) -> LazyInterval | None:
        """The interval of averaging that the averagers of a network's groups share; None where all average in every step.

        Collective over `comm`.

        Args:
            comm: all ranks that hold a part of the network. members: its parameter groups.
        """
        return None

    @abstractmethod
    def averager(self, setup: AveragerSetup, agreement: Agreement) -> GradientAverager:
        """Make the averager that runs the agreed schedule on this rank. Collective over the group, once its ranks agree."""


def words_of_shards(shards: int | None) -> str:
    """The words that shards add to those that a stored schedule is known by; without them nothing is added."""
    return "" if shards is None else f", exact {shards} shards"
