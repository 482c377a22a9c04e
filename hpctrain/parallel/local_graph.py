"""The graphs of a split group's ranks, told apart by what decides their work, so that each kind is compiled once."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from hpctrain.backend.operators import Array, KernelSet, LossOperator, Operator
from hpctrain.backend.graph import Graph, Node
from hpctrain.backend.specs import DropoutSpec, SoftmaxCrossEntropySpec, Spec, TensorSpec
from hpctrain.nn.compile.compiler import compile_graph
from hpctrain.nn.compile.plan import ExecutionPlan
from hpctrain.parallel.partition_graph import PartitionedGraph
from hpctrain.parallel.split_group import unused_group
from hpctrain.parallel.moves import moved, moved_back

_OPERATORS = 1024  # that are kept: a few dozen kinds of a network, at the sizes of a few ranks
_PLANS = 64  # that are kept: a few kinds of ranks for each of a search's grids


@dataclass(frozen=True)
class MoveWords:
    """The elements that one rank sends and receives in the forward pass of a move or a sum; in backward it is the reverse.

    early: it has message buffers of its own.
    """

    sent: int
    received: int
    early: bool = False


@dataclass(frozen=True)
class LocalGraph:
    """The graph of one rank, for planning alone. Equal ones do the same work, whatever their places in their split groups.

    moves: by the tensor that a move or a sum writes.
    """

    key: Hashable
    graph: Graph = field(compare=False, repr=False)
    moves: Mapping[int, MoveWords] = field(compare=False, default_factory=dict)


def whole_graph(graph: Graph) -> LocalGraph:
    """The graph of a rank that shares its samples with nobody."""
    return LocalGraph(_key(graph, {}), graph)


def local_graphs(partitioned: PartitionedGraph, ranks: Sequence[int]) -> list[LocalGraph]:
    """The graphs of some ranks of the split group, in a time that grows as the ranks do."""
    group = unused_group()
    moves: dict[int, tuple[tuple[int, ...], tuple[int, ...], bool]] = {}
    for step in partitioned.steps:
        if step.move is not None:
            sent, returned = moved(*step.move), moved_back(*step.move)
            moves[step.output] = (returned, sent, False) if step.summed else (sent, returned, step.early)
    graphs = []
    for rank in ranks:
        graph = partitioned.local(rank, group)
        words = {tensor: MoveWords(sent[rank], received[rank], early) for tensor, (sent, received, early) in moves.items()}
        graphs.append(LocalGraph(_key(graph, words), graph, words))
    return graphs


@lru_cache(maxsize=_PLANS)
def training_plan(local: LocalGraph, kernels: KernelSet) -> ExecutionPlan:
    """The plan of a training program, the same object for equal graphs; it is not for running, as its steps share operators."""
    return compile_graph(local.graph, _shared(kernels), training=True)


class _SharedOperators(KernelSet):
    """Operators of another kernel set, each made once: the same layer comes in many blocks of a network, and on many ranks."""

    def __init__(self, kernels: KernelSet) -> None:
        self.arithmetic, self.alignment_bytes, self.shadow_dtype = (
            kernels.arithmetic,
            kernels.alignment_bytes,
            kernels.shadow_dtype,
        )
        self._kernels = kernels
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
def _shared(kernels: KernelSet) -> _SharedOperators:
    return _SharedOperators(kernels)


def _key(graph: Graph, moves: Mapping[int, MoveWords]) -> Hashable:
    """All that the work of a graph follows from."""
    return (graph.tensors, graph.output, tuple(_node_key(node, moves.get(node.output)) for node in graph.nodes))


def _node_key(node: Node, words: MoveWords | None) -> Hashable:
    spec = node.spec
    decides: Hashable
    if words is not None:  # the layouts of all ranks are the same in each; what this one sends is not
        decides = type(spec).__name__, words
    elif isinstance(spec, DropoutSpec):  # where a mask begins is no work
        decides = replace(spec, first_sample=0, origin=(0,) * len(spec.origin))
    else:
        decides = spec if isinstance(spec, Hashable) else repr(spec)
    names = tuple(node.parameters.items()), tuple(node.statistics.items())
    return (node.name, decides, node.inputs, node.output, names, node.input_first, node.shared, node.frozen)
