"""A model's graph partitioned over a split group: one graph per rank, made from the outside; layers know nothing of it.

Every operation is sharded by its layer's use; where its inputs lie in another layout, a move is inserted just before it, shared
by later readers of the same elements. The output always ends as samples, so every sample's loss is computed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpctrain.backend.graph import Graph, GraphBuilder, Node
from hpctrain.backend.specs import Conv2dSpec, LinearSpec, Spec, TensorSpec
from hpctrain.core.intervals import Box, Interval, shape_of
from hpctrain.nn.network import Shard
from hpctrain.parallel import layout
from hpctrain.parallel.layout import Layout
from hpctrain.parallel.moves import RedistributeSpec, ReduceScatterSpec, SplitGroup
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.sharding_rules import (
    InteriorSplit,
    JoinRowsSpec,
    NoInterior,
    OperatorSharding,
    SplitContext,
    shard,
    split_interior,
)

# Their gradients of input and parameters do not build on each other, so either may be computed first.
_EITHER_ORDER = (Conv2dSpec, LinearSpec)


@dataclass(frozen=True)
class PartitionStep:
    """One operation of the partitioned graph, for all ranks.

    node, use, sharding: the layer's; none for a move or a sum. inputs, output: tensor numbers of the partitioned graph.
    specs: those that each rank runs, where they are not the sharding's. move: (source, target) of a move; of a sum, the move
    whose adjoint it is. early: a move that is sent at its own place in the order and received just before its reader.
    input_first, shared: see `Node`.
    """

    name: str
    inputs: tuple[int, ...]
    output: int
    node: Node | None = None
    specs: tuple[Spec, ...] | None = None
    use: Parallelism | None = None
    sharding: OperatorSharding | None = None
    move: tuple[Layout, Layout] | None = None
    summed: bool = False
    input_first: bool = False
    early: bool = False
    shared: bool = False


@dataclass(frozen=True)
class PartitionedGraph:
    """Steps in forward order; `layouts[t]` is the layout of tensor t. Tensor 0 is the input: the boxes that the ranks are given.

    undivided: the layers that the plan wants in parts and that are computed as a whole, with the reason.
    """

    steps: tuple[PartitionStep, ...]
    layouts: tuple[Layout, ...]
    output: int
    dtype: str
    undivided: Mapping[str, NoInterior] = field(default_factory=dict)

    def shards(self) -> dict[str, tuple[Interval, ...]]:
        """Split parameters and statistics by full name: for each rank, its interval of output channels."""
        intervals = {}
        for step in self.steps:
            if step.node is not None and step.sharding is not None and step.sharding.channel_intervals is not None:
                for name in (*step.node.parameters.values(), *step.node.statistics.values()):
                    intervals[name] = step.sharding.channel_intervals
        return intervals

    def shards_of(self, rank: int) -> dict[str, Shard]:
        """Split parameters and statistics by full name: the part of each that one rank has."""
        shards = {}
        for step in self.steps:
            if step.node is not None and step.sharding is not None and step.sharding.channel_intervals is not None:
                for role, name in (*step.node.parameters.items(), *step.node.statistics.items()):
                    # Linear weights are (in, out), all other split tensors have their output channels first.
                    dim = 1 if isinstance(step.node.spec, LinearSpec) and role == "weight" else 0
                    shards[name] = Shard(dim, step.sharding.channel_intervals[rank])
        return shards

    def local(self, rank: int, group: SplitGroup) -> Graph:
        """The graph that one rank runs."""
        builder = GraphBuilder(TensorSpec(shape_of(self.layouts[0].boxes[rank]), self.dtype))
        for step in self.steps:
            node = step.node
            output = builder.emit(
                step.name,
                self._spec(step, rank, group),
                step.inputs,
                parameters={} if node is None else node.parameters,
                statistics={} if node is None else node.statistics,
                input_first=step.input_first,
                shared=step.shared,
                frozen=node is not None and node.frozen,
            )
            assert output == step.output
        return builder.build(self.output)

    def _spec(self, step: PartitionStep, rank: int, group: SplitGroup) -> Spec:
        specs = step.specs if step.specs is not None or step.sharding is None else step.sharding.specs
        if specs is not None:
            return specs[rank]
        assert step.move is not None
        source, target = step.move
        if step.summed:
            return ReduceScatterSpec(source, target, rank, step.name, group)
        return RedistributeSpec(source, target, rank, step.name, group, step.early)


def partition_graph(graph: Graph, plan: ParallelPlan, counts: Sequence[int]) -> PartitionedGraph:
    """`graph`, lowered at all samples of a split group, over ranks that hold `counts` samples each. Pure.

    Raises:
        ConfigError: a pattern of the plan that matches no layer.
    """
    assert graph.tensors[0].shape[0] == sum(counts)
    return _Partitioner(graph, plan, SplitContext(tuple(counts), plan.image_tiles)).run()


class _Partitioner:
    """Makes a `PartitionedGraph`. `_tensor_of[t]` is the partitioned graph's tensor for tensor t of the whole graph."""

    def __init__(self, graph: Graph, plan: ParallelPlan, context: SplitContext) -> None:
        self._graph, self._plan, self._context = graph, plan, context
        self._steps: list[PartitionStep] = []
        self._layouts: list[Layout] = []
        self._tensor_of: dict[int, int] = {}
        self._undivided: dict[str, NoInterior] = {}
        self._moved: dict[tuple[int, tuple[Box, ...]], int] = {}

    def run(self) -> PartitionedGraph:
        self._layouts.append(self._input_layout())
        self._tensor_of[0] = 0
        for node in self._graph.nodes:
            self._add(node)
        output = self._tensor_of[self._graph.output]
        shape = self._layouts[output].shape
        # Logits split by channels or tiles would give a loss that several ranks compute, or each a part of.
        output = self._as_layout(output, layout.samples(shape, self._context.counts), "output")
        dtype = self._graph.tensors[0].dtype
        return PartitionedGraph(tuple(self._steps), tuple(self._layouts), output, dtype, self._undivided)

    def _input_layout(self) -> Layout:
        """The boxes that the first operation reads, halo included: images are read from files, so nothing needs to travel."""
        shape = self._graph.tensors[0].shape
        readers = self._graph.consumers(0)
        samples = layout.samples(shape, self._context.counts)
        # Several readers may want several layouts. Moves start from a partition, which boxes with a halo are not.
        if len(readers) != 1:
            return samples
        (reader,) = readers
        return self._shard(reader, [samples]).reads[0]

    def _shard(self, node: Node, inputs: Sequence[Layout]) -> OperatorSharding:
        return shard(node, inputs, self._graph.tensors[node.output].shape, self._plan.use_of(node.name), self._context)

    def _add(self, node: Node) -> None:
        sharding = self._shard(node, [self._layouts[self._tensor_of[i]] for i in node.inputs])
        split = self._split_interior(node, sharding)
        if split is None:
            self._tensor_of[node.output] = self._add_undivided(node, sharding)
        else:
            self._tensor_of[node.output] = self._add_in_parts(node, sharding, split)

    def _add_undivided(self, node: Node, sharding: OperatorSharding) -> int:
        """Move the inputs where they lie elsewhere, compute, and add up where each rank has a summand; the output's tensor."""
        inputs = tuple(
            self._as_layout(self._tensor_of[i], wanted, node.name) for i, wanted in zip(node.inputs, sharding.reads, strict=True)
        )
        # The gradient of a moved input has a way to go: computed first, it travels while the weights' gradients are computed.
        # Where nothing was moved the weights' gradients come first, because their averaging can then start earlier.
        just_moved = any(_is_move_of(step, inputs) for step in self._steps[-1:])
        input_first = just_moved and self._plan.hides and isinstance(node.spec, _EITHER_ORDER)
        use = self._plan.use_of(node.name)
        summands = layout.everything(sharding.writes.shape, self._context.ranks)
        computed = self._new(summands if sharding.summed else sharding.writes)
        self._steps.append(PartitionStep(node.name, inputs, computed, node, None, use, sharding, input_first=input_first))
        if not sharding.summed:
            return computed
        # A sum to the owners is the adjoint of a move from the owners to everybody.
        move = (sharding.writes, summands)
        output = self._new(sharding.writes)
        self._steps.append(PartitionStep(f"{node.name}.sum", (computed,), output, use=use, move=move, summed=True))
        return output

    def _split_interior(self, node: Node, sharding: OperatorSharding) -> InteriorSplit | None:
        if node.name not in self._plan.overlapped:
            return None
        split = split_interior(node.spec, sharding, self._layouts[self._tensor_of[node.inputs[0]]])
        if isinstance(split, InteriorSplit):
            return split
        self._undivided[node.name] = split
        return None

    def _add_in_parts(self, node: Node, sharding: OperatorSharding, split: InteriorSplit) -> int:
        """Send both edges' halos, compute the interior, then each edge as its rows arrive, and join all; the output's tensor."""
        x = self._tensor_of[node.inputs[0]]
        use = self._plan.use_of(node.name)
        halos = []
        for name, edge in (("top", split.top), ("bottom", split.bottom)):
            halos.append(self._new(edge.reads))
            move = (self._layouts[x], edge.reads)
            self._steps.append(PartitionStep(f"{node.name}.halo.{name}", (x,), halos[-1], move=move, early=True))
        # The interior stands for the layer: it has the layer's name, so the layer's sharding is told here and only here.
        interior = self._new(split.interior.writes)
        self._steps.append(PartitionStep(node.name, (x,), interior, node, split.interior.specs, use, sharding))
        edges = []
        for name, edge, halo in zip(("top", "bottom"), (split.top, split.bottom), halos, strict=True):
            edges.append(self._new(edge.writes))
            # The parameters are the interior's (shared), whose gradient comes last in backward and completes theirs; the edges'
            # input gradients come first, so that they travel back while the interior's are computed.
            step = PartitionStep(f"{node.name}.{name}", (halo,), edges[-1], node, edge.specs, use, input_first=True, shared=True)
            self._steps.append(step)
        output = self._new(sharding.writes)
        joined = (JoinRowsSpec(),) * self._context.ranks
        self._steps.append(PartitionStep(f"{node.name}.join", (edges[0], interior, edges[1]), output, specs=joined, use=use))
        return output

    def _as_layout(self, tensor: int, wanted: Layout, reader: str) -> int:
        """The tensor's elements as `wanted`: itself, or moved."""
        source = self._layouts[tensor]
        # Boxes decide, not kinds: without samples, or with one rank that has all of them, different splits are the same.
        if source.same_boxes(wanted):
            return tensor
        key = (tensor, wanted.boxes)
        if key not in self._moved:
            self._moved[key] = self._new(wanted)
            name = f"{reader}.halo" if source.kind is layout.LayoutKind.TILES and not wanted.is_partition else f"{reader}.move"
            self._steps.append(PartitionStep(name, (tensor,), self._moved[key], move=(source, wanted)))
        return self._moved[key]

    def _new(self, of_tensor: Layout) -> int:
        """The number of one more tensor."""
        self._layouts.append(of_tensor)
        return len(self._layouts) - 1


def _is_move_of(step: PartitionStep, inputs: tuple[int, ...]) -> bool:
    return step.move is not None and step.output in inputs
