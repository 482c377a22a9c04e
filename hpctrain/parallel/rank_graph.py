"""One rank's part of a model on a grid: its graph and its network, and the graphs of many ranks for planning.

For planning only, the graphs of a split group's ranks are compared by their work (`LocalGraph`), so that each kind is compiled
once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol

from hpctrain.backend.graph import Graph, Node
from hpctrain.backend.operators import Array, KernelSet, LossOperator, Operator
from hpctrain.backend.specs import DropoutSpec, SoftmaxCrossEntropySpec, Spec, TensorSpec
from hpctrain.comm.progress import ProgressEngine
from hpctrain.core.intervals import Box
from hpctrain.nn.compile.compiler import compile_graph
from hpctrain.nn.compile.plan import ExecutionPlan
from hpctrain.nn.layers import Layer
from hpctrain.nn.network import ImageShape, Network, Shard
from hpctrain.parallel.groups import GridGroups
from hpctrain.parallel.layout import LayoutKind
from hpctrain.parallel.moves import RedistributeOperator, ReduceScatterOperator, SplitGroup, moved, moved_back, unused_group
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.parallel.partition_graph import PartitionedGraph, partition_graph


class TilesByShape(Protocol):
    """Function that returns the boxes of the images (N, H, W, C) that the ranks of a split group read."""

    def __call__(self, counts: Sequence[int], image_shape: ImageShape | None = None) -> tuple[Box, ...]:
        """Return the boxes by rank.

        Args:
            counts: number of samples of each rank.
            image_shape: (H, W, C); default: the network's image shape.
        """
        ...


class GridDistribution:
    """Distribution of a model over a split group by a parallel plan.

    The operators are collective over the group; lowering graphs is not.
    """

    def __init__(self, plan: ParallelPlan, group: SplitGroup) -> None:
        assert plan.rows == group.size
        self.plan, self.group, self.ranks = plan, group, group.size
        self._shards: dict[str, Shard] = {}
        self._contributes: dict[str, tuple[bool, bool]] = {}

    def prepare(self, graph: Graph) -> None:
        self.plan.check([node.name for node in graph.nodes])
        rank = self.group.rank
        # Shards depend only on the plan and the layers, so any counts are valid here: all samples on the first rank.
        counts = (graph.tensors[0].shape[0], *(0,) * (self.group.size - 1))
        partitioned = partition_graph(graph, self.plan, counts)
        self._shards = partitioned.shards_of(rank)
        for step in partitioned.steps:
            node, sharding = step.node, step.sharding
            if node is None or sharding is None:
                continue
            kind = sharding.writes.kind
            for name in node.statistics.values():
                # A step's sums weight batch statistics by samples. In a layer split by samples, each rank adds those of its
                # samples. In a layer split by channels, each rank has its channels of all samples of the group. In one split
                # by tiles, all ranks of the group hold the same merged statistics, so rank 0 adds them for the group.
                self._contributes[name] = (
                    kind is LayoutKind.SAMPLES,
                    kind is LayoutKind.CHANNELS or (kind is LayoutKind.TILES and rank == 0),
                )

    def local(self, graph: Graph, counts: Sequence[int]) -> Graph:
        return self.partitioned(graph, counts).local(self.group.rank, self.group)

    def partitioned(self, graph: Graph, counts: Sequence[int]) -> PartitionedGraph:
        """Return the graph of all ranks of the split group."""
        return partition_graph(graph, self.plan, counts)

    def tiles_by_counts(self, graph_of: Callable[[int, ImageShape | None], Graph]) -> TilesByShape:
        """Return a function that returns each rank's box of the images, from the ranks' numbers of samples and the image shape.

        Args:
            graph_of: function that returns the model lowered for a number of samples and an image shape.
        """

        def boxes(counts: Sequence[int], image_shape: ImageShape | None = None) -> tuple[Box, ...]:
            return self.partitioned(graph_of(sum(counts), image_shape), counts).layouts[0].boxes

        return lru_cache(maxsize=16)(boxes)

    def message_bytes(self, operators: Sequence[Operator]) -> int:
        moves = [operator for operator in operators if isinstance(operator, RedistributeOperator | ReduceScatterOperator)]
        return max((move.message_bytes for move in moves), default=0)

    def shard(self, name: str) -> Shard | None:
        return self._shards.get(name)

    def contributes(self, name: str) -> tuple[bool, bool]:
        return self._contributes[name]


def make_network(
    model: Layer,
    image_shape: tuple[int, int, int],
    kernels: KernelSet,
    *,
    groups: GridGroups,
    progress: ProgressEngine,
    plan: ParallelPlan | None = None,
    dtype: str = "float32",
    seed: int = 0,
    smoothing: float = 0.0,
    class_weights: Sequence[float] = (),
    frozen: Sequence[str] = (),
) -> Network:
    """Return this rank's part of a model on a grid. Not collective. `Network` describes the arguments that are not listed.

    Args:
        image_shape: (H, W, C) of one sample.
        plan: use of each layer on the grid; needed if ranks share samples.
        dtype: "float32" or "float64".

    Raises:
        ShapeError: the layers do not fit each other or the image.
        ConfigError: a pattern of the plan or of frozen layers matches nothing, all layers are frozen, or the weights of classes
            are not one positive number per class.
    """
    split_group = groups.split_group(progress, kernels.arithmetic)
    distribution = None
    if split_group is not None:
        assert plan is not None, "ranks that share samples need a plan"
        distribution = GridDistribution(plan, split_group)
    return Network(
        model,
        image_shape,
        kernels,
        dtype=dtype,
        seed=seed,
        smoothing=smoothing,
        class_weights=class_weights,
        mergers=groups.mergers(progress),
        distribution=distribution,
        frozen=frozen,
    )


# -- for planning only ---------------------------------------------------------------------------------------------------------

_OPERATORS = 1024  # maximum number of cached operators: a few dozen kinds in a network, at the sizes of a few ranks
_PLANS = 64  # maximum number of cached plans: a few kinds of ranks for each grid of a search


@dataclass(frozen=True)
class MoveWords:
    """Number of elements that one rank sends and receives in the forward pass of a move or a sum.

    In backward, the two numbers are swapped.
    """

    sent: int
    received: int


@dataclass(frozen=True)
class LocalGraph:
    """The graph of one rank, for planning only. Equal graphs do the same work, wherever their ranks are in the split groups.

    Attributes:
        key: value that determines the work; graphs compare by it.
        moves: words of each move or sum, by the tensor that it writes.
    """

    key: Hashable
    graph: Graph = field(compare=False, repr=False)
    moves: Mapping[int, MoveWords] = field(compare=False, default_factory=dict)


def whole_graph(graph: Graph) -> LocalGraph:
    """Return the graph of a rank that shares its samples with no other rank."""
    return LocalGraph(_key(graph, {}), graph)


def local_graphs(partitioned: PartitionedGraph, ranks: Sequence[int]) -> list[LocalGraph]:
    """Return the graphs of some ranks of the split group, in time linear in the number of ranks."""
    group = unused_group()
    moves: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for step in partitioned.steps:
        if step.move is not None:
            sent, returned = moved(*step.move), moved_back(*step.move)
            moves[step.output] = (returned, sent) if step.summed else (sent, returned)
    graphs = []
    for rank in ranks:
        graph = partitioned.local(rank, group)
        words = {tensor: MoveWords(sent[rank], received[rank]) for tensor, (sent, received) in moves.items()}
        graphs.append(LocalGraph(_key(graph, words), graph, words))
    return graphs


@lru_cache(maxsize=_PLANS)
def training_plan(local: LocalGraph, kernels: KernelSet) -> ExecutionPlan:
    """Return the plan of a training program, the same object for equal graphs.

    It cannot run, because its steps share operators.
    """
    return compile_graph(local.graph, shared_operators(kernels), training=True)


class _SharedOperators(KernelSet):
    """Operators of another kernel set, each made only once, because many blocks and ranks have the same layer."""

    def __init__(self, kernels: KernelSet) -> None:
        self._kernels, self.arithmetic = kernels, kernels.arithmetic
        self.alignment_bytes, self.shadow_dtype = kernels.alignment_bytes, kernels.shadow_dtype
        self._made = lru_cache(maxsize=_OPERATORS)(kernels.make)
        self._reorder = lru_cache(maxsize=_OPERATORS)(kernels.reorder)

    def make(self, spec: Spec, inputs: tuple[TensorSpec, ...], *, training: bool, input_gradient: bool = True) -> Operator:
        if isinstance(spec, Hashable):
            return self._made(spec, inputs, training=training, input_gradient=input_gradient)
        return self._kernels.make(spec, inputs, training=training, input_gradient=input_gradient)

    def make_loss(self, spec: SoftmaxCrossEntropySpec) -> LossOperator:
        return self._kernels.make_loss(spec)

    def fuse(self, graph: Graph, *, training: bool) -> Graph:
        return self._kernels.fuse(graph, training=training)

    def reorder(self, source: TensorSpec, target: TensorSpec) -> Operator:
        return self._reorder(source, target)

    def allocate(self, size_bytes: int) -> Array:
        return self._kernels.allocate(size_bytes)


@lru_cache(maxsize=2)
def shared_operators(kernels: KernelSet) -> KernelSet:
    """Return a kernel set that makes equal operators only once, for plans that never run."""
    return _SharedOperators(kernels)


def _key(graph: Graph, moves: Mapping[int, MoveWords]) -> Hashable:
    """Return the value that determines the work of a graph."""
    return (graph.tensors, graph.output, tuple(_node_key(node, moves.get(node.output)) for node in graph.nodes))


def _node_key(node: Node, words: MoveWords | None) -> Hashable:
    spec = node.spec
    decides: Hashable
    if words is not None:  # a move's spec has the layouts of all ranks, but its work depends on this rank's words only
        decides = type(spec).__name__, words
    elif isinstance(spec, DropoutSpec):  # the place of a mask in the sample does not change the work
        decides = replace(spec, first_sample=0, origin=(0,) * len(spec.origin))
    else:
        decides = spec if isinstance(spec, Hashable) else repr(spec)
    names = tuple(node.parameters.items()), tuple(node.statistics.items())
    return (node.name, decides, node.inputs, node.output, names, node.input_first, node.frozen)
