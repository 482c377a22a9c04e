"""Partitioning of a model's graph over a split group into one graph per rank. The model's layers are not changed.

Every operation is sharded by its layer's use. If its inputs lie in another layout, a move is inserted directly before it; later
readers of the same elements share the move. The output is always split by samples at the end, so every sample's loss is computed
once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpctrain.backend.graph import Graph, GraphBuilder, Node
from hpctrain.backend.specs import Conv2dSpec, LinearSpec, Spec, TensorSpec
from hpctrain.core.intervals import Box, Interval, shape_of
from hpctrain.nn.network import Shard
from hpctrain.parallel import layout
from hpctrain.parallel.layout import Layout
from hpctrain.parallel.moves import RedistributeSpec, ReduceScatterSpec, SplitGroup
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.sharding_rules import OperatorSharding, SplitContext, shard

# The gradients of their input and parameters are independent, so either may be computed first.
_EITHER_ORDER = (Conv2dSpec, LinearSpec)


@dataclass(frozen=True)
class PartitionStep:
    """One operation of the partitioned graph, for all ranks.

    Attributes:
        inputs, output: tensor numbers of the partitioned graph.
        node, use, sharding: node, use and sharding of the layer; None for a move. A sum has only the use of its layer.
        move: (source, target) of a move; for a sum: source and target of the move whose adjoint is the sum.
        summed: whether the step is a sum.
        input_first: see `Node`.
    """

    name: str
    inputs: tuple[int, ...]
    output: int
    node: Node | None = None
    use: Parallelism | None = None
    sharding: OperatorSharding | None = None
    move: tuple[Layout, Layout] | None = None
    summed: bool = False
    input_first: bool = False


@dataclass(frozen=True)
class PartitionedGraph:
    """A graph for all ranks of a split group.

    Attributes:
        steps: steps in forward order.
        layouts: layout of each tensor. Tensor 0 is the input, whose boxes are those of the images.
        output: number of the output tensor.
        dtype: dtype of the activations.
    """

    steps: tuple[PartitionStep, ...]
    layouts: tuple[Layout, ...]
    output: int
    dtype: str

    def shards(self) -> dict[str, tuple[Interval, ...]]:
        """Return each rank's interval of output channels, by full name of split parameters and statistics."""
        return {name: intervals for name, _, intervals in self._split()}

    def shards_of(self, rank: int) -> dict[str, Shard]:
        """Return the part that one rank holds, by full name of split parameters and statistics."""
        return {name: Shard(dim, intervals[rank]) for name, dim, intervals in self._split()}

    def _split(self) -> Iterator[tuple[str, int, tuple[Interval, ...]]]:
        """Yield full name, split dimension and each rank's interval of each split parameter and statistic."""
        for step in self.steps:
            if step.node is not None and step.sharding is not None and step.sharding.channel_intervals is not None:
                for role, name in (*step.node.parameters.items(), *step.node.statistics.items()):
                    # Linear weights are (in, out); all other split tensors have their output channels first.
                    dim = 1 if isinstance(step.node.spec, LinearSpec) and role == "weight" else 0
                    yield name, dim, step.sharding.channel_intervals

    def local(self, rank: int, group: SplitGroup) -> Graph:
        """Return the graph that rank `rank` runs. Its moves and sums exchange messages in `group`."""
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
                frozen=node is not None and node.frozen,
            )
            assert output == step.output
        return builder.build(self.output)

    def _spec(self, step: PartitionStep, rank: int, group: SplitGroup) -> Spec:
        if step.sharding is not None:
            return step.sharding.specs[rank]
        assert step.move is not None
        source, target = step.move
        if step.summed:
            return ReduceScatterSpec(source, target, rank, step.name, group)
        return RedistributeSpec(source, target, rank, step.name, group)


def partition_graph(graph: Graph, plan: ParallelPlan, counts: Sequence[int]) -> PartitionedGraph:
    """Partition a graph over the ranks of a split group, as a pure function.

    Args:
        graph: model lowered at all samples of the split group.
        counts: number of samples of each rank.
    """
    assert graph.tensors[0].shape[0] == sum(counts)
    return _Partitioner(graph, plan, SplitContext(tuple(counts), plan.image_tiles)).run()


class _Partitioner:
    """Builder of a `PartitionedGraph`. `_tensor_of[t]` is the partitioned graph's tensor for tensor t of the whole graph."""

    def __init__(self, graph: Graph, plan: ParallelPlan, context: SplitContext) -> None:
        self._graph, self._plan, self._context = graph, plan, context
        self._steps: list[PartitionStep] = []
        self._layouts: list[Layout] = []
        self._tensor_of: dict[int, int] = {}
        self._moved: dict[tuple[int, tuple[Box, ...]], int] = {}

    def run(self) -> PartitionedGraph:
        self._layouts.append(self._input_layout())
        self._tensor_of[0] = 0
        for node in self._graph.nodes:
            self._tensor_of[node.output] = self._add(node)
        output = self._tensor_of[self._graph.output]
        shape = self._layouts[output].shape
        # If logits were split by channels or tiles, several ranks would compute the same loss, or each a part of it.
        output = self._as_layout(output, layout.samples(shape, self._context.counts), "output")
        dtype = self._graph.tensors[0].dtype
        return PartitionedGraph(tuple(self._steps), tuple(self._layouts), output, dtype)

    def _input_layout(self) -> Layout:
        """Return the boxes that the first operation reads, with halos.

        Each rank reads them from files, so no halo is exchanged.
        """
        shape = self._graph.tensors[0].shape
        readers = self._graph.consumers(0)
        samples = layout.samples(shape, self._context.counts)
        # Several readers may need different layouts, and moves start from a partition, but boxes with halos are not one.
        if len(readers) != 1:
            return samples
        (reader,) = readers
        return self._shard(reader, [samples]).reads[0]

    def _shard(self, node: Node, inputs: Sequence[Layout]) -> OperatorSharding:
        return shard(node, inputs, self._graph.tensors[node.output].shape, self._plan.use_of(node.name), self._context)

    def _add(self, node: Node) -> int:
        """Add moves of inputs in other layouts, the operation, and a sum if each rank has a summand. Return the output tensor."""
        sharding = self._shard(node, [self._layouts[self._tensor_of[i]] for i in node.inputs])
        inputs = tuple(
            self._as_layout(self._tensor_of[i], wanted, node.name) for i, wanted in zip(node.inputs, sharding.reads, strict=True)
        )
        # The gradient of a moved input is sent back. If it is computed first, this overlaps with the weights' gradients. If
        # nothing was moved, the weights' gradients come first, because their averaging can then start earlier.
        just_moved = any(step.move is not None and step.output in inputs for step in self._steps[-1:])
        input_first = just_moved and isinstance(node.spec, _EITHER_ORDER)
        use = self._plan.use_of(node.name)
        summands = layout.everything(sharding.writes.shape, self._context.ranks)
        computed = self._new(summands if sharding.summed else sharding.writes)
        self._steps.append(PartitionStep(node.name, inputs, computed, node, use, sharding, input_first=input_first))
        if not sharding.summed:
            return computed
        # A sum at the owners is the adjoint of a move from the owners to all ranks.
        move = (sharding.writes, summands)
        output = self._new(sharding.writes)
        self._steps.append(PartitionStep(f"{node.name}.sum", (computed,), output, use=use, move=move, summed=True))
        return output

    def _as_layout(self, tensor: int, wanted: Layout, reader: str) -> int:
        """Return the tensor with the elements in the layout `wanted`: `tensor` itself, or the output of a move."""
        source = self._layouts[tensor]
        # Boxes are compared, not kinds, because different splits have the same boxes if one rank has all samples or none exist.
        if source.same_boxes(wanted):
            return tensor
        key = (tensor, wanted.boxes)
        if key not in self._moved:
            self._moved[key] = self._new(wanted)
            name = f"{reader}.halo" if source.kind is layout.LayoutKind.TILES and not wanted.is_partition else f"{reader}.move"
            self._steps.append(PartitionStep(name, (tensor,), self._moved[key], move=(source, wanted)))
        return self._moved[key]

    def _new(self, boxes: Layout) -> int:
        """Add a tensor and return its number."""
        self._layouts.append(boxes)
        return len(self._layouts) - 1
