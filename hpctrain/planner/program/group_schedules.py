"""Plan the averaging of a job's gradients as data: strategy, ranks and schedule of each parameter group.

The schedules determine the bytes that ranks exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add

import numpy as np

from hpctrain.averaging.base import PlannedGroup, Strategy
from hpctrain.averaging.collective_schedule import CollectiveSchedule, OperationKind
from hpctrain.averaging.sixteen_bits import Rounding
from hpctrain.averaging.slicing import Slice
from hpctrain.backend.specs import parameter_dtype
from hpctrain.comm.link import LinkModel
from hpctrain.core.intervals import Interval, ShardsOfRank
from hpctrain.data.sampler import counts as counts_over
from hpctrain.nn.network import ALL, MODEL, Shard, local_spec
from hpctrain.nn.parameter import GroupLayout, ParameterSpec
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.parallel.partition_graph import partition_graph
from hpctrain.planner.job import Candidate, Job

_SUMS = (OperationKind.REDUCE_SCATTER, OperationKind.ALLREDUCE)


@dataclass(frozen=True)
class GroupSchedule:
    """Operations that the averager of one parameter group posts.

    Attributes:
        split_ranks: ranks of a split group whose averagers post these operations.
        ranks: number of ranks of the group.
        elements: number of elements of the group's gradients on one rank.
        samples: samples of the step, by rank of the group.
        schedule: the schedule; None for a strategy without one, which posts one allreduce of all gradients after backward.
        order: ranks of the group in the order of the schedule; None: by rank.
        shards: number of shards whose sums have a fixed order; None: one sum per rank.
    """

    group: str
    split_ranks: tuple[int, ...]
    ranks: int
    elements: int
    samples: tuple[int, ...]
    schedule: CollectiveSchedule | None
    order: tuple[int, ...] | None = None
    rounding: Rounding | None = None  # of the messages; None: no rounding
    shards: int | None = None

    @property
    def exchanged(self) -> tuple[int, ...]:
        """Number of elements that each rank of the group exchanges in a step; an element with its position counts as two."""
        if self.schedule is None:
            of_one_sum = tuple(2 * (self.elements - share) for share in counts_over(self.elements, self.ranks))
        else:
            of_one_sum = _by_rank(self.schedule.exchanged_by_rank(self._samples_in_order), self.order)
        return tuple(map(add, of_one_sum, self._further_sums()))

    def exchanged_bytes(self, item_bytes: int) -> tuple[int, ...]:
        """Return the bytes that each rank of the group exchanges in a step."""
        if self.schedule is None:
            full = tuple(item_bytes * count for count in self.exchanged)
            if self.rounding is None:
                return full
            saved = self.rounding.saved_by_allreduce(self.elements, self.ranks, item_bytes)
            return tuple(n_bytes - int(less) for n_bytes, less in zip(full, saved, strict=True))
        of_one_sum = _by_rank(self.schedule.exchanged_bytes_by_rank(self._samples_in_order, item_bytes), self.order)
        return tuple(n_bytes + item_bytes * count for n_bytes, count in zip(of_one_sum, self._further_sums(), strict=True))

    @property
    def _samples_in_order(self) -> Sequence[int]:
        return self.samples if self.order is None else [self.samples[rank] for rank in self.order]

    def _further_sums(self) -> Iterable[int]:
        """Return, by rank, the number of elements of the sums that a rank sends in addition to its first one.

        A rank whose shards have no common node in the tree of the sums sends several sums.
        """
        if self.shards is None or self.ranks == 1:
            return (0,) * self.ranks
        slices = () if self.schedule is None else self.schedule.slices
        summed = () if self.schedule is None else self.schedule.operations
        parts = [slices[one.slice].counts(self.ranks) for one in summed if one.kind in _SUMS]
        parts = parts or [counts_over(self.elements, self.ranks)]
        others = [sum(map(sum, parts)) - owned for owned in map(sum, zip(*parts, strict=True))]
        sums = ShardsOfRank(0, self.ranks, self.shards).sums_of_ranks
        return ((number - 1) * count for number, count in zip(sums, others, strict=True))

    def owned(self, piece: Slice) -> tuple[int, ...]:
        """Return the number of elements of a slice that each rank of the group owns."""
        return _by_rank([piece.owned_size(rank, self.ranks) for rank in range(self.ranks)], self.order)


@dataclass(frozen=True)
class GroupStrategy:
    """Strategy of a parameter group on ranks that hold equal parts.

    Attributes:
        split_ranks: ranks of a split group that use the strategy.
    """

    group: str
    split_ranks: tuple[int, ...]
    strategy: Strategy
    samples: tuple[int, ...]  # samples of the step, by rank of the group

    @property
    def planned(self) -> PlannedGroup:
        return self.strategy.group

    def schedule(self, link: LinkModel) -> GroupSchedule:
        """Return the schedule of the first steps over a link."""
        levels, planned = self.strategy.levels, self.planned
        order = None if levels is None else levels.order
        schedule = self.strategy.plan(link)
        elements, rounding = planned.layout.size, self.strategy.rounding
        return GroupSchedule(
            self.group, self.split_ranks, planned.ranks, elements, self.samples, schedule, order, rounding, planned.shards
        )


def group_schedules(
    job: Job, candidate: Candidate, link: LinkModel, ranks_per_node: int | None = None
) -> tuple[GroupSchedule, ...]:
    """Return the schedules of all averagers' first steps over a link, computed from sizes only.

    Args:
        ranks_per_node: number of ranks per node; None: all ranks on one node.
    """
    ranks_of: dict[GroupSchedule, list[int]] = {}  # equal schedules are listed once, with all split ranks that post them
    for of_group in group_strategies(job, candidate, ranks_per_node):
        schedule = replace(of_group.schedule(link), split_ranks=())
        ranks_of.setdefault(schedule, []).extend(of_group.split_ranks)
    schedules = (replace(schedule, split_ranks=tuple(sorted(ranks))) for schedule, ranks in ranks_of.items())
    return tuple(sorted(schedules, key=lambda schedule: (schedule.group, schedule.split_ranks)))


def group_strategies(job: Job, candidate: Candidate, ranks_per_node: int | None = None) -> tuple[GroupStrategy, ...]:
    """Return the strategies of all parameter groups.

    Ranks of a split group share a strategy if their parts have equal sizes and their groups have the same placement on nodes.

    Raises:
        ConfigError: the averager cannot run this job.
    """
    plan, counts = candidate.plan, job.counts(candidate.ranks, candidate.plan.rows)
    strategies: list[GroupStrategy] = []
    for kind in _kinds(job, candidate.plan):
        several_groups = any(interval is not None for interval in kind.intervals)
        for name, layout in kind.layouts(job).items():
            if name == ALL and strategies and strategies[0].group == ALL:
                continue  # all ranks hold the same unsplit parameters
            for split_ranks, nodes in _places(name, plan, kind.split_ranks, ranks_per_node):
                group = PlannedGroup(
                    layout,
                    len(nodes),
                    nodes,
                    job.batch,
                    job.passes(candidate).micro_batches,
                    norms_needed=job.norms_needed,
                    several_groups=several_groups,
                    momentum=job.momentum,
                    names=tuple(job.trained_specs),
                    on_host=job.kernels.arithmetic.on_host,
                    shards=job.shards,
                )
                by_split_group = tuple(sum(counts[first : first + plan.rows]) for first in range(0, len(counts), plan.rows))
                samples = counts if name == ALL else by_split_group
                strategy = candidate.averager.strategy(group)
                strategies.append(GroupStrategy(name, split_ranks, strategy, samples))
    return tuple(strategies)


def averaging_bytes(schedules: Sequence[GroupSchedule], split_size: int, ranks: int, item_bytes: int) -> tuple[int, ...]:
    """Return the bytes that each position exchanges in a step to average gradients, without norms.

    Args:
        split_size: number of ranks of a split group, Pr.
    """
    total = np.zeros((ranks // split_size, split_size), np.int64)  # (c, r)
    for schedule in schedules:
        bytes_by_rank = np.array(schedule.exchanged_bytes(item_bytes), np.int64)
        if schedule.group == ALL:
            total += bytes_by_rank.reshape(total.shape)
        else:
            total[:, list(schedule.split_ranks)] += bytes_by_rank[:, None]
    return tuple(total.reshape(-1).tolist())


@dataclass(frozen=True)
class _Kind:
    """Ranks of a split group whose parts of split parameters have equal sizes.

    Attributes:
        shards: parts of the first of these ranks, by parameter.
        intervals: interval of the first of these ranks in each parameter; None: not split.
    """

    split_ranks: tuple[int, ...]
    shards: Mapping[str, Shard]
    intervals: tuple[Interval | None, ...]

    def layouts(self, job: Job) -> dict[str, GroupLayout]:
        """Return the parameter groups of a rank of this kind, by name."""
        members: dict[str, dict[str, ParameterSpec]] = {}
        for name, spec in job.trained_specs.items():
            shard = self.shards.get(name)
            members.setdefault(ALL if shard is None else MODEL, {})[name] = local_spec(spec, shard)
        orders = {name: order for order, name in enumerate(job.specs)}
        dtype = parameter_dtype(job.dtype)
        return {name: GroupLayout(inside, dtype, orders=orders) for name, inside in members.items()}


def _kinds(job: Job, plan: ParallelPlan) -> list[_Kind]:
    # Shards depend only on the plan and the layers, so the numbers of samples are arbitrary.
    samples = (1, *(0,) * (plan.rows - 1))
    partitioned = None if plan.rows == 1 else partition_graph(job.graph_of(1), plan, samples)
    intervals = {} if partitioned is None else partitioned.shards()
    split = [intervals.get(name) for name in job.specs]
    ranks_of: dict[tuple[int | None, ...], list[int]] = {}
    for rank in range(plan.rows):
        sizes = tuple(None if of_ranks is None else of_ranks[rank][1] - of_ranks[rank][0] for of_ranks in split)
        ranks_of.setdefault(sizes, []).append(rank)
    kinds = []
    for ranks in ranks_of.values():
        parts = tuple(None if of_ranks is None else of_ranks[ranks[0]] for of_ranks in split)
        shards = {} if partitioned is None else partitioned.shards_of(ranks[0])
        kinds.append(_Kind(tuple(ranks), shards, parts))
    return kinds


def _places(
    group: str, plan: ParallelPlan, split_ranks: Sequence[int], ranks_per_node: int | None
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (split ranks, node of each rank of their group) for each placement of the group.

    Nodes contain consecutive ranks and are numbered in the order of the group's ranks.
    """
    per_node = ranks_per_node or plan.rows * plan.cols
    if group == ALL:
        yield tuple(range(plan.rows)), tuple(position // per_node for position in range(plan.rows * plan.cols))
        return
    alike: dict[tuple[int, ...], list[int]] = {}
    for split_rank in split_ranks:
        numbers: dict[int, int] = {}
        nodes = ((column * plan.rows + split_rank) // per_node for column in range(plan.cols))
        alike.setdefault(tuple(numbers.setdefault(node, len(numbers)) for node in nodes), []).append(split_rank)
    for nodes_of_group, ranks in alike.items():
        yield tuple(ranks), nodes_of_group


def _by_rank(by_place: Sequence[int], order: Sequence[int] | None) -> tuple[int, ...]:
    """Reorder numbers from the order of a schedule to rank order."""
    if order is None:
        return tuple(by_place)
    numbers = dict(zip(order, by_place, strict=True))
    return tuple(numbers[rank] for rank in range(len(order)))
