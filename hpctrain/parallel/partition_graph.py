"""A model's graph on the ROW axis: one graph per rank, made from the outside; layers know nothing of it.

Every operation is placed by its layer's use; where its inputs lie elsewhere, a move is inserted just before it, shared by later
readers of the same elements. The output always ends as samples, so every sample's loss is computed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpctrain.backend.kernels.graph import Graph, GraphBuilder, Node
from hpctrain.backend.kernels.specs import Conv2dSpec, LinearSpec, Spec, TensorSpec
from hpctrain.boxes import Box, shape_of
from hpctrain.parallel import layout
from hpctrain.parallel.interior import InteriorSplit, JoinRowsSpec, Whole, split_interior
from hpctrain.parallel.layout import Layout
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.redistribute import RedistributeSpec, ReduceScatterSpec
from hpctrain.parallel.sharding_rules import OperatorSharding, SplitContext, shard
from hpctrain.parallel.split_group import SplitGroup

_EITHER_ORDER = (Conv2dSpec, LinearSpec)  # gradients of input and parameters do not build on each other


@dataclass(frozen=True)
class PartitionStep:
    """One operation of the distributed graph, for all ranks.

    node, use, placement: the layer's; none for a move or a sum. inputs, output: tensor numbers of the distributed graph.
    specs: what each rank runs, where it is not the placement's. move: (source, target) of a move; of a sum, which is the adjoint
    of one. early: a move that is sent at its place and received at its reader's. input_first, shared: see `Node`.
    """

    name: str
    inputs: tuple[int, ...]
    output: int
    node: Node | None = None
    specs: tuple[Spec, ...] | None = None
    use: Parallelism | None = None
    placement: OperatorSharding | None = None
    move: tuple[Layout, Layout] | None = None
    summed: bool = False
    input_first: bool = False
    early: bool = False
    shared: bool = False


@dataclass(frozen=True)
class PartitionedGraph:
    """Steps in forward order; `layouts[t]` is tensor t's. Tensor 0 is the input: what each rank must be given of it.

    whole: the layers that the plan wants in parts and that are not, with the reason.
    """

    steps: tuple[PartitionStep, ...]
    layouts: tuple[Layout, ...]
    output: int
    dtype: str
    whole: Mapping[str, Whole] = field(default_factory=dict)

    def shards(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Split parameters and statistics by full name: for each rank, its interval of output channels."""
        found = {}
        for step in self.steps:
            if step.node is not None and step.placement is not None and step.placement.shard is not None:
                for name in (*step.node.parameters.values(), *step.node.statistics.values()):
                    found[name] = step.placement.shard
        return found

    def local(self, rank: int, axis: SplitGroup) -> Graph:
        """The graph that one rank runs."""
        builder = GraphBuilder(TensorSpec(shape_of(self.layouts[0].boxes[rank]), self.dtype))
        for step in self.steps:
            node = step.node
            output = builder.emit(
                step.name,
                self._spec(step, rank, axis),
                step.inputs,
                parameters={} if node is None else node.parameters,
                statistics={} if node is None else node.statistics,
                input_first=step.input_first,
                shared=step.shared,
            )
            assert output == step.output
        return builder.build(self.output)

    def _spec(self, step: PartitionStep, rank: int, axis: SplitGroup) -> Spec:
        specs = step.specs if step.specs is not None or step.placement is None else step.placement.specs
        if specs is not None:
            return specs[rank]
        assert step.move is not None
        source, target = step.move
        if step.summed:
            return ReduceScatterSpec(source, target, rank, step.name, axis)
        return RedistributeSpec(source, target, rank, step.name, axis, step.early)


def partition_graph(graph: Graph, plan: ParallelPlan, counts: Sequence[int]) -> PartitionedGraph:
    """`graph`, lowered at the samples of the whole column, over ranks that hold `counts` samples each. Pure.

    Raises:
        ConfigError: a pattern of the plan that matches no layer.
    """
    assert graph.tensors[0].shape[0] == sum(counts)
    return _Partitioner(graph, plan, SplitContext(tuple(counts), plan.image_tiles)).run()


class _Partitioner:
    """Numbers: `_where[t]` is the distributed graph's tensor for tensor t of the whole graph."""

    def __init__(self, graph: Graph, plan: ParallelPlan, setting: SplitContext) -> None:
        self._graph, self._plan, self._setting = graph, plan, setting
        self._steps: list[PartitionStep] = []
        self._layouts: list[Layout] = []
        self._where: dict[int, int] = {}
        self._whole: dict[str, Whole] = {}
        self._moved: dict[tuple[int, tuple[Box, ...]], int] = {}

    def run(self) -> PartitionedGraph:
        self._layouts.append(self._input_layout())
        self._where[0] = 0
        for node in self._graph.nodes:
            self._add(node)
        output = self._where[self._graph.output]
        shape = self._layouts[output].shape
        output = self._in(output, layout.samples(shape, self._setting.counts), "output")
        return PartitionedGraph(tuple(self._steps), tuple(self._layouts), output, self._graph.tensors[0].dtype, self._whole)

    def _input_layout(self) -> Layout:
        """What the first operation reads, halo included: images are read from files, so nothing needs to travel."""
        shape = self._graph.tensors[0].shape
        readers = self._graph.consumers(0)
        own = layout.samples(shape, self._setting.counts)
        if len(readers) != 1:
            return own
        (reader,) = readers
        return self._place(reader, [own]).reads[0]

    def _place(self, node: Node, inputs: Sequence[Layout]) -> OperatorSharding:
        use = self._plan.use_of(node.name)
        return shard(node, inputs, self._graph.tensors[node.output].shape, use, self._setting)

    def _add(self, node: Node) -> None:
        placement = self._place(node, [self._layouts[self._where[i]] for i in node.inputs])
        split = self._split(node, placement)
        if split is not None:
            self._where[node.output] = self._add_in_parts(node, placement, split)
            return
        inputs = tuple(
            self._in(self._where[i], wanted, node.name) for i, wanted in zip(node.inputs, placement.reads, strict=True)
        )
        moved = any(_is_move_of(step, inputs) for step in self._steps[-1:])
        fresh = moved and self._plan.hides and isinstance(node.spec, _EITHER_ORDER)
        use = self._plan.use_of(node.name)
        if not placement.summed:
            output = self._new(placement.writes)
            self._steps.append(PartitionStep(node.name, inputs, output, node, None, use, placement, input_first=fresh))
        else:
            everything = layout.everything(placement.writes.shape, self._setting.ranks)
            partial = self._new(everything)
            self._steps.append(PartitionStep(node.name, inputs, partial, node, None, use, placement, input_first=fresh))
            output = self._new(placement.writes)
            self._steps.append(
                PartitionStep(f"{node.name}.sum", (partial,), output, use=use, move=(placement.writes, everything), summed=True)
            )
        self._where[node.output] = output

    def _split(self, node: Node, placement: OperatorSharding) -> InteriorSplit | None:
        if node.name not in self._plan.overlapped:
            return None
        split = split_interior(node.spec, placement, self._layouts[self._where[node.inputs[0]]])
        if isinstance(split, InteriorSplit):
            return split
        self._whole[node.name] = split
        return None

    def _add_in_parts(self, node: Node, placement: OperatorSharding, split: InteriorSplit) -> int:
        """Send both edges' halos, compute the interior, then each edge as its rows arrive, and put all together."""
        x = self._where[node.inputs[0]]
        use = self._plan.use_of(node.name)
        edges = []
        for name, part in (("top", split.top), ("bottom", split.bottom)):
            edges.append(self._new(part.reads))
            move = (self._layouts[x], part.reads)
            self._steps.append(PartitionStep(f"{node.name}.halo.{name}", (x,), edges[-1], move=move, early=True))
        interior = self._new(split.interior.writes)
        self._steps.append(PartitionStep(node.name, (x,), interior, node, split.interior.specs, use, placement))
        outputs = []
        for name, part, edge in zip(("top", "bottom"), (split.top, split.bottom), edges, strict=True):
            outputs.append(self._new(part.writes))
            step = PartitionStep(
                f"{node.name}.{name}", (edge,), outputs[-1], node, part.specs, use, input_first=True, shared=True
            )
            self._steps.append(step)
        output = self._new(placement.writes)
        joined = (JoinRowsSpec(),) * self._setting.ranks
        self._steps.append(PartitionStep(f"{node.name}.join", (outputs[0], interior, outputs[1]), output, specs=joined, use=use))
        return output

    def _in(self, tensor: int, wanted: Layout, reader: str) -> int:
        """The tensor's elements as `wanted`: itself, or moved."""
        source = self._layouts[tensor]
        if source.same_boxes(wanted):
            return tensor
        key = (tensor, wanted.boxes)
        if key not in self._moved:
            self._moved[key] = self._new(wanted)
            name = f"{reader}.halo" if source.kind is layout.LayoutKind.TILES and not wanted.is_partition else f"{reader}.move"
            self._steps.append(PartitionStep(name, (tensor,), self._moved[key], move=(source, wanted)))
        return self._moved[key]

    def _new(self, made: Layout) -> int:
        self._layouts.append(made)
        return len(self._layouts) - 1


def _is_move_of(step: PartitionStep, inputs: tuple[int, ...]) -> bool:
    return step.move is not None and step.output in inputs
