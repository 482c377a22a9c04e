"""Describe a step as data: the tasks of each class of ranks in the order of the program, and the result of simulating them.

Ranks whose steps are alike form a class. The order of tasks is that of the execution plan and of the training step, so that a
simulation posts, waits and polls where a run does.
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
    """Work of the program that nothing interrupts, under its name and category in traces. A poll follows where `polls`."""

    row: str
    category: Category
    seconds: float
    polls: bool = True


@dataclass(frozen=True)
class Happens:
    """An event that operations of a group's schedule come after; a poll follows, unless it is a LAST_READ."""

    group: str
    event: LocalEventKey


@dataclass(frozen=True)
class NeedsParameters:
    """A layer reads parameters: a wait until they hold what the previous step made of them, and its late updates."""

    group: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Exchange:
    """An all-to-all of the split group. sent_bytes, received_bytes: of this rank. peers: ranks that it exchanges with."""

    purpose: str
    sent_bytes: int
    received_bytes: int
    peers: int


@dataclass(frozen=True)
class BeginExchange:
    """An exchange is posted. number: counted over the step, the same on all ranks of the split group."""

    number: int
    exchange: Exchange


@dataclass(frozen=True)
class EndExchange:
    """A wait until the exchange of that number is complete."""

    number: int


@dataclass(frozen=True)
class Merge:
    """Batch statistics that are merged at once: an allgather of `bytes` from each rank of a group, waited for.

    ranks: "all", "data" or "split", as `BatchNormSpec.merge` names them.
    """

    purpose: str
    ranks: str
    bytes: int


@dataclass(frozen=True)
class EndBackward:
    """All gradients are announced: averagers send or wait for what they hold back until here."""


@dataclass(frozen=True)
class StepMessage:
    """The step's small message: a wait for the one of the step before, then this one is posted to all ranks."""

    bytes: int


Task = Compute | Happens | NeedsParameters | BeginExchange | EndExchange | Merge | EndBackward | StepMessage


@dataclass(frozen=True)
class GroupPlacement:
    """The places of a group's ranks. ranks: of the group; they lie on `nodes` nodes, at most `per_node` on each.

    alike: groups of this kind with ranks on the same node, this one included: they use its links at the same time.
    """

    ranks: int
    nodes: int
    per_node: int
    alike: int = 1


@dataclass(frozen=True)
class RankClass:
    """Ranks whose steps are alike. ranks: how many. split_rank: r of the first of them. samples: of a rank.

    tasks: of one step. update_seconds: by group, seconds to update one element that is owned.
    product_seconds: by weight of a layer that exchanges inputs and errors, seconds to make one element of its gradient that is
    owned, before the update. memory_bytes: the most that a rank of the class holds.
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

    schedule: None for blocking averaging: one allreduce of `elements` after backward, waited for.
    members: names of the classes with ranks in one such group. order_in_levels: as `GroupSchedule.order`; None: in one level.
    samples: of the step, by rank of the group. rounding: of its messages; None: they travel as they are.
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
    """One step of a job on all ranks. groups: by key; those of different split ranks have keys of their own ("model-row1").

    all_ranks, split, data: the placements of the groups that messages, exchanges and merged statistics travel in.
    """

    classes: tuple[RankClass, ...]
    groups: Mapping[str, AveragedGroup]
    all_ranks: GroupPlacement
    split: GroupPlacement
    data: GroupPlacement


@dataclass(frozen=True)
class SimulationOptions:
    """progress: who moves messages while kernels run. steps: simulated ones; the last one counts, when all pipelines are full.

    slow: by world rank, how many times longer its compute takes. jitter: deviation of an operator's time, as a share of it, drawn
    from `seed`. Both unfold the classes of ranks.
    """

    progress: ProgressMode = ProgressMode.TEST
    steps: int = 4
    slow: Mapping[int, float] = field(default_factory=dict)
    jitter: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class SimulatedStep:
    """The last simulated step. seconds: of the slowest class. table: means over ranks, as runs tabulate their traces.

    events: by class, in the format that runs record, times in ns since the simulation's begin.
    """

    seconds: float
    table: TimeTable
    events: Mapping[str, Events]

    @property
    def exposed_seconds(self) -> float:
        return self.table.total.exposed_seconds


@dataclass(frozen=True)
class Prediction:
    """A candidate on a machine. memory_bytes: the most of any rank. exchanged_bytes: of a step, over all ranks.

    measured_share: of the compute seconds, how much follows from measured times rather than from rates.
    """

    step: SimulatedStep
    memory_bytes: int
    exchanged_bytes: int
    measured_share: float
