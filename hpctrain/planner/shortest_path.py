"""Find shortest paths through layers of states by several costs at once: all paths that no other path beats in every cost.

Gholami et al., SPAA 2018, choose the parallelism of each layer by its cost and the redistribution in front of it, which is a
shortest path over (layer, choice). A step's time is the larger of what the program and the messages take, so one sum does
not determine the best path; the paths that are best by any rule that rises with both costs are those that no other path beats
in both. `remaining_costs` bounds from below what the layers ahead add to each cost.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

Choice = TypeVar("Choice")
State = TypeVar("State", bound=Hashable)
Costs = tuple[float, ...]


@dataclass(frozen=True)
class Edge(Generic[Choice, State]):
    """A step from a state: the choice, the costs that it adds and the state to which it leads."""

    choice: Choice
    costs: Costs
    state: State


@dataclass(frozen=True)
class ShortestPath(Generic[Choice]):
    """A path: its choices, one for each layer, and its costs."""

    choices: tuple[Choice, ...]
    costs: Costs


@dataclass(frozen=True)
class _Label(Generic[Choice]):
    costs: Costs
    choice: Choice | None
    before: _Label[Choice] | None

    def choices(self) -> tuple[Choice, ...]:
        """Return the choices from the first layer on."""
        reversed_choices: list[Choice] = []
        label: _Label[Choice] | None = self
        while label is not None and label.before is not None:  # the first label is the start, without a choice
            reversed_choices.append(cast(Choice, label.choice))
            label = label.before
        return tuple(reversed(reversed_choices))


def shortest_paths(
    layers: int,
    start: State,
    edges: Callable[[int, State], Iterable[Edge[Choice, State]]],
    *,
    hopeless: Callable[[int, Costs], bool] = lambda layer, costs: False,
    compared: Callable[[int, Costs], Costs] = lambda layer, costs: costs,
    most: int = 64,
) -> tuple[ShortestPath[Choice], ...]:
    """The paths that no other path beats in every cost, in ascending order of the costs.

    Exact while no state is reached by more than `most` such paths; beyond that, those that lie farthest apart are kept.

    Args:
        edges: (layer, state) -> the ways on. Costs have the same length everywhere and are not negative.
        hopeless: (number of layers behind, costs so far) -> no end of such a path can be of use.
        compared: (number of layers behind, costs so far) -> the costs that tell whether one path beats another: a cost that
            cannot matter in the end may be the same for all.
    """
    reached: dict[State, list[_Label[Choice]]] = {start: [_Label((), None, None)]}
    for layer in range(layers):
        following: dict[State, list[_Label[Choice]]] = {}
        for state, labels in reached.items():
            for edge in edges(layer, state):
                into = following.setdefault(edge.state, [])
                for label in labels:
                    costs = tuple(map(sum, zip(label.costs, edge.costs, strict=True))) if label.costs else edge.costs
                    if not hopeless(layer + 1, costs):
                        into.append(_Label(costs, edge.choice, label))
        reached = {state: _thinned(_unbeaten(layer + 1, labels, compared), most) for state, labels in following.items()}
    ends = _unbeaten(layers, [label for labels in reached.values() for label in labels], compared)
    return tuple(ShortestPath(label.choices(), label.costs) for label in ends)


def _unbeaten(layer: int, labels: Sequence[_Label[Choice]], compared: Callable[[int, Costs], Costs]) -> list[_Label[Choice]]:
    return unbeaten(labels, lambda label: compared(layer, label.costs))


Item = TypeVar("Item")


def unbeaten(items: Sequence[Item], costs_of: Callable[[Item], Costs]) -> list[Item]:
    """Return the items that no other item beats in all costs, of equals the first; in ascending order of costs."""
    kept: list[Item] = []
    kept_costs: list[Costs] = []
    in_order = sorted(((costs_of(item), number) for number, item in enumerate(items)))
    for costs, number in in_order:
        # Later items are no smaller in the first cost. With two costs, the last kept item has the least second cost.
        rivals = kept_costs[-1:] if len(costs) == 2 else kept_costs
        if not any(all(rival <= cost for rival, cost in zip(other, costs, strict=True)) for other in rivals):
            kept.append(items[number])
            kept_costs.append(costs)
    return kept


def _thinned(labels: list[_Label[Choice]], most: int) -> list[_Label[Choice]]:
    if len(labels) <= most:
        return labels
    step = (len(labels) - 1) / (most - 1)
    return [labels[round(position * step)] for position in range(most)]


@dataclass(frozen=True)
class Remaining:
    """Bounds of what the remaining layers add. least[k]: by layers k and beyond, each cost by itself, from any state."""

    least: tuple[Costs, ...]
    most: tuple[Costs, ...]

    def bound(self, layers_behind: int, costs: Costs) -> Costs:
        """Return a lower bound on any completion of this partial path."""
        return tuple(map(sum, zip(costs, self.least[layers_behind], strict=True)))


def remaining_costs(edges: Mapping[tuple[int, Hashable], Sequence[Edge]], layers: int, length: int) -> Remaining:
    """Return the bounds for a number of layers, whose edges have `length` costs."""
    least = [[float("inf")] * length for _ in range(layers)]
    most = [[0.0] * length for _ in range(layers)]
    for (layer, _), of_state in edges.items():
        for edge in of_state:
            least[layer] = [min(known, cost) for known, cost in zip(least[layer], edge.costs, strict=True)]
            most[layer] = [max(known, cost) for known, cost in zip(most[layer], edge.costs, strict=True)]
    return Remaining(_sums_ahead(least, length), _sums_ahead(most, length))


def _sums_ahead(by_layer: Sequence[Sequence[float]], length: int) -> tuple[Costs, ...]:
    """Return, for each layer, the sums over it and all layers after it; zeros at the end."""
    ahead: list[Costs] = [(0.0,) * length]
    for costs in reversed(by_layer):
        ahead.append(tuple(map(sum, zip(costs, ahead[-1], strict=True))))
    return tuple(reversed(ahead))
