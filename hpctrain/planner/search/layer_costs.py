"""Cut a network into segments, and compute the seconds and memory of a segment on a grid for one use of its layers.

A segment is a part of a graph whose layers have the same use. A chain is cut before each layer with weights; the following layers
without weights (batch norm, ReLU, pooling) belong to its segment. A residual block is one segment, because a cut needs a point
with a single tensor. Layouts follow the sharding rules. Operators are priced on the blocks of one rank. With three or more ranks,
this rank has two neighbours. No plan is compiled and no schedule is made, so pricing a segment takes milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpctrain.backend.graph import Graph, GraphBuilder, Node
from hpctrain.backend.specs import BatchNormSpec, Conv2dSpec, LinearSpec, TensorSpec
from hpctrain.core.intervals import shape_of
from hpctrain.nn.compile.plan import Action, PlannedStep
from hpctrain.nn.compile.steps import Steps, make_steps
from hpctrain.parallel import layout
from hpctrain.parallel.layout import Layout
from hpctrain.parallel.moves import RedistributeSpec, ReduceScatterSpec, SplitGroup, transfer, unused_group
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.plan_report import STATISTIC_BYTES
from hpctrain.parallel.rank_graph import shared_operators
from hpctrain.parallel.sharding_rules import OperatorSharding, SplitContext, shard
from hpctrain.planner.costs.collective_costs import grid_placements, stages, unhindered_seconds
from hpctrain.planner.costs.compute_costs import ComputeCosts
from hpctrain.planner.costs.machine import Machine
from hpctrain.planner.costs.operator_work import is_move
from hpctrain.planner.job import Job
from hpctrain.planner.search.averaging_costs import AveragedParts, LinearSize


@dataclass(frozen=True)
class NetworkSegment:
    """Nodes [start, stop) of a graph. They read no outer tensor but `source`, and later nodes read no inner one but `output`."""

    start: int
    stop: int
    source: int
    output: int

    def nodes(self, graph: Graph) -> tuple[Node, ...]:
        """Return the nodes in `graph`, the segment's graph or a graph of the same model for another number of samples."""
        return graph.nodes[self.start : self.stop]


def segments(graph: Graph) -> tuple[NetworkSegment, ...]:
    """Return the segments of a graph in forward order; together they contain all nodes."""
    merged: list[NetworkSegment] = []
    for piece in _pieces(graph):
        weighted = any(map(_is_weighted, piece.nodes(graph)))
        first = not merged or not any(map(_is_weighted, merged[0].nodes(graph)))
        if merged and (not weighted or (len(merged) == 1 and first)):
            merged[-1] = NetworkSegment(merged[-1].start, piece.stop, merged[-1].source, piece.output)
        else:
            merged.append(piece)
    return tuple(merged)


def _is_weighted(node: Node) -> bool:
    return isinstance(node.spec, Conv2dSpec | LinearSpec)


def _pieces(graph: Graph) -> Iterator[NetworkSegment]:
    """Yield the shortest consecutive ranges of nodes such that the nodes after a range need only one earlier tensor."""
    last_reader: dict[int, int] = {}
    for position, node in enumerate(graph.nodes):
        for tensor in node.inputs:
            last_reader[tensor] = position
    start, source, reach = 0, 0, last_reader.get(0, -1)
    for position, node in enumerate(graph.nodes):
        if reach <= position:  # no later node reads an earlier tensor
            yield NetworkSegment(start, position + 1, source, node.output)
            start, source = position + 1, node.output
        reach = max(reach, last_reader.get(node.output, len(graph.nodes)))


def kept_bytes(steps: Sequence[PlannedStep]) -> int:
    """Return the bytes of activations that backward needs."""
    total = 0
    for step in steps:
        kept = not (step.is_view or step.in_place or step.recomputes_output)
        total += step.operator.saved_bytes + (step.operator.output.bytes if kept else 0)
    return total


@dataclass(frozen=True)
class SegmentCost:
    """Cost of a segment for one rank in one step.

    Attributes:
        seconds: time of the operators, plus exposed time of moves and merged statistics.
        memory_bytes: bytes of activations that backward needs.
        whole: parameters that all ranks hold.
        split: this rank's parts of split parameters.
    """

    seconds: float
    memory_bytes: int
    whole: AveragedParts
    split: AveragedParts
    output: Layout  # layout of the segment's output


class SegmentCosts:
    """Costs of the segments of a job on a grid; equal segments are priced once.

    Args:
        plan: grid and tiles; the uses of layers are arguments of `cost`.
    """

    def __init__(self, job: Job, machine: Machine, costs: ComputeCosts, plan: ParallelPlan, micro_batches: int = 1) -> None:
        self._job, self._machine, self._costs, self._micro_batches = job, machine, costs, micro_batches
        counts = job.counts(plan.rows * plan.cols, plan.rows)[: plan.rows]
        of_pass = tuple(-(-count // micro_batches) for count in counts)
        self.graph = job.graph_of(sum(of_pass))
        self.placements = grid_placements(machine, plan.rows, plan.cols)
        self._context = SplitContext(of_pass, plan.image_tiles)
        self._rank = 1 if plan.rows > 2 else 0
        self._group = unused_group()
        self._known: dict[Hashable, SegmentCost] = {}
        self._output = self.graph.output

    def cost(self, segment: NetworkSegment, incoming: Layout | None, use_of: Callable[[str], Parallelism]) -> SegmentCost:
        """Return the cost of a segment.

        Args:
            incoming: layout of the segment's input; None: the images, which each rank reads as needed.
            use_of: function from a layer's name to its use.
        """
        nodes = segment.nodes(self.graph)
        uses = tuple(use_of(node.name) for node in nodes)
        source = None if incoming is None else layout_key(incoming)
        key = (_signature(nodes, segment, self.graph), source, uses, segment.output == self._output)
        if key not in self._known:
            lowering = _Lowering(self.graph, segment, self._context, self._rank, self._group)
            self._known[key] = self._price(lowering.run(incoming, uses), lowering, incoming)
        return self._known[key]

    def _price(self, local: Graph, lowering: _Lowering, incoming: Layout | None) -> SegmentCost:
        kernels = shared_operators(self._job.kernels)
        steps = make_steps(kernels.fuse(local, training=True), kernels, training=True, input_gradient=incoming is not None)
        seconds, hides = 0.0, 0.0
        for position, step in reversed(list(enumerate(steps.steps))):
            if step.node is None:
                continue  # copies between layouts count for the whole network, not per segment
            if is_move(step.operator):
                seconds += self._move(step, steps, position, hides)
                continue
            of_parameters = self._costs.seconds(step, Action.PARAMETERS) if step.has_parameters else 0.0
            hides = of_parameters if step.has_parameters and not isinstance(step.node.spec, BatchNormSpec) else 0.0
            seconds += self._costs.seconds(step, Action.FORWARD) + of_parameters + self._merges(step)
            if steps.passes_back(position):
                seconds += self._costs.seconds(step, Action.INPUT)
        whole, split = self._parameters(lowering)
        return SegmentCost(seconds * self._micro_batches, kept_bytes(steps.steps), whole, split, lowering.output)

    def _move(self, step: PlannedStep, steps: Steps, position: int, hides: float) -> float:
        """Return the seconds of a move and its adjoint: packing and waits. `hides` seconds overlap the backward exchange."""
        spec: Any = step.operator.spec
        item_bytes = step.operator.inputs[0].item_bytes
        summed = isinstance(spec, ReduceScatterSpec)
        share = transfer(spec.target, spec.everything, spec.rank) if summed else transfer(spec.source, spec.target, spec.rank)
        sent, received = share.send_size * item_bytes, share.receive_size * item_bytes
        peers = max(len(share.sends), len(share.receives))
        forward, backward = (self._exchange(n_bytes, peers) for n_bytes in (sent, received))
        if summed:
            forward, backward = backward, forward
        seconds = forward + self._costs.seconds(step, Action.FORWARD)
        if steps.passes_back(position):
            seconds += max(0.0, backward - hides) + self._costs.seconds(step, Action.INPUT)
        if step.recomputes_output:
            seconds += self._costs.seconds(step, Action.RECOMPUTE)
        return seconds

    def _exchange(self, n_bytes: int, peers: int) -> float:
        exchange = stages(self._machine, "exchange", n_bytes, self.placements.split, peers=peers)
        # computation separates exchanges, so there is a pause before each
        return unhindered_seconds(exchange, self._machine.between.burst_seconds)

    def _merges(self, step: PlannedStep) -> float:
        """Return the seconds of waiting for merged batch statistics, forward and backward."""
        spec = getattr(step.operator, "spec", None)
        if not isinstance(spec, BatchNormSpec) or not spec.synchronised:
            return 0.0
        group = self.placements.of(spec.merge)
        sizes = (2 * spec.channels + 1, 2 * spec.channels)
        merged = (stages(self._machine, "merge", group.ranks * size * STATISTIC_BYTES, group) for size in sizes)
        return sum(map(unhindered_seconds, merged))

    def _parameters(self, lowering: _Lowering) -> tuple[AveragedParts, AveragedParts]:
        whole, split = AveragedParts(), AveragedParts()
        for node, sharding in lowering.shardings:
            sizes = [math.prod(self._job.specs[name].shape) for name in node.parameters.values()]
            intervals = sharding.channel_intervals
            share = 1.0 if intervals is None else (intervals[0][1] - intervals[0][0]) / max(1, intervals[-1][1])
            linear: tuple[LinearSize, ...] = ()
            if isinstance(node.spec, LinearSpec):
                linear = (LinearSize(node.spec.features_in, round(node.spec.features_out * share)),)
            parts = AveragedParts(round(sum(sizes) * share), len(sizes), linear)
            if intervals is None:
                whole = whole + parts
            else:
                split = split + parts
        return whole, split


class _Lowering:
    """Lowering of a segment for one rank.

    Attributes:
        shardings: nodes with trained parameters and their shardings; set by `run`.
        output: layout of the output; set by `run`.
    """

    def __init__(self, graph: Graph, segment: NetworkSegment, context: SplitContext, rank: int, group: SplitGroup) -> None:
        self._graph, self._segment, self._context, self._rank, self._group = graph, segment, context, rank, group
        self._layouts: dict[int, Layout] = {}  # by tensor of the local graph
        self._tensor_of: dict[int, int] = {segment.source: 0}
        self._moved: dict[Hashable, int] = {}
        self.shardings: list[tuple[Node, OperatorSharding]] = []
        self.output: Layout

    def run(self, incoming: Layout | None, uses: Sequence[Parallelism]) -> Graph:
        """Return the segment's graph on this rank, for the input's layout and the use of each node; call it once per object."""
        nodes, dtype = self._segment.nodes(self._graph), self._graph.tensors[0].dtype
        if incoming is None:
            samples = layout.samples(self._graph.tensors[0].shape, self._context.counts)
            readers = [(node, use) for node, use in zip(nodes, uses, strict=True) if self._segment.source in node.inputs]
            incoming = samples if len(readers) != 1 else self._shard(readers[0][0], [samples], readers[0][1]).reads[0]
        self._layouts[0] = incoming
        builder = GraphBuilder(TensorSpec(shape_of(incoming.boxes[self._rank]), dtype))
        for node, use in zip(nodes, uses, strict=True):
            self._add(builder, node, use)
        result = self._tensor_of[self._segment.output]
        if self._segment.output == self._graph.output:
            shape = self._layouts[result].shape
            result = self._as_layout(builder, result, layout.samples(shape, self._context.counts))
        self.output = self._layouts[result]
        return builder.build(result)

    def _shard(self, node: Node, inputs: Sequence[Layout], use: Parallelism) -> OperatorSharding:
        return shard(node, inputs, self._graph.tensors[node.output].shape, use, self._context)

    def _add(self, builder: GraphBuilder, node: Node, use: Parallelism) -> None:
        sharding = self._shard(node, [self._layouts[self._tensor_of[tensor]] for tensor in node.inputs], use)
        inputs = tuple(
            self._as_layout(builder, self._tensor_of[tensor], wanted)
            for tensor, wanted in zip(node.inputs, sharding.reads, strict=True)
        )
        output = builder.emit(
            node.name,
            sharding.specs[self._rank],
            inputs,
            parameters=node.parameters,
            statistics=node.statistics,
            frozen=node.frozen,
        )
        if node.trains:
            self.shardings.append((node, sharding))
        self._layouts[output] = sharding.writes
        if sharding.summed:
            everything = layout.everything(sharding.writes.shape, self._context.ranks)
            spec = ReduceScatterSpec(sharding.writes, everything, self._rank, f"{node.name}.sum", self._group)
            output = builder.emit(spec.purpose, spec, (output,))
            self._layouts[output] = sharding.writes
        self._tensor_of[node.output] = output

    def _as_layout(self, builder: GraphBuilder, tensor: int, wanted: Layout) -> int:
        source = self._layouts[tensor]
        if source.same_boxes(wanted):
            return tensor
        key = (tensor, wanted.boxes)
        if key not in self._moved:
            spec = RedistributeSpec(source, wanted, self._rank, f"move.{tensor}", self._group)
            self._moved[key] = builder.emit(spec.purpose, spec, (tensor,))
            self._layouts[self._moved[key]] = wanted
        return self._moved[key]


def layout_key(of_tensor: Layout) -> Hashable:
    """Return a hashable key of a tensor's layout on one grid.

    Kind, first box and last box distinguish the layouts of the sharding rules.
    """
    return of_tensor.kind, of_tensor.boxes[0], of_tensor.boxes[-1]


def _signature(nodes: Sequence[Node], segment: NetworkSegment, graph: Graph) -> Hashable:
    """Return a key that is equal for segments with the same cost."""
    specs = []
    for node in nodes:
        spec: Any = node.spec
        nameless = replace(spec, layer="") if hasattr(spec, "layer") else spec
        specs.append((nameless, tuple(tensor - segment.source for tensor in node.inputs), bool(node.parameters)))
    return tuple(specs), graph.tensors[segment.source].shape
