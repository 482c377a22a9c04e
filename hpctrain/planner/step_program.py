"""A step of a job on all ranks, as data: each class of ranks with its tasks, and the groups that average parameters.

The tasks follow the execution plans that a run compiles, the training step and the averagers' schedules; the seconds are those of
the costs. Pure: no rank, no array, and the work does not grow with the ranks beyond a few numbers for each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.averaging.collective_schedule import CollectiveSchedule
from hpctrain.averaging.step_times import Times, upper_medians
from hpctrain.averaging.reduce_scatter_strategy import ReduceScatterStrategy
from hpctrain.averaging.strategy import Strategy
from hpctrain.backend.dtypes import item_bytes, parameter_dtype
from hpctrain.backend.graph import Graph
from hpctrain.backend.specs import BatchNormSpec
from hpctrain.nn.network import ALL
from hpctrain.parallel.local_graph import training_plan
from hpctrain.planner import placements
from hpctrain.planner.compute_costs_rest import ComputeCosts
from hpctrain.planner.group_schedules import GroupStrategy, group_strategies
from hpctrain.planner.job import Candidate, Job
from hpctrain.planner.machine import Machine
from hpctrain.planner.measured_times import link_model, times_of
from hpctrain.planner.rank_classes import AlikeRanks, alike_ranks, group_keys
from hpctrain.planner.rank_memory import rank_memory
from hpctrain.planner.rank_tasks import StepFacts, product_seconds, rank_tasks
from hpctrain.planner.tasks import AveragedGroup, GroupPlacement, RankClass, StepProgram, Task

_HEAD = 6  # numbers of the step's message in front of the batch statistics
_NUMBER_BYTES = 8


def step_program(job: Job, candidate: Candidate, machine: Machine, costs: ComputeCosts) -> StepProgram:
    """One step of a job, once schedules are what measured times make of them.

    Raises:
        HpctrainError: an averager or a layer that a run would refuse.
    """
    return _Builder(job, candidate, machine, costs).program()


@dataclass(frozen=True)
class _Averaging:
    """A parameter group's averaging. schedule: the settled one."""

    key: str
    of_group: GroupStrategy
    schedule: CollectiveSchedule | None
    placement: GroupPlacement

    @property
    def strategy(self) -> Strategy:
        return self.of_group.strategy


class _Builder:
    """Makes the program of one candidate."""

    def __init__(self, job: Job, candidate: Candidate, machine: Machine, costs: ComputeCosts) -> None:
        self._job, self._machine, self._costs = job, machine, costs
        rows, cols = candidate.plan.rows, candidate.plan.cols
        self._all = placements.all_ranks(machine, rows * cols)
        self._split = placements.split_groups(machine, rows, cols)
        self._data = placements.data_groups(machine, rows, cols)
        strategies = group_strategies(job, candidate, machine.ranks_per_node)
        self._strategies = dict(zip(group_keys(strategies), strategies, strict=True))
        self._classes = alike_ranks(job, candidate, strategies)
        self._message_bytes = _NUMBER_BYTES * (_HEAD + statistics_size(job.graph_of(1)))

    def program(self) -> StepProgram:
        facts = [self._facts(alike) for alike in self._classes]
        tasks = [self._tasks(alike, known) for alike, known in zip(self._classes, facts, strict=True)]
        averaged = {key: self._averaging(key, tasks) for key in self._strategies}
        classes = tuple(
            RankClass(
                alike.name,
                alike.ranks,
                alike.split_rank,
                alike.samples,
                of_class,
                dict.fromkeys(alike.groups.values(), self._update_seconds(known)),
                self._products(alike, known),
                self._memory(alike, known, averaged),
            )
            for alike, known, of_class in zip(self._classes, facts, tasks, strict=True)
        )
        groups = {key: self._group(averaging) for key, averaging in averaged.items()}
        return StepProgram(classes, groups, self._all, self._split, self._data)

    def _facts(self, alike: AlikeRanks) -> StepFacts:
        groups: dict[str, str] = {}
        sizes: dict[str, int] = {}
        exchanging: dict[str, str] = {}
        for key in alike.groups.values():
            strategy = self._strategies[key].strategy
            for segment in strategy.group.layout.segments:
                groups[segment.parameter], sizes[segment.parameter] = key, segment.size
            if isinstance(strategy, ReduceScatterStrategy):
                for weight, biases in strategy.exchanging.items():
                    exchanging |= dict.fromkeys((weight, *biases), weight)
        merging = {"all": self._all.ranks, "split": self._split.ranks, "data": self._data.ranks}
        return StepFacts(groups, sizes, exchanging, merging, self._message_bytes)

    def _tasks(self, alike: AlikeRanks, facts: StepFacts) -> tuple[Task, ...]:
        plans = [training_plan(local, self._job.kernels) for local in alike.micro_batches]
        return rank_tasks(plans, facts, self._costs)

    def _products(self, alike: AlikeRanks, facts: StepFacts) -> Mapping[str, float]:
        if not facts.exchanging:
            return {}
        return product_seconds(training_plan(alike.micro_batches[0], self._job.kernels), facts, self._costs, self._job.batch)

    def _update_seconds(self, known: StepFacts) -> float:
        """Seconds of an element's update, among as many as the rank holds: caches hold the state of small networks only."""
        elements = max(1, sum(known.sizes.values()))
        return self._costs.update_seconds(elements) / elements

    def _memory(self, alike: AlikeRanks, facts: StepFacts, averaged: Mapping[str, _Averaging]) -> int:
        schedules = [averaged[key].schedule for key in alike.groups.values()]
        return rank_memory(self._job, alike.micro_batches, alike.samples, facts.sizes, schedules).total

    def _averaging(self, key: str, tasks: Sequence[tuple[Task, ...]]) -> _Averaging:
        """The schedule of the first steps, put into the order that the group's ranks measure, where a run does so."""
        of_group = self._strategies[key]
        placement = self._all if of_group.group == ALL else self._data
        strategy = of_group.strategy
        link = link_model(self._machine, placement, strategy.levels)
        schedule = strategy.plan(link)
        if schedule is not None and isinstance(strategy, ReduceScatterStrategy) and strategy.replans(schedule):
            schedule = strategy.replan(schedule, self._times(key, strategy, tasks), link)
        return _Averaging(key, of_group, schedule, placement)

    def _times(self, key: str, strategy: Strategy, tasks: Sequence[tuple[Task, ...]]) -> Times:
        """Those of a typical rank of the group, as a run takes them."""
        layout = strategy.group.layout
        names = tuple(segment.parameter for segment in layout.segments if segment.size)
        members = [number for number, alike in enumerate(self._classes) if key in alike.groups.values()]
        measured = np.array([times_of(tasks[number], key, layout).to_array(names) for number in members])
        ranks = [self._classes[number].ranks for number in members]
        return Times.from_array(names, upper_medians(np.repeat(measured, ranks, axis=0)))

    def _group(self, averaging: _Averaging) -> AveragedGroup:
        layout = averaging.of_group.planned.layout
        members = tuple(alike.name for alike in self._classes if averaging.key in alike.groups.values())
        return AveragedGroup(
            name=averaging.of_group.group,
            elements=layout.size,
            item_bytes=item_bytes(parameter_dtype(self._job.dtype)),
            schedule=averaging.schedule,
            placement=averaging.placement,
            members=members,
            samples=averaging.of_group.samples,
            levels=averaging.strategy.levels,
            rounding=averaging.strategy.rounding,
        )


def statistics_size(graph: Graph) -> int:
    """Elements of the running statistics of a whole model: one per channel of each."""
    size = 0
    for node in graph.nodes:
        spec = node.spec
        channels = spec.channels if isinstance(spec, BatchNormSpec) else math.prod(graph.tensors[node.output].shape[-1:])
        size += channels * len(node.statistics)
    return size
