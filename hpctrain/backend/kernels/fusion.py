"""Fusion as graph rewriting: pure data, the same on every rank.

Conv -> ReLU, linear -> ReLU, BN -> ReLU, BN -> add -> ReLU and add -> ReLU become one node each, where nobody else reads what
lies between, and where the kernel set has an operator for the product with its ReLU. The order in which parameters are used
does not change: of two batch norms that are added the later one is fused, and only where no parameters are used between it and
the sum.
"""

from __future__ import annotations

from dataclasses import replace

from hpctrain.backend.kernels.fused_specs import WithRelu
from hpctrain.backend.graph import Graph, Node
from hpctrain.backend.specs import AddSpec, BatchNormSpec, Conv2dSpec, DropoutSpec, LinearSpec, ReluSpec, Spec


def fuse(graph: Graph, products: tuple[type, ...] = (Conv2dSpec, LinearSpec), *, training: bool = True) -> Graph:
    """The graph with fused nodes. products: of the specs with which a ReLU becomes `WithRelu`."""
    nodes = list(graph.nodes) if training else _without_stochastic_depth(graph)
    for relu in graph.nodes:
        if isinstance(relu.spec, ReluSpec):
            _absorb_relu(nodes, relu, graph.output, products)
    return replace(graph, nodes=tuple(nodes))


def _without_stochastic_depth(graph: Graph) -> list[Node]:
    """The nodes without those that evaluation leaves out, which would stand between a batch norm and its sum."""
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
    if norm is None or _parameters_between(nodes, norm, add):
        fused = replace(add, spec=AddSpec(relu=True), output=relu.output)
    else:
        assert isinstance(norm.spec, BatchNormSpec)
        spec = replace(norm.spec, relu=True, add=True)
        fused = replace(norm, spec=spec, inputs=(*norm.inputs, add.inputs[1 - later]), output=relu.output)
        nodes.remove(norm)
    nodes[nodes.index(add)] = fused
    nodes.remove(relu)


def _parameters_between(nodes: list[Node], first: Node, last: Node) -> bool:
    return any(node.parameters for node in nodes[nodes.index(first) + 1 : nodes.index(last)])


def _norm_to_fuse(nodes: list[Node], tensor: int, output: int) -> Node | None:
    norm = _only_producer(nodes, tensor, output)
    if norm is None or not isinstance(norm.spec, BatchNormSpec) or norm.spec.relu or norm.spec.synchronised:
        return None
    return norm


def _only_producer(nodes: list[Node], tensor: int, output: int) -> Node | None:
    """The node that writes `tensor`, if exactly one node reads it and it is not the graph's output."""
    readers = sum(node.inputs.count(tensor) for node in nodes)
    if readers != 1 or tensor == output:
        return None
    return next((node for node in nodes if node.output == tensor), None)
