"""A model at given shapes, as data: nodes in forward order over numbered tensors.

Layers lower themselves into a graph, kernel sets fuse and choose layouts in it, the program plans memory and runs it.
A graph is pure data: the same on every rank, printable, and testable without arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hpctrain.backend.specs import Spec, TensorSpec

_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Node:
    """One operation of the graph.

    name: the layer's dotted name. inputs, output: tensor numbers. parameters, statistics: role -> full name.
    input_first: the input's gradient is computed before the parameters' (where it must travel to other ranks).
    shared: its parameters are also an earlier node's; their gradients add up.
    frozen: its parameters are not trained, and have no gradients.
    """

    name: str
    spec: Spec
    inputs: tuple[int, ...]
    output: int
    parameters: Mapping[str, str] = field(default_factory=lambda: _NONE)
    statistics: Mapping[str, str] = field(default_factory=lambda: _NONE)
    input_first: bool = False
    shared: bool = False
    frozen: bool = False

    @property
    def trains(self) -> bool:
        """It has parameters, and backward makes their gradients."""
        return bool(self.parameters) and not self.frozen


@dataclass(frozen=True)
class Graph:
    """Nodes in forward order; tensor 0 is the input, `output` the last one. Every tensor but 0 has one producer."""

    nodes: tuple[Node, ...]
    tensors: tuple[TensorSpec, ...]
    output: int

    def consumers(self, tensor: int) -> tuple[Node, ...]:
        """Nodes that read `tensor`, in forward order."""
        return tuple(node for node in self.nodes if tensor in node.inputs)

    def producer(self, tensor: int) -> Node | None:
        """The node that writes `tensor`; None for the input."""
        return next((node for node in self.nodes if node.output == tensor), None)


class GraphBuilder:
    """Collects nodes while layers lower themselves."""

    def __init__(self, x: TensorSpec) -> None:
        self._nodes: list[Node] = []
        self._tensors: list[TensorSpec] = [x]

    def tensor(self, number: int) -> TensorSpec:
        """The spec of a tensor made so far; number 0 is the input."""
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
        shared: bool = False,
        frozen: bool = False,
    ) -> int:
        """Append a node; give the number of its output.

        Raises:
            ShapeError: the inputs do not fit the spec (the message is prefixed with the layer's name).
        """
        try:
            output = spec.output(*(self._tensors[i] for i in inputs))
        except Exception as error:
            error.args = (f"Layer {name}: {error}",)
            raise
        self._tensors.append(output)
        number = len(self._tensors) - 1
        self._nodes.append(Node(name, spec, inputs, number, parameters, statistics, input_first, shared, frozen))
        return number

    def build(self, output: int) -> Graph:
        return Graph(tuple(self._nodes), tuple(self._tensors), output)
