"""Layers one after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.backend.graph import GraphBuilder
from hpctrain.core.errors import ConfigError
from hpctrain.nn.layers import Layer, join


class Sequential(Layer):
    """The composition of its children, first to last.

    Args:
        layers: name -> layer; a plain sequence is named "0", "1", ... . Empty: the identity.

    Raises:
        ConfigError: a name that is empty or contains a dot.
    """

    def __init__(self, layers: Mapping[str, Layer] | Sequence[Layer]) -> None:
        named = layers if isinstance(layers, Mapping) else {str(i): layer for i, layer in enumerate(layers)}
        check_names(named)
        self._children = dict(named)

    def children(self) -> Mapping[str, Layer]:
        return self._children

    def lower(self, graph: GraphBuilder, x: int, name: str) -> int:
        for child_name, child in self._children.items():
            x = child.lower(graph, x, join(name, child_name))
        return x


def check_names(layers: Mapping[str, Layer]) -> None:
    """Child names are parts of dotted names.

    Raises:
        ConfigError: a name that is empty or contains a dot.
    """
    for name in layers:
        if not name or "." in name:
            nearest = name.replace(".", "_") or "0"
            raise ConfigError(f"A layer cannot be named {name!r}: a name is not empty and has no dot, such as {nearest!r}.")
