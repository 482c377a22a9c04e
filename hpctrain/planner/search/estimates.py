"""Estimate lower bounds of the step time for all grids, uses, averagers and micro-batches, without a simulation.

For each grid and averager, the uses of the layers are a shortest path through the network's segments; see `shortest_path`.
`patterns` turns the use of each layer into the few patterns of a plan in a configuration.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from hpctrain.averaging.averagers import AveragerChoice
from hpctrain.backend.specs import item_bytes, parameter_dtype
from hpctrain.core.errors import BackendError
from hpctrain.parallel.layout import Layout
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.rank_graph import training_plan, whole_graph
from hpctrain.planner.costs.compute_costs import ComputeCosts
from hpctrain.planner.costs.machine import Machine
from hpctrain.planner.job import Candidate, Job
from hpctrain.planner.search.averaging_costs import AveragingCosts
from hpctrain.planner.search.layer_costs import SegmentCost, SegmentCosts, kept_bytes, layout_key, segments
from hpctrain.planner.search.search_space import SearchSpace
from hpctrain.planner.search.shortest_path import Costs, Edge, ShortestPath, lower_bound, shortest_paths


def patterns(uses: Mapping[str, Parallelism]) -> tuple[Parallelism, dict[str, Parallelism]]:
    """Return (default, pattern -> use) of a `ParallelPlan` that assigns each layer, by dotted name, its use.

    The patterns are few; general ones come first.
    """
    default = _most_frequent(list(uses.values()))
    rules: dict[str, Parallelism] = {}
    _add(rules, uses, list(uses), (), default)
    return default, rules


def _add(
    rules: dict[str, Parallelism],
    uses: Mapping[str, Parallelism],
    names: Sequence[str],
    prefix: tuple[str, ...],
    inherited: Parallelism,
) -> None:
    """Add rules for the names that begin with `prefix`, whose use by the rules so far is `inherited`."""
    children: dict[str, list[str]] = {}
    for name in names:
        children.setdefault(name.split(".")[len(prefix)], []).append(name)
    for child, members in children.items():
        path = (*prefix, child)
        leaf, below = ".".join(path), [name for name in members if name.count(".") >= len(path)]
        if leaf in members and uses[leaf] is not inherited:
            rules[leaf] = uses[leaf]
        if not below:
            continue
        use = _most_frequent([uses[name] for name in below])
        # A separate rule is used if it replaces several others.
        differing = sum(uses[name] is not inherited for name in below)
        remaining = 1 + sum(uses[name] is not use for name in below)
        if use is not inherited and remaining <= differing:
            rules[f"{leaf}.*"] = use
            _add(rules, uses, below, path, use)
        else:
            _add(rules, uses, below, path, inherited)


def _most_frequent(uses: Sequence[Parallelism]) -> Parallelism:
    if not uses:
        return Parallelism.BATCH
    counted = Counter(uses)
    return max(Parallelism, key=lambda use: counted[use])


#: use of a segment; None: the fixed plan's
SegmentUse = Parallelism | None

_START: Hashable = "images"  # the state before the first segment
# Paths whose bound exceeds the best known step by this factor are not worth a simulation.
_HOPELESS = 1.25
_ALTERNATIVES = 3


@dataclass(frozen=True)
class Estimate:
    """Candidate with a lower bound of its step time and the approximate memory of a rank."""

    candidate: Candidate
    seconds: float
    memory_bytes: float


class GridEstimates:
    """Estimates on one grid with one number of micro-batches.

    Args:
        shape: (Pr, Pc).
        memory_factor: bytes of a step's arena per byte of activations kept for backward.
    """

    def __init__(
        self,
        job: Job,
        machine: Machine,
        costs: ComputeCosts,
        space: SearchSpace,
        shape: tuple[int, int],
        micro_batches: int = 1,
        memory_factor: float = 1.0,
    ) -> None:
        self._job, self._machine, self._costs, self._space = job, machine, costs, space
        self._micro_batches, self._memory_factor = micro_batches, memory_factor
        self._grid = unsplit_plan(space, shape)
        self._parts = job.passes(Candidate(self._grid, micro_batches=micro_batches)).micro_batches
        self._prices = SegmentCosts(job, machine, costs, self._grid, self._parts)
        self._segments = segments(self._prices.graph)
        self._edges = self._priced_edges()
        self._item_bytes = item_bytes(parameter_dtype(job.dtype))
        self._total_bytes = self._item_bytes * sum(math.prod(spec.shape) for spec in job.trained_specs.values())

    def _priced_edges(self) -> dict[tuple[int, Hashable], list[tuple[SegmentUse, SegmentCost]]]:
        """Return a mapping from (segment, input layout) to (use, cost) pairs, without uses that no kernel supports."""
        rows, fixed = self._grid.rows, self._space.fixed_plan is not None
        uses: tuple[SegmentUse, ...] = (None,) if fixed and rows > 1 else self._space.uses_on(rows)
        edges: dict[tuple[int, Hashable], list[tuple[SegmentUse, SegmentCost]]] = {}
        layouts: dict[Hashable, Layout | None] = {_START: None}
        for number in range(len(self._segments)):
            following: dict[Hashable, Layout | None] = {}
            for state, layout in layouts.items():
                priced = edges[number, state] = []
                for use in uses:
                    with suppress(BackendError):  # the kernel set cannot compute a rank's part
                        priced.append((use, self._segment_cost(number, layout, use)))
                following.update({layout_key(cost.output): cost.output for _, cost in priced})
            layouts = following
        return edges

    def _segment_cost(self, number: int, layout: Layout | None, use: SegmentUse) -> SegmentCost:
        if use is not None:
            return self._prices.cost(self._segments[number], layout, lambda name: use)
        assert self._space.fixed_plan is not None
        return self._prices.cost(self._segments[number], layout, self._space.fixed_plan.use_of)

    def best(self, choice: AveragerChoice, incumbent_seconds: float = math.inf) -> list[Estimate]:
        """Return the uses with the lowest bounds for one averager, best first, without uses that exceed the memory of a rank.

        Args:
            incumbent_seconds: step time of a known candidate; uses with a bound far above it are omitted.
        """
        limit = self._machine.memory_bytes

        def order(path: ShortestPath[SegmentUse]) -> tuple[bool, float]:
            too_large = len(path.costs) == 3 and path.costs[2] > limit
            return too_large, choice.costs.step_seconds(*path.costs[:2])

        for with_memory in (False, True):
            paths = sorted(self._paths(choice, incumbent_seconds, with_memory=with_memory), key=order)
            estimates = [self.of_uses(choice, path.choices) for path in paths[:_ALTERNATIVES]]
            fitting = [estimate for estimate in estimates if estimate.memory_bytes <= limit]
            if len(fitting) == len(estimates):  # a plan with less memory would not be faster
                break
        return sorted(fitting, key=lambda estimate: estimate.seconds)[:_ALTERNATIVES]

    def leanest(self, choice: AveragerChoice) -> Estimate:
        """Return the estimate of the uses that need the least memory."""
        paths = self._paths(choice, math.inf, with_memory=True)
        return min((self.of_uses(choice, path.choices) for path in paths), key=lambda one: (one.memory_bytes, one.seconds))

    def of_uses(self, choice: AveragerChoice, uses: Sequence[SegmentUse]) -> Estimate:
        """Return the estimate of the given uses, one per segment."""
        layout: Layout | None = None
        program, wire, memory = self._base_seconds(), 0.0, 0.0
        averaging = self._averaging(choice)
        for number, use in enumerate(uses):
            cost = self._segment_cost(number, layout, use)
            criteria = self._criteria(cost, choice, averaging)
            program, wire, memory = program + criteria[0], wire + criteria[1], memory + criteria[2]
            layout = cost.output
        return Estimate(self._candidate(choice, uses), choice.costs.step_seconds(program, wire), memory)

    def uses_of(self, plan: ParallelPlan) -> list[SegmentUse]:
        """Return the use of each segment under a plan on this grid."""
        fixed = plan.rows > 1 and self._space.fixed_plan is not None
        return [None if fixed else plan.use_of(segment.nodes(self._prices.graph)[0].name) for segment in self._segments]

    def _paths(
        self, choice: AveragerChoice, incumbent_seconds: float, *, with_memory: bool
    ) -> tuple[ShortestPath[SegmentUse], ...]:
        averaging = self._averaging(choice)
        length = 3 if with_memory else 2
        edges: dict[tuple[int, Hashable], list[Edge[SegmentUse, Hashable]]] = {}
        known: dict[int, Costs] = {}  # by identity: equal segments share a cost object, and hashing its values would take longer
        for (number, state), priced in self._edges.items():
            of_state = edges.setdefault((number, state), [])
            for use, cost in priced:
                if id(cost) not in known:
                    known[id(cost)] = self._criteria(cost, choice, averaging)[:length]
                of_state.append(Edge(use, known[id(cost)], layout_key(cost.output)))
        bound = lower_bound(edges, len(self._segments), length)
        base = self._base_seconds()

        def hopeless(layer: int, costs: Costs) -> bool:
            program, wire, *memory = bound(layer, costs)
            if memory and memory[0] > self._machine.memory_bytes and incumbent_seconds < math.inf:
                return True
            return choice.costs.step_seconds(base + program, wire) > _HOPELESS * incumbent_seconds

        return shortest_paths(len(self._segments), _START, lambda number, state: edges[number, state], hopeless=hopeless)

    def _averaging(self, choice: AveragerChoice) -> AveragingCosts:
        return AveragingCosts(
            self._machine,
            self._job.element_seconds(self._costs, 1 << 20, squares=True),
            self._prices.placements,
            choice,
            total_bytes=self._total_bytes,
            batch=self._job.batch,
            item_bytes=self._item_bytes,
            exchange=self._parts == 1 and self._job.shards is None,
        )

    def _criteria(self, cost: SegmentCost, choice: AveragerChoice, averaging: AveragingCosts) -> tuple[float, float, float]:
        """Return (seconds of the program, seconds of the averaging's messages, bytes) of a segment."""
        whole, split = averaging.seconds(cost.whole, split=False), averaging.seconds(cost.split, split=True)
        seconds = whole + split
        memory = self._memory_factor * cost.memory_bytes
        for parts, ranks in ((cost.whole, self._grid.rows * self._grid.cols), (cost.split, self._grid.cols)):
            owners = ranks if choice.costs.owners_update else 1
            # parameters, their gradients, and the optimiser's state of the part that a rank updates
            memory += parts.elements * self._item_bytes * (2 + self._job.state_arrays / owners)
        return cost.seconds + seconds.program, seconds.wire, memory

    def _base_seconds(self) -> float:
        """Return the seconds of a step outside operators and averaging."""
        graph = self._prices.graph
        return self._costs.step_seconds(graph.tensors[0].bytes // self._grid.rows, len(graph.nodes))

    def _candidate(self, choice: AveragerChoice, uses: Sequence[SegmentUse]) -> Candidate:
        plan = self._grid
        if plan.rows > 1 and self._space.fixed_plan is None:
            by_name: dict[str, Parallelism] = {}
            for segment, use in zip(self._segments, uses, strict=True):
                assert use is not None
                by_name.update(dict.fromkeys((node.name for node in segment.nodes(self._prices.graph)), use))
            default, rules = patterns(by_name)
            plan = replace(plan, default=default, use=rules)
        return Candidate(plan, choice, self._micro_batches)


def unsplit_plan(space: SearchSpace, shape: tuple[int, int]) -> ParallelPlan:
    """Return a plan on a grid of `shape`. If the grid splits layers, the plan has the fixed uses and tiles of the space."""
    rows, cols = shape
    if rows == 1:
        return ParallelPlan(rows, cols)
    if space.fixed_plan is None:
        return ParallelPlan(rows, cols, tiles=space.tiles)
    return replace(space.fixed_plan, rows=rows, cols=cols)


def memory_factor(job: Job, ranks: int) -> float:
    """Return the bytes of the arena per byte of activations kept for backward, for pure data parallelism on `ranks` ranks."""
    plan = training_plan(whole_graph(job.graph_of(-(-job.batch // ranks))), job.kernels)
    return plan.arena_bytes / max(1, kept_bytes(plan.steps))
