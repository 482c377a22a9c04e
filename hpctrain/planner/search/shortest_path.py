"""Find Pareto-optimal shortest paths through layers of states, with several costs per edge.

Gholami et al., SPAA 2018, choose the parallelism of each layer by its cost and the cost of the redistribution before it, which is
a shortest path over (layer, choice). Here, a step takes the longer of the times of program and messages, so a single sum does not
determine the best path. Any rule that increases with both costs selects a Pareto-optimal path. `lower_bound` bounds the costs of
incomplete paths.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar, cast

Choice = TypeVar("Choice")
State = TypeVar("State", bound=Hashable)
Costs = tuple[float, ...]


@dataclass(frozen=True)
class Edge(Generic[Choice, State]):
    """Edge from a state, with its choice, its costs and the next state."""

    choice: Choice
    costs: Costs
    state: State


@dataclass(frozen=True)
class ShortestPath(Generic[Choice]):
    """Path with one choice per layer, and its costs."""

    choices: tuple[Choice, ...]
    costs: Costs


@dataclass(frozen=True)
class _Label(Generic[Choice]):
    costs: Costs
    choice: Choice | None
    before: _Label[Choice] | None

    def choices(self) -> tuple[Choice, ...]:
        """Return the choices, beginning with the first layer."""
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
    most: int = 64,
) -> tuple[ShortestPath[Choice], ...]:
    """Return the Pareto-optimal paths, in ascending order of the costs.

    The result is exact if no state is reached by more than `most` Pareto-optimal partial paths. Otherwise, `most` of them are
    kept, at equal distances in this order.

    Args:
        start: state before the first layer.
        edges: function from (layer, state) to the edges from it. All edges have the same number of costs, and no cost is
            negative.
        hopeless: function from (number of layers done, partial costs) to whether the path can be pruned.
        most: maximum number of paths kept per state.
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
        reached = {state: _thinned(unbeaten(labels, attrgetter("costs")), most) for state, labels in following.items()}
    ends = unbeaten([label for labels in reached.values() for label in labels], attrgetter("costs"))
    return tuple(ShortestPath(label.choices(), label.costs) for label in ends)


Item = TypeVar("Item")


def unbeaten(items: Sequence[Item], costs_of: Callable[[Item], Costs]) -> list[Item]:
    """Return the Pareto-optimal items in ascending order of costs; of items with equal costs, only the first."""
    best: list[Item] = []
    best_costs: list[Costs] = []
    in_order = sorted(((costs_of(item), number) for number, item in enumerate(items)))
    for costs, number in in_order:
        # Later items are not smaller in the first cost. With two costs, the last kept item has the smallest second cost.
        rivals = best_costs[-1:] if len(costs) == 2 else best_costs
        if not any(all(rival <= cost for rival, cost in zip(other, costs, strict=True)) for other in rivals):
            best.append(items[number])
            best_costs.append(costs)
    return best


def _thinned(labels: list[_Label[Choice]], most: int) -> list[_Label[Choice]]:
    if len(labels) <= most:
        return labels
    step = (len(labels) - 1) / (most - 1)
    return [labels[round(position * step)] for position in range(most)]


def lower_bound(edges: Mapping[tuple[int, Hashable], Sequence[Edge]], layers: int, length: int) -> Callable[[int, Costs], Costs]:
    """Return a function from (number of layers done, partial costs) to a lower bound of the complete path's costs.

    Args:
        edges: edges from each (layer, state).
        layers: number of layers.
        length: number of costs of each edge.
    """
    least = [[float("inf")] * length for _ in range(layers)]
    for (layer, _), of_state in edges.items():
        for edge in of_state:
            least[layer] = [min(known, cost) for known, cost in zip(least[layer], edge.costs, strict=True)]
    ahead: list[Costs] = [(0.0,) * length]
    for costs_of_layer in reversed(least):
        ahead.append(tuple(map(sum, zip(costs_of_layer, ahead[-1], strict=True))))
    ahead.reverse()

    def bound(layers_done: int, costs: Costs) -> Costs:
        """Return a lower bound of the costs of all completions of this path."""
        return tuple(map(sum, zip(costs, ahead[layers_done], strict=True)))

    return bound
