"""Describe a step as data: the tasks of each class of ranks in program order, and the result of their simulation.

Ranks with equal steps form a class. The order of tasks is that of the execution plan and of the training step, so that a
simulation posts, waits and polls at the same places as a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpctrain.averaging.collective_schedule import CollectiveSchedule, LocalEventKey
from hpctrain.averaging.sixteen_bits import Rounding
from hpctrain.comm.groups import Levels
from hpctrain.comm.progress_mode import ProgressMode
from hpctrain.trace.time_table import TimeTable
from hpctrain.trace.tracer import Category, Events


@dataclass(frozen=True)
class Compute:
    """Uninterrupted work of the program, with its name and category in traces. A poll follows if `polls`."""

    row: str
    category: Category
    seconds: float
    polls: bool = True


@dataclass(frozen=True)
class Happens:
    """An event on which operations of a group's schedule depend. A poll follows, except after LAST_READ."""

    group: str
    event: LocalEventKey


@dataclass(frozen=True)
class NeedsParameters:
    """A layer reads parameters: the rank waits until the previous step has updated them, and performs their late updates."""

    group: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Exchange:
    """An all-to-all of the split group. sent_bytes, received_bytes: of this rank. peers: number of its partners."""

    purpose: str
    sent_bytes: int
    received_bytes: int
    peers: int


@dataclass(frozen=True)
class BeginExchange:
    """The post of an exchange. number: counted over the step, equal on all ranks of the split group."""

    number: int
    exchange: Exchange


@dataclass(frozen=True)
class EndExchange:
    """The wait until the exchange with this number is complete."""

    number: int


@dataclass(frozen=True)
class Merge:
    """The merge of batch statistics: an allgather of `bytes` from each rank of a group, and the wait for it.

    ranks: "all", "data" or "split", as `BatchNormSpec.merge` names them.
    """

    purpose: str
    ranks: str
    bytes: int


@dataclass(frozen=True)
class EndBackward:
    """The end of backward, when all gradients are announced. Averagers send, or wait for, all deferred operations."""


@dataclass(frozen=True)
class StepMessage:
    """The small message of a step: the rank waits for its previous message, then posts this one to all ranks."""

    bytes: int


Task = Compute | Happens | NeedsParameters | BeginExchange | EndExchange | Merge | EndBackward | StepMessage


@dataclass(frozen=True)
class GroupPlacement:
    """The placement of a group's ranks on nodes.

    Attributes:
        ranks: number of ranks of the group.
        nodes: number of nodes with ranks of the group.
        per_node: maximum number of ranks of the group on one node.
        alike: number of groups of this kind with ranks on the same node, this one included; they use its links at the same time.
    """

    ranks: int
    nodes: int
    per_node: int
    alike: int = 1


@dataclass(frozen=True)
class GridPlacements:
    """Placements on a grid of Pr x Pc.

    Attributes:
        all_ranks: placement of the whole grid.
        split: placement of the Pr ranks that share samples.
        data: placement of the Pc ranks with the same weights.
    """

    all_ranks: GroupPlacement
    split: GroupPlacement
    data: GroupPlacement

    def of(self, ranks: str) -> GroupPlacement:
        """Return the placement of "all", "split" or "data", as `BatchNormSpec.merge` names groups."""
        return {"all": self.all_ranks, "split": self.split, "data": self.data}[ranks]


@dataclass(frozen=True)
class RankClass:
    """Ranks with equal steps.

    Attributes:
        ranks: number of ranks.
        split_rank: r of the first rank.
        samples: samples of a rank.
        tasks: tasks of one step.
        update_seconds: by group, seconds to update one owned element.
        product_seconds: by weight of a layer that exchanges inputs and errors, seconds to compute one owned element of its
            gradient before the update.
        memory_bytes: maximum memory of a rank of the class.
    """

    name: str
    ranks: int
    split_rank: int
    samples: int
    tasks: tuple[Task, ...]
    update_seconds: Mapping[str, float] = field(default_factory=dict)
    product_seconds: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: int = 0


@dataclass(frozen=True)
class AveragedGroup:
    """A parameter group that classes of ranks average together.

    Attributes:
        schedule: None for blocking averaging: one allreduce of `elements` after backward, waited for.
        members: names of the classes with ranks in one such group.
        samples: samples of the step, by rank of the group.
        levels: levels in which sums are made; None: one level.
        rounding: rounding of its messages; None: they are whole.
    """

    name: str
    elements: int
    item_bytes: int
    schedule: CollectiveSchedule | None
    placement: GroupPlacement
    members: tuple[str, ...]
    samples: tuple[int, ...]
    levels: Levels | None = None
    rounding: Rounding | None = None


@dataclass(frozen=True)
class StepProgram:
    """One step of a job on all ranks.

    Attributes:
        groups: by key; those of different split ranks have different keys ("model-row1").
        placements: placements of the groups of messages, exchanges and merged statistics.
    """

    classes: tuple[RankClass, ...]
    groups: Mapping[str, AveragedGroup]
    placements: GridPlacements


@dataclass(frozen=True)
class SimulationOptions:
    """Options of a simulation.

    Attributes:
        progress: how messages progress while kernels run.
        steps: number of simulated steps; the last one counts, when all pipelines are full.
        slow: by world rank, the factor by which its computation takes longer.
        jitter: relative deviation of operator times, drawn from `seed`. Slow ranks and jitter unfold the classes of ranks.
    """

    progress: ProgressMode = ProgressMode.TEST
    steps: int = 4
    slow: Mapping[int, float] = field(default_factory=dict)
    jitter: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class SimulatedStep:
    """The last simulated step.

    Attributes:
        seconds: time of the slowest class.
        table: means over ranks, as runs tabulate their traces.
        events: by class, in the format of traced runs, with times in ns since the begin of the simulation.
    """

    seconds: float
    table: TimeTable
    events: Mapping[str, Events]

    @property
    def exposed_seconds(self) -> float:
        return self.table.total.exposed_seconds


@dataclass(frozen=True)
class Prediction:
    """The prediction of a candidate on a machine.

    Attributes:
        memory_bytes: maximum memory of a rank.
        exchanged_bytes: bytes of a step, over all ranks.
        measured_share: share of the compute seconds that comes from measured times; the rest comes from rates.
    """

    step: SimulatedStep
    memory_bytes: int
    exchanged_bytes: int
    measured_share: float
