"""A model at given shapes, as data: nodes in forward order over numbered tensors, and the fusion of neighbouring nodes.

Layers lower themselves into a graph, kernel sets fuse its nodes and choose layouts, and a program plans memory and runs it. A
graph is pure data: the same on every rank, printable, and testable without arrays.

Fusion rewrites the graph in the same way on every rank. Conv -> ReLU, linear -> ReLU, BN -> ReLU, BN -> add -> ReLU and add ->
ReLU become one node each, if no other node reads the intermediate tensors, if the kernel set has an operator for the fused node,
and if the BN is not synchronised. The order in which parameters are used does not change: if two batch norms are added, the later
one is fused, and only if no parameters are used between it and the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from hpctrain.backend.specs import (
    AddSpec,
    BatchNormSpec,
    Conv2dSpec,
    DropoutSpec,
    LinearSpec,
    ReluSpec,
    Spec,
    TensorSpec,
    WithRelu,
)

_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Node:
    """One operation of the graph.

    Attributes:
        name: dotted name of the layer.
        inputs: numbers of the input tensors.
        output: number of the output tensor.
        parameters: full names of the parameters, by role.
        statistics: full names of the statistics, by role.
        input_first: whether the input's gradient is computed before the parameters', because it is sent to other ranks.
        frozen: whether the parameters are not trained and have no gradients.
    """

    name: str
    spec: Spec
    inputs: tuple[int, ...]
    output: int
    parameters: Mapping[str, str] = field(default_factory=lambda: _NONE)
    statistics: Mapping[str, str] = field(default_factory=lambda: _NONE)
    input_first: bool = False
    frozen: bool = False

    @property
    def trains(self) -> bool:
        """Whether backward computes gradients of parameters."""
        return bool(self.parameters) and not self.frozen


@dataclass(frozen=True)
class Graph:
    """Nodes in forward order, over numbered tensors: 0 is the input, `output` the last one. Fusion leaves tensors unused."""

    nodes: tuple[Node, ...]
    tensors: tuple[TensorSpec, ...]
    output: int

    def consumers(self, tensor: int) -> tuple[Node, ...]:
        """Return the nodes that read `tensor`, in forward order."""
        return tuple(node for node in self.nodes if tensor in node.inputs)

    def producer(self, tensor: int) -> Node | None:
        """Return the node that writes `tensor`; None for the input, and for a tensor that fusion has removed."""
        return next((node for node in self.nodes if node.output == tensor), None)


class GraphBuilder:
    """Collector of the nodes that layers emit while they lower themselves."""

    def __init__(self, x: TensorSpec) -> None:
        self._nodes: list[Node] = []
        self._tensors: list[TensorSpec] = [x]

    def tensor(self, number: int) -> TensorSpec:
        """Return the spec of a tensor emitted so far; number 0 is the input."""
        return self._tensors[number]

    def emit(
        self,
        name: str,
        spec: Spec,
        inputs: tuple[int, ...],
        *,
        parameters: Mapping[str, str] = _NONE,
        statistics: Mapping[str, str] = _NONE,
        input_first: bool = False,
        frozen: bool = False,
    ) -> int:
        """Append a node (arguments: see `Node`), and return the number of its output.

        Raises:
            ShapeError: the inputs do not fit the spec. The message begins with the layer's name.
        """
        try:
            output = spec.output(*(self._tensors[i] for i in inputs))
        except Exception as error:
            error.args = (f"Layer {name}: {error}",)
            raise
        self._tensors.append(output)
        number = len(self._tensors) - 1
        self._nodes.append(Node(name, spec, inputs, number, parameters, statistics, input_first, frozen))
        return number

    def build(self, output: int) -> Graph:
        return Graph(tuple(self._nodes), tuple(self._tensors), output)


def fuse(graph: Graph, products: tuple[type, ...] = (Conv2dSpec, LinearSpec), *, training: bool = True) -> Graph:
    """Return the graph with fused nodes.

    Args:
        products: spec types that are fused with a following ReLU into a `WithRelu`.
        training: whether the graph is for training; False also removes stochastic depth.
    """
    nodes = list(graph.nodes) if training else _without_stochastic_depth(graph)
    for relu in graph.nodes:
        if isinstance(relu.spec, ReluSpec):
            _absorb_relu(nodes, relu, graph.output, products)
    return replace(graph, nodes=tuple(nodes))


def _without_stochastic_depth(graph: Graph) -> list[Node]:
    """Return the nodes without stochastic depth.

    In evaluation it is the identity, but it would prevent the fusion of a batch norm with the following sum.
    """
    nodes: list[Node] = []
    stands_for: dict[int, int] = {}
    for node in graph.nodes:
        inputs = tuple(stands_for.get(tensor, tensor) for tensor in node.inputs)
        if isinstance(node.spec, DropoutSpec) and node.spec.per_sample and node.output != graph.output:
            stands_for[node.output] = inputs[0]
        else:
            nodes.append(replace(node, inputs=inputs))
    return nodes


def _absorb_relu(nodes: list[Node], relu: Node, output: int, products: tuple[type, ...]) -> None:
    before = _only_producer(nodes, relu.inputs[0], output)
    if before is None:
        return
    if isinstance(before.spec, AddSpec):
        _absorb_sum(nodes, before, relu, output)
    elif isinstance(before.spec, BatchNormSpec) and not before.spec.synchronised and not before.spec.relu:
        _replace(nodes, before, relu, replace(before.spec, relu=True))
    elif isinstance(before.spec, Conv2dSpec | LinearSpec) and isinstance(before.spec, products):
        _replace(nodes, before, relu, WithRelu(before.spec))


def _replace(nodes: list[Node], node: Node, relu: Node, spec: Spec) -> None:
    nodes[nodes.index(node)] = replace(node, spec=spec, output=relu.output)
    nodes.remove(relu)


def _absorb_sum(nodes: list[Node], add: Node, relu: Node, output: int) -> None:
    norms = [_norm_to_fuse(nodes, tensor, output) for tensor in add.inputs]
    positions = [nodes.index(norm) if norm is not None else -1 for norm in norms]
    later = positions.index(max(positions))
    norm = norms[later]
    if norm is None or any(node.parameters for node in nodes[nodes.index(norm) + 1 : nodes.index(add)]):
        fused = replace(add, spec=AddSpec(relu=True), output=relu.output)
    else:
        assert isinstance(norm.spec, BatchNormSpec)
        spec = replace(norm.spec, relu=True, add=True)
        fused = replace(norm, spec=spec, inputs=(*norm.inputs, add.inputs[1 - later]), output=relu.output)
        nodes.remove(norm)
    nodes[nodes.index(add)] = fused
    nodes.remove(relu)


def _norm_to_fuse(nodes: list[Node], tensor: int, output: int) -> Node | None:
    norm = _only_producer(nodes, tensor, output)
    if norm is None or not isinstance(norm.spec, BatchNormSpec) or norm.spec.relu or norm.spec.synchronised:
        return None
    return norm


def _only_producer(nodes: list[Node], tensor: int, output: int) -> Node | None:
    """Return the node that writes `tensor`; None unless exactly one node reads it and it is not the graph's output."""
    readers = sum(node.inputs.count(tensor) for node in nodes)
    if readers != 1 or tensor == output:
        return None
    return next((node for node in nodes if node.output == tensor), None)
