"""Residual block."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.backend.graph import GraphBuilder
from hpctrain.backend.specs import AddSpec
from hpctrain.core.errors import ConfigError
from hpctrain.nn.layers import Layer, join
from hpctrain.nn.layers_parts.relu import ReLU
from hpctrain.nn.layers_parts.sequential import check_names

_SUM = "add"


class Residual(Layer):
    """y = activation(body(x) + shortcut(x)) (He et al. 2016, eq. 1 and 2).

    Children are the body's layers under their own names, then the shortcut and the activation under theirs.

    Args:
        body: name -> layer, one after another.
        shortcut: None is the identity.
        shortcut_name: the shortcut's child name; torchvision's is "downsample".
        activation: after the sum; None: nothing.
        activation_name: the activation's child name.

    Raises:
        ConfigError: a name that is empty, has a dot, or occurs twice ("add" is the sum's).
    """

    def __init__(
        self,
        body: Mapping[str, Layer],
        shortcut: Layer | None = None,
        *,
        shortcut_name: str = "downsample",
        activation: ReLU | None = None,
        activation_name: str = "relu",
    ) -> None:
        self._body = dict(body)
        self._shortcut = {} if shortcut is None else {shortcut_name: shortcut}
        self._activation = {} if activation is None else {activation_name: activation}
        names = [*self._body, *self._shortcut, *self._activation, _SUM]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"A residual block has two parts named {twice!r}; call one of them '{twice}_1'.")
        check_names(self.children())

    def children(self) -> Mapping[str, Layer]:
        return {**self._body, **self._shortcut, **self._activation}

    def lower(self, graph: GraphBuilder, x: int, name: str) -> int:
        body = _chain(self._body, graph, x, name)
        shortcut = _chain(self._shortcut, graph, x, name)
        total = graph.emit(join(name, _SUM), AddSpec(), (body, shortcut))
        return _chain(self._activation, graph, total, name)


def _chain(layers: Mapping[str, Layer], graph: GraphBuilder, x: int, name: str) -> int:
    for child_name, child in layers.items():
        x = child.lower(graph, x, join(name, child_name))
    return x
