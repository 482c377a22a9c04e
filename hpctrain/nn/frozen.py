"""Frozen layers: their parameters stay what they are, and so do the running statistics of their batch norms.

A frozen layer has no gradients, so nothing of it is averaged and no optimiser keeps state for it; a batch norm computes as in
evaluation. Where no layer before it is trained, nothing goes back through it at all, and its activations are not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from hpctrain.backend.graph import Graph, Node
from hpctrain.backend.specs import BatchNormSpec
from hpctrain.core.errors import ConfigError
from hpctrain.nearest import nearest
from hpctrain.nn.layers import Layer


def frozen_layers(model: Layer, patterns: Sequence[str]) -> frozenset[str]:
    """The dotted names of the layers with parameters that one of the patterns matches. "*" matches dots, too.

    A layer is frozen as a whole: a pattern that matches its name, or that of one of its parameters, freezes them all.

    Raises:
        ConfigError: a pattern that matches nothing, or patterns that leave no layer to train.
    """
    names = {
        name: [name, *(f"{name}.{role}" for role in layer.parameters())] for name, layer in model.walk() if layer.parameters()
    }
    frozen: set[str] = set()
    for pattern in patterns:
        matching = {layer for layer, parameters in names.items() if any(fnmatchcase(name, pattern) for name in parameters)}
        if not matching:
            near = nearest(pattern, names)
            known = f"the nearest layer is {near}" if near is not None else f"layers are named as {next(iter(names), 'none')}"
            raise ConfigError(f'The pattern "{pattern}" of frozen layers matches no layer with parameters; {known}.')
        frozen |= matching
    if frozen and frozen == names.keys():
        raise ConfigError(
            f"The patterns of frozen layers {list(patterns)} match all {len(names)} layers with parameters, so that nothing is "
            f"trained; leave {list(names)[-1]} to be trained, at least."
        )
    return frozenset(frozen)


def with_frozen(graph: Graph, layers: frozenset[str]) -> Graph:
    """The same graph in which these layers are not trained."""
    return (
        replace(graph, nodes=tuple(_frozen(node) if node.name in layers else node for node in graph.nodes)) if layers else graph
    )


def layer_of(name: str) -> str:
    """The layer of a parameter or running statistic."""
    return name.rpartition(".")[0]


def _frozen(node: Node) -> Node:
    spec = node.spec
    if isinstance(spec, BatchNormSpec):
        spec = replace(spec, fixed=True, synchronised=False)
    return replace(node, spec=spec, frozen=True)
