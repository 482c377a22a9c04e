"""Build the step of a job on all ranks as data, and predict its time, memory and bytes.

Thousands of ranks form a few classes with equal steps. Their tasks follow from the execution plans that a run compiles, from the
order of a training step, and from the averagers' schedules, which are ordered by the times that a run would measure. The
functions are pure: they need no ranks or arrays, and their cost hardly depends on the number of ranks.

`predict` is the entry point of searches, commands and runs: it simulates the program, and counts memory and bytes exactly.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.averaging.base import Strategy
from hpctrain.averaging.collective_schedule import CollectiveSchedule, EventKind, OperationKind
from hpctrain.averaging.group_sums import waiting_sums
from hpctrain.averaging.link_simulation import Times, upper_medians
from hpctrain.averaging.reduce_scatter_strategy import ReduceScatterStrategy
from hpctrain.averaging.slicing import layer_slices
from hpctrain.backend.graph import Graph
from hpctrain.backend.specs import BatchNormSpec, item_bytes, parameter_dtype
from hpctrain.comm.groups import Levels
from hpctrain.comm.link import LinkModel, fitted
from hpctrain.core.intervals import ShardsOfRank, even
from hpctrain.nn.network import ALL, MODEL
from hpctrain.nn.parameter import GroupLayout
from hpctrain.parallel.partition_graph import partition_graph
from hpctrain.parallel.plan_report import message_words
from hpctrain.parallel.rank_graph import LocalGraph, local_graphs, training_plan, whole_graph
from hpctrain.planner.costs.collective_costs import GroupPlacement, grid_placements, stages, unhindered_seconds
from hpctrain.planner.costs.compute_costs import ComputeCosts
from hpctrain.planner.costs.machine import Machine
from hpctrain.planner.job import Candidate, Job
from hpctrain.planner.program.group_schedules import GroupSchedule, GroupStrategy, group_strategies
from hpctrain.planner.program.rank_tasks import StepFacts, product_seconds, rank_tasks
from hpctrain.planner.simulation.simulate import simulate
from hpctrain.planner.simulation.tasks import (
    AveragedGroup,
    BeginExchange,
    Compute,
    EndBackward,
    Happens,
    Merge,
    NeedsParameters,
    Prediction,
    RankClass,
    SimulationOptions,
    StepProgram,
    Task,
)
from hpctrain.training.passes import Passes
from hpctrain.training.weight_watch import AgreedChecksums, alike_positions


@dataclass(frozen=True)
class AlikeRanks:
    """Ranks that do the same work and average the same parameters.

    Attributes:
        first: position of the first rank.
        split_rank: number of the first rank in its split group.
        samples: number of samples of a step on each of the `ranks` ranks.
        micro_batches: graph of each micro-batch or shard of a step.
        additions: number of additions per element of gradients after each graph.
        groups: key of the strategy of each parameter group (`group_keys`).
    """

    first: int
    ranks: int
    split_rank: int
    samples: int
    micro_batches: tuple[LocalGraph, ...]
    additions: tuple[int, ...]
    groups: Mapping[str, str]

    @property
    def name(self) -> str:
        return f"rank {self.first}" if self.ranks == 1 else f"{self.ranks} ranks like {self.first}"


def group_keys(strategies: Sequence[GroupStrategy]) -> list[str]:
    """Return the key of each strategy: the name of its group, followed by its first split rank if the name is not unique."""
    names = Counter(of_group.group for of_group in strategies)
    return [
        of_group.group if names[of_group.group] == 1 else f"{of_group.group}-row{of_group.split_ranks[0]}"
        for of_group in strategies
    ]


def alike_ranks(job: Job, candidate: Candidate, strategies: Sequence[GroupStrategy]) -> list[AlikeRanks]:
    """Return the classes of a candidate's ranks, ordered by their first positions. Every grid has only a few classes."""
    rows = candidate.plan.rows
    groups_of = _groups_of(strategies, rows)
    classes: dict[tuple[object, ...], AlikeRanks] = {}
    for share, additions, column, many in _shares(job, candidate):
        by_micro_batch = list(_graphs(job, candidate, share))
        for row, samples in enumerate(share):
            graphs = tuple(graphs[row] for graphs in by_micro_batch)
            key = samples, graphs, additions, tuple(groups_of[row].items())
            before = classes.get(key)
            first = column * rows + row if before is None else before.first
            split_rank, ranks = (row, many) if before is None else (before.split_rank, before.ranks + many)
            classes[key] = AlikeRanks(first, ranks, split_rank, samples, graphs, additions, groups_of[row])
    return sorted(classes.values(), key=lambda one: one.first)


def _groups_of(strategies: Sequence[GroupStrategy], rows: int) -> list[dict[str, str]]:
    """Return, for each of the `rows` split ranks, the key of the strategy of each parameter group."""
    groups: list[dict[str, str]] = [{} for _ in range(rows)]
    for key, of_group in zip(group_keys(strategies), strategies, strict=True):
        for row in of_group.split_ranks:
            groups[row][of_group.group] = key
    assert all(names.keys() <= {ALL, MODEL} for names in groups)
    return groups


def _shares(job: Job, candidate: Candidate) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int, int]]:
    """Yield the distinct split groups: samples of the ranks, additions after each part, index of the first, number of groups."""
    cols, passes = candidate.plan.cols, job.passes(candidate)
    parts = passes.micro_batches
    additions = [tuple(int(parts > 1) for _ in range(parts))] * cols
    if passes.shards is not None:
        trees = (ShardsOfRank(rank, cols, passes.shards).additions for rank in range(cols))
        additions = [tuple(sum(one.last == place for one in tree) for place in range(parts)) for tree in trees]
    of_groups = list(zip(job.counts(cols), additions, strict=True))
    for (samples, of_parts), many in Counter(of_groups).items():
        yield even(samples, candidate.plan.rows), of_parts, of_groups.index((samples, of_parts)), many


def _graphs(job: Job, candidate: Candidate, share: Sequence[int]) -> Iterator[list[LocalGraph]]:
    """Yield the graphs of a split group's ranks for each micro-batch or shard; those with the same samples share the graphs."""
    known: dict[tuple[int, ...], list[LocalGraph]] = {}
    parts = job.passes(candidate).micro_batches
    sizes = [even(count, parts) for count in share]
    for number in range(parts):
        counts = tuple(size[number] for size in sizes)
        if counts not in known:
            graph = job.graph_of(sum(counts))
            known[counts] = [whole_graph(graph)]
            if candidate.plan.rows > 1:
                known[counts] = local_graphs(partition_graph(graph, candidate.plan, counts), range(len(counts)))
        yield known[counts]


# Number of batches of a data loader: the one that a step reads, and the next one.
_BATCHES = 2


@dataclass(frozen=True)
class RankMemory:
    """Memory of a rank's arrays in training, in bytes, without other memory of the process.

    Attributes:
        activations: arena of a step, including gradients of activations.
        messages: buffers of the split group.
        gradients: gradients of parameters, and their sums over micro-batches or shards.
        averaging: receive buffers of sums.
        state: state of the optimiser and averaged weights, for the elements that the rank owns.
        images: batch of the step and the next batch.
    """

    activations: int
    messages: int
    parameters: int
    gradients: int
    averaging: int
    state: int
    images: int

    @property
    def total(self) -> int:
        return self.activations + self.messages + self.parameters + self.gradients + self.averaging + self.state + self.images


def rank_memory(
    job: Job,
    graphs: Sequence[LocalGraph],
    samples: int,
    sizes: Mapping[str, int],
    schedules: Sequence[CollectiveSchedule | None],
    passes: Passes,
    rank: int,
) -> RankMemory:
    """Return the memory of a rank that computes `samples` samples per step.

    Args:
        graphs: graph of each micro-batch or shard; those of different passes share one arena.
        sizes: number of elements of each parameter that the rank holds.
        rank: number of the rank, whose place among the shards determines how many of its sums wait.
    """
    arenas = [training_plan(local, job.kernels).arena_bytes for local in graphs]
    sums = int(len(graphs) > 1)
    if passes.shards is not None:
        shards = ShardsOfRank(rank, passes.shards // passes.micro_batches, passes.shards)
        sums = 1 + max(waiting_sums(shards).values(), default=-1)
    item, of_parameters = (item_bytes(dtype) for dtype in (job.dtype, parameter_dtype(job.dtype)))
    elements = sum(sizes.values())
    sharded = [
        schedule
        for schedule in schedules
        if schedule is not None and any(operation.kind is OperationKind.ALLGATHER for operation in schedule.operations)
    ]
    owned = sum(_owned(schedule, sizes) for schedule in sharded) if sharded else elements
    arriving = sum(_arriving(schedule, job.batch, samples) for schedule in sharded if schedule.ranks > 1)
    return RankMemory(
        activations=max(sum(arenas[first : first + passes.together]) for first in range(0, len(arenas), passes.together)),
        messages=max(message_words(local) for local in graphs) * item,
        parameters=elements * of_parameters,
        gradients=elements * of_parameters * (1 + sums),
        averaging=arriving * of_parameters,
        state=owned * of_parameters * job.state_arrays,
        images=_BATCHES * samples * math.prod(job.image_shape) * item,
    )


def _owned(schedule: CollectiveSchedule, sizes: Mapping[str, int]) -> int:
    """Return the number of elements that the first rank of a schedule updates, which is the maximum over ranks."""
    replicated = sum(sizes[name] for piece in schedule.slices for name in piece.replicated)
    return replicated + sum(piece.owned_size(0, schedule.ranks) for piece in schedule.slices)


def _arriving(schedule: CollectiveSchedule, batch: int, samples: int) -> int:
    """Return the number of elements of the averaging buffers of a rank with `samples` of a step's `batch` samples.

    The buffers hold the sums of owned parts, exchanged inputs and errors, selected elements, and the residuals or unrounded
    parameters of the owners.
    """
    total = 0
    rounded_parameters = schedule.rounding is not None and schedule.rounding.parameters != "float32"
    for k, piece in enumerate(schedule.slices):
        owned = piece.owned_size(0, schedule.ranks)
        if piece.compression is not None:  # the sum within the node, the residual, and the elements that all nodes send
            pairs = piece.compression.nodes * piece.compression.kept(owned)
            total += owned * (2 if schedule.ranks > piece.copies else 1) + 2 * pairs
            continue
        if not piece.sufficient_factors:
            total += owned * (2 if rounded_parameters else 1)
            continue
        total += samples * piece.units + batch * (owned // piece.unit)
        total += batch * piece.unit if layer_slices(schedule.slices, k)[0] == k else 0
    return total


def times_of(tasks: Sequence[Task], group: str, layout: GroupLayout) -> Times:
    """Return the seconds of computation from the beginning of a step to each event, without waits, as `StepClock` measures them.

    Args:
        group: key of the group's strategy (`group_keys`).
        layout: parameters of the group; parameters that are not announced are ready when backward ends.
    """
    now = 0.0
    names = {segment.parameter for segment in layout.segments if segment.size}
    ready: dict[str, float] = {}
    free: dict[str, float] = {}
    needed: dict[str, float] = {}
    for task in tasks:
        match task:
            case Compute():
                now += task.seconds
            case NeedsParameters() if task.group == group:
                for name in names.intersection(task.parameters):
                    needed.setdefault(name, now)  # in the first micro-batch
            case Happens() if task.group == group and task.event.kind is not EventKind.INPUTS:
                (ready if task.event.kind is EventKind.GRADIENT else free)[task.event.parameter] = now
            case EndBackward():
                break
    for times in (ready, free):
        for name in names:
            times.setdefault(name, now)
    return Times(ready, free, needed, now)


def link_model(machine: Machine, placement: GroupPlacement, levels: Levels | None) -> LinkModel:
    """Return the link that `comm.link` would measure in a group, from a reduce-scatter and an allgather of two sizes."""

    def pair_seconds(elements: int) -> float:
        pair = (OperationKind.REDUCE_SCATTER, OperationKind.ALLGATHER)
        n_bytes = 4 * elements * placement.ranks
        return sum(unhindered_seconds(stages(machine, kind, n_bytes, placement, levels)) for kind in pair)

    return fitted(placement.ranks, pair_seconds)


_HEAD = 6  # number of values in the step's message without batch statistics and checksums
_NUMBER_BYTES = 8


def step_program(job: Job, candidate: Candidate, machine: Machine, costs: ComputeCosts) -> StepProgram:
    """Return one step of a job, with schedules ordered by the times that a run would measure."""
    return _Builder(job, candidate, machine, costs).program()


class _Builder:
    """Builder of the program of one candidate."""

    def __init__(self, job: Job, candidate: Candidate, machine: Machine, costs: ComputeCosts) -> None:
        self._job, self._machine, self._costs, self._passes = job, machine, costs, job.passes(candidate)
        self._placements = grid_placements(machine, candidate.plan.rows, candidate.plan.cols)
        strategies = group_strategies(job, candidate, machine.ranks_per_node)
        self._strategies = dict(zip(group_keys(strategies), strategies, strict=True))
        self._classes = alike_ranks(job, candidate, strategies)
        rows, cols = candidate.plan.rows, candidate.plan.cols
        checks = AgreedChecksums(alike_positions(rows * cols, rows), 0).size
        self._message_bytes = _NUMBER_BYTES * (_HEAD + statistics_size(job.graph_of(1)) + checks)

    def program(self) -> StepProgram:
        facts = [self._facts(alike) for alike in self._classes]
        plans = [[training_plan(local, self._job.kernels) for local in alike.micro_batches] for alike in self._classes]
        together = self._passes.together
        tasks = [
            rank_tasks(of_class, known, self._costs, alike.additions, together)
            for alike, of_class, known in zip(self._classes, plans, facts, strict=True)
        ]
        groups = {key: self._averaged(key, tasks) for key in self._strategies}
        classes = tuple(
            RankClass(
                alike.name,
                alike.ranks,
                alike.split_rank,
                alike.samples,
                of_class,
                {key: self._update_seconds(known, groups[key]) for key in alike.groups.values()},
                product_seconds(of_plans[0], known, self._costs, self._job.batch),
                self._memory(alike, known, groups),
            )
            for alike, known, of_class, of_plans in zip(self._classes, facts, tasks, plans, strict=True)
        )
        return StepProgram(classes, groups, self._placements)

    def _facts(self, alike: AlikeRanks) -> StepFacts:
        groups: dict[str, str] = {}
        sizes: dict[str, int] = {}
        exchanging: dict[str, str] = {}
        accumulated: set[str] = set()
        for key in alike.groups.values():
            strategy = self._strategies[key].strategy
            accumulated.update(strategy.accumulated)
            for segment in strategy.group.layout.segments:
                groups[segment.parameter], sizes[segment.parameter] = key, segment.size
            if isinstance(strategy, ReduceScatterStrategy):
                for weight, biases in strategy.exchanging.items():
                    exchanging |= dict.fromkeys((weight, *biases), weight)
        merging = {ranks: self._placements.of(ranks).ranks for ranks in ("all", "split", "data")}
        return StepFacts(groups, sizes, exchanging, merging, self._message_bytes, accumulated)

    def _update_seconds(self, known: StepFacts, averaged: AveragedGroup) -> float:
        """Return the mean seconds of an element's update, with the squares for norms unless the schedule sends norms."""
        operations = () if averaged.schedule is None else averaged.schedule.operations
        squares = not any(operation.kind is OperationKind.NORMS for operation in operations)
        return self._job.element_seconds(self._costs, sum(known.sizes.values()), squares=squares)

    def _memory(self, alike: AlikeRanks, facts: StepFacts, averaged: Mapping[str, AveragedGroup]) -> int:
        schedules = [averaged[key].schedule for key in alike.groups.values()]
        return rank_memory(self._job, alike.micro_batches, alike.samples, facts.sizes, schedules, self._passes, alike.first).total

    def _averaged(self, key: str, tasks: Sequence[tuple[Task, ...]]) -> AveragedGroup:
        """Return a group with its schedule.

        If a run would reorder the schedule by the times that its ranks measure, the schedule is reordered by predicted times.
        """
        of_group = self._strategies[key]
        placement = self._placements.of("all" if of_group.group == ALL else "data")
        strategy = of_group.strategy
        link = link_model(self._machine, placement, strategy.levels)
        schedule = strategy.plan(link)
        if schedule is not None and isinstance(strategy, ReduceScatterStrategy) and strategy.replans(schedule):
            schedule = strategy.replan(schedule, self._times(key, strategy, tasks), link)
        return AveragedGroup(
            name=of_group.group,
            elements=of_group.planned.layout.size,
            item_bytes=item_bytes(parameter_dtype(self._job.dtype)),
            schedule=schedule,
            placement=placement,
            members=tuple(alike.name for alike in self._classes if key in alike.groups.values()),
            samples=of_group.samples,
            levels=strategy.levels,
            rounding=strategy.rounding,
            shards=self._job.shards,
        )

    def _times(self, key: str, strategy: Strategy, tasks: Sequence[tuple[Task, ...]]) -> Times:
        """Return the upper medians of the times over the ranks of the group, as a run computes them."""
        layout = strategy.group.layout
        names = tuple(segment.parameter for segment in layout.segments if segment.size)
        members = [number for number, alike in enumerate(self._classes) if key in alike.groups.values()]
        measured = np.array([times_of(tasks[number], key, layout).to_array(names) for number in members])
        ranks = [self._classes[number].ranks for number in members]
        return Times.from_array(names, upper_medians(np.repeat(measured, ranks, axis=0)))


def statistics_size(graph: Graph) -> int:
    """Return the number of elements of a model's running statistics: one per channel of each statistic."""
    size = 0
    for node in graph.nodes:
        spec = node.spec
        channels = spec.channels if isinstance(spec, BatchNormSpec) else math.prod(graph.tensors[node.output].shape[-1:])
        size += channels * len(node.statistics)
    return size


def exchanged_bytes(program: StepProgram) -> int:
    """Return the bytes that all ranks send in a step: activations, batch statistics and the averaging of gradients.

    `hpctrain plan show` and the communicators of a run count the same bytes; norms and the step's message are not included.
    """
    return split_bytes(program) + sum(_averaging_bytes(group, program) for group in program.groups.values())


def split_bytes(program: StepProgram) -> int:
    """Return the bytes of activations and batch statistics that all ranks send in a step."""
    total = 0
    for of_class in program.classes:
        exchanges = sum(task.exchange.sent_bytes for task in of_class.tasks if isinstance(task, BeginExchange))
        merges = [task for task in of_class.tasks if isinstance(task, Merge)]
        merged = sum(merge.bytes * (program.placements.of(merge.ranks).ranks - 1) for merge in merges)
        total += of_class.ranks * (exchanges + merged)
    return total


def _averaging_bytes(group: AveragedGroup, program: StepProgram) -> int:
    ranks = sum(of_class.ranks for of_class in program.classes if of_class.name in group.members)
    order = None if group.levels is None else group.levels.order
    sizes = group.placement.ranks, group.elements, group.samples
    averaged = GroupSchedule(group.name, (), *sizes, group.schedule, order, group.rounding, group.shards)
    return sum(averaged.exchanged_bytes(group.item_bytes)) * (ranks // group.placement.ranks)


_USUAL = SimulationOptions()


def predict(
    job: Job, candidate: Candidate, machine: Machine, costs: ComputeCosts, options: SimulationOptions = _USUAL
) -> Prediction:
    """Predict a candidate's step by simulation, the maximum memory of a rank, and the exchanged bytes.

    Raises:
        HpctrainError: the candidate cannot run this job.
    """
    program = step_program(job, candidate, machine, costs)
    memory = max(of_class.memory_bytes for of_class in program.classes)
    return Prediction(simulate(program, machine, options), memory, exchanged_bytes(program), costs.measured_share())
