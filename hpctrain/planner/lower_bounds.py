"""Lower bounds of paths that are not complete: the least that the layers ahead can add to each cost."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.planner.shortest_path import Costs, Edge


@dataclass(frozen=True)
class Remaining:
    """least[k], most[k]: of layers k and beyond, each cost by itself, from any state."""

    least: tuple[Costs, ...]
    most: tuple[Costs, ...]

    def bound(self, layers_behind: int, costs: Costs) -> Costs:
        """No path that begins with these costs of so many layers ends with less."""
        return tuple(map(sum, zip(costs, self.least[layers_behind], strict=True)))


def remaining_costs(edges: Mapping[tuple[int, Hashable], Sequence[Edge]], layers: int, length: int) -> Remaining:
    """The bounds for a number of layers, whose edges have costs of a given length."""
    least = [[float("inf")] * length for _ in range(layers)]
    most = [[0.0] * length for _ in range(layers)]
    for (layer, _), of_state in edges.items():
        for edge in of_state:
            least[layer] = [min(known, cost) for known, cost in zip(least[layer], edge.costs, strict=True)]
            most[layer] = [max(known, cost) for known, cost in zip(most[layer], edge.costs, strict=True)]
    return Remaining(_sums_ahead(least, length), _sums_ahead(most, length))


def _sums_ahead(by_layer: Sequence[Sequence[float]], length: int) -> tuple[Costs, ...]:
    """For each layer, the sums over it and all layers behind it; at the end zeros."""
    ahead: list[Costs] = [(0.0,) * length]
    for costs in reversed(by_layer):
        ahead.append(tuple(map(sum, zip(costs, ahead[-1], strict=True))))
    return tuple(reversed(ahead))
