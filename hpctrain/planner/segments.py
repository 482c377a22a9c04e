"""A model's graph cut where a single tensor goes on: the parts of a network that take one choice each.

A chain is cut in front of each layer with weights; what follows it (batch norm, ReLU, pooling) goes with it. The branches of a
residual block meet before anything can be cut, so a block takes one choice for all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain.backend.graph import Graph, Node
from hpctrain.backend.specs import Conv2dSpec, LinearSpec


@dataclass(frozen=True)
class NetworkSegment:
    """Neighbouring nodes of a graph. start, stop: their positions. source, output: the one tensor that goes in, and out."""

    start: int
    stop: int
    source: int
    output: int

    def nodes(self, graph: Graph) -> tuple[Node, ...]:
        """The nodes, of this graph or of the same model's for another number of samples."""
        return graph.nodes[self.start : self.stop]


def segments(graph: Graph) -> tuple[NetworkSegment, ...]:
    """The segments of a graph in forward order; together all of its nodes."""
    merged: list[NetworkSegment] = []
    for piece in _pieces(graph):
        weighted = any(isinstance(node.spec, Conv2dSpec | LinearSpec) for node in piece.nodes(graph))
        first = not merged or not any(_is_weighted(node) for node in merged[0].nodes(graph))
        if merged and (not weighted or (len(merged) == 1 and first)):
            merged[-1] = NetworkSegment(merged[-1].start, piece.stop, merged[-1].source, piece.output)
        else:
            merged.append(piece)
    return tuple(merged)


def _is_weighted(node: Node) -> bool:
    return isinstance(node.spec, Conv2dSpec | LinearSpec)


def _pieces(graph: Graph) -> Iterator[NetworkSegment]:
    """The shortest stretches between tensors that alone go on."""
    last_reader: dict[int, int] = {}
    for position, node in enumerate(graph.nodes):
        for tensor in node.inputs:
            last_reader[tensor] = position
    start, source, reach = 0, 0, last_reader.get(0, -1)
    for position, node in enumerate(graph.nodes):
        if reach <= position:  # all tensors so far are read by now
            yield NetworkSegment(start, position + 1, source, node.output)
            start, source = position + 1, node.output
        reach = max(reach, last_reader.get(node.output, len(graph.nodes)))
