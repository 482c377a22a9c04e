"""Describe a step as data: the tasks of each class of ranks in program order, and the result of their simulation.

Ranks with equal steps form a class. Tasks have the order of the execution plan and of the training step, so that a simulation
posts, waits and polls at the same places as a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpctrain.averaging.collective_schedule import CollectiveSchedule, LocalEventKey
from hpctrain.averaging.sixteen_bits import Rounding
from hpctrain.comm.groups import Levels
from hpctrain.comm.progress import ProgressMode
from hpctrain.planner.costs.collective_costs import GridPlacements, GroupPlacement
from hpctrain.trace.time_table import TimeTable
from hpctrain.trace.tracer import Category, Events


@dataclass(frozen=True)
class Compute:
    """Uninterrupted work of the program, with its name and category in traces.

    Attributes:
        polls: whether a poll follows.
    """

    row: str  # name in traces
    category: Category
    seconds: float
    polls: bool = True


@dataclass(frozen=True)
class Happens:
    """Event on which operations of a group's schedule depend. A poll follows, except after LAST_READ."""

    group: str
    event: LocalEventKey


@dataclass(frozen=True)
class NeedsParameters:
    """Wait before a layer reads parameters, until the previous step has updated them. The rank performs their late updates."""

    group: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Exchange:
    """All-to-all of the split group.

    Attributes:
        purpose: name in traces.
        peers: number of ranks with which this rank exchanges.
    """

    purpose: str
    sent_bytes: int
    received_bytes: int
    peers: int


@dataclass(frozen=True)
class BeginExchange:
    """Post of an exchange.

    Attributes:
        number: number of the exchange in the step, equal on all ranks of the split group.
    """

    number: int
    exchange: Exchange


@dataclass(frozen=True)
class EndExchange:
    """Wait until the exchange with this number is complete."""

    number: int


@dataclass(frozen=True)
class Merge:
    """Merge of batch statistics: an allgather with `bytes` bytes from each rank of a group, and the wait for it.

    Attributes:
        ranks: name of the group: "all", "data" or "split", as in `BatchNormSpec.merge`.
    """

    purpose: str
    ranks: str
    bytes: int


@dataclass(frozen=True)
class EndBackward:
    """End of backward, when all gradients are announced. Averagers post or wait for all deferred operations."""


@dataclass(frozen=True)
class StepMessage:
    """Small message of a step: the rank waits for the message of the previous step, then posts this one to all ranks."""

    bytes: int


Task = Compute | Happens | NeedsParameters | BeginExchange | EndExchange | Merge | EndBackward | StepMessage


@dataclass(frozen=True)
class RankClass:
    """Ranks with equal steps.

    Attributes:
        split_rank: number of the first rank in its split group.
        samples: number of samples of a step on each rank.
        update_seconds: seconds to update one owned element, by group.
        product_seconds: seconds per owned element to compute a weight gradient from exchanged inputs and errors, by weight.
        memory_bytes: maximum memory of a rank of the class.
    """

    name: str
    ranks: int  # number of ranks of the class
    split_rank: int
    samples: int
    tasks: tuple[Task, ...]
    update_seconds: Mapping[str, float] = field(default_factory=dict)
    product_seconds: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: int = 0


@dataclass(frozen=True)
class AveragedGroup:
    """Parameter group that classes of ranks average together.

    Attributes:
        elements: number of elements of its gradients on one rank.
        schedule: the schedule; None for blocking averaging, which waits for one allreduce of `elements` elements after backward.
        members: names of the classes with ranks in one such group.
        samples: samples of the step, by rank of the group.
        shards: number of shards whose sums have a fixed order; None: one sum per rank.
    """

    name: str
    elements: int
    item_bytes: int  # of an element of the gradients
    schedule: CollectiveSchedule | None
    placement: GroupPlacement
    members: tuple[str, ...]
    samples: tuple[int, ...]
    levels: Levels | None = None  # of the group's streams; None: one level
    rounding: Rounding | None = None  # of the messages; None: no rounding
    shards: int | None = None


@dataclass(frozen=True)
class StepProgram:
    """One step of a job on all ranks. Groups of different split ranks have different keys ("model-row1")."""

    classes: tuple[RankClass, ...]
    groups: Mapping[str, AveragedGroup]
    placements: GridPlacements


@dataclass(frozen=True)
class SimulationOptions:
    """Options of a simulation.

    Attributes:
        progress: mode of progress of messages while kernels run.
        steps: number of simulated steps. Only the last one counts, because earlier ones overlap less with their predecessors.
        slow: factor by which the computation of a rank takes longer, by world rank. If set, each rank is simulated.
    """

    progress: ProgressMode = ProgressMode.TEST
    steps: int = 4
    slow: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SimulatedStep:
    """Result of the last simulated step.

    Attributes:
        seconds: time of the slowest class.
        table: means over ranks, as in the step-time table of a run's trace.
        events: events in the format of a run's trace, by class; times in ns since the beginning of the simulation.
    """

    seconds: float
    table: TimeTable
    events: Mapping[str, Events]

    @property
    def exposed_seconds(self) -> float:
        return self.table.total.exposed_seconds


@dataclass(frozen=True)
class Prediction:
    """Prediction of a candidate on a machine.

    Attributes:
        memory_bytes: maximum memory of a rank.
        exchanged_bytes: bytes per step that all ranks exchange.
        measured_share: share of the compute seconds that comes from measured times; the rest comes from rates.
    """

    step: SimulatedStep
    memory_bytes: int
    exchanged_bytes: int
    measured_share: float
