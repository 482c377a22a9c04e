"""Layers: single-process descriptions of a model, lowered into a graph of specs.

A layer declares its parameters and says which operation it is; it holds no arrays and knows no rank. What runs it is a
`Program`, with operators of the chosen kernel set. Parallelism, fusion and layouts work on the graph and leave layers alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar

from hpctrain.backend.graph import GraphBuilder
from hpctrain.backend.specs import Spec, TensorSpec, Window
from hpctrain.nn.parameter import ParameterSpec, StatisticSpec


def join(prefix: str, name: str) -> str:
    """Dotted name of a child; the root's name is empty."""
    return f"{prefix}.{name}" if prefix else name


class Layer(ABC):
    """A differentiable map. Leaves implement `spec`; containers implement `children` and `lower`."""

    #: spatial reach, set by windowed leaves; None = pointwise or not spatial
    window: Window | None = None
    #: child names are joined to the parent's; a transparent container adds nothing of its own
    transparent: ClassVar[bool] = False

    def parameters(self) -> Mapping[str, ParameterSpec]:
        """Declared parameters by role ("weight", "bias"), in torchvision's order."""
        return {}

    def statistics(self) -> Mapping[str, StatisticSpec]:
        """Declared running statistics by role."""
        return {}

    def children(self) -> Mapping[str, Layer]:
        """Child layers by name, in forward order."""
        return {}

    @abstractmethod
    def lower(self, graph: GraphBuilder, x: int, name: str) -> int:
        """Append this layer's nodes for input tensor `x`; give the number of the output tensor.

        Raises:
            ShapeError: the input does not fit; the message names the layer.
        """

    def walk(self, prefix: str = "") -> Iterator[tuple[str, Layer]]:
        """(dotted name, layer) of this layer and all below, parents first, in forward order."""
        yield prefix, self
        for name, child in self.children().items():
            yield from child.walk(join(prefix, name))

    def output(self, x: TensorSpec) -> TensorSpec:
        """The output's spec for an input's."""
        graph = GraphBuilder(x)
        return graph.tensor(self.lower(graph, 0, type(self).__name__.lower()))

    def flops(self, x: TensorSpec) -> int:
        """Floating-point operations of one forward pass at this input."""
        builder = GraphBuilder(x)
        graph = builder.build(self.lower(builder, 0, type(self).__name__.lower()))
        return sum(node.spec.flops(*(graph.tensors[i] for i in node.inputs)) for node in graph.nodes)


class Leaf(Layer):
    """A layer that is one operation."""

    @abstractmethod
    def spec(self, name: str) -> Spec:
        """The operation; `name` is the layer's dotted name."""

    def lower(self, graph: GraphBuilder, x: int, name: str) -> int:
        return graph.emit(
            name,
            self.spec(name),
            (x,),
            parameters={role: join(name, role) for role in self.parameters()},
            statistics={role: join(name, role) for role in self.statistics()},
        )
