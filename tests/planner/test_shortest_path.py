"""Shortest paths are those of all paths that no other one beats: compared with every path there is."""

import itertools
import random

import pytest

from hpctrain.planner.shortest_path import Costs, Edge, shortest_paths, unbeaten

STATES, LAYERS = "ab", 5


def network(seed: int, costs: int) -> dict[tuple[int, str], list[Edge[str, str]]]:
    draw = random.Random(seed)
    return {
        (layer, state): [
            Edge(f"{layer}{state}{number}", tuple(float(draw.randrange(9)) for _ in range(costs)), draw.choice(STATES))
            for number in range(3)
        ]
        for layer in range(LAYERS)
        for state in STATES
    }


def all_paths(edges: dict[tuple[int, str], list[Edge[str, str]]]) -> dict[tuple[str, ...], Costs]:
    paths = {}
    for numbers in itertools.product(range(3), repeat=LAYERS):
        state, choices, sums = "a", [], None
        for layer, number in enumerate(numbers):
            edge = edges[layer, state][number]
            choices.append(edge.choice)
            sums = edge.costs if sums is None else tuple(map(sum, zip(sums, edge.costs, strict=True)))
            state = edge.state
        assert sums is not None
        paths[tuple(choices)] = sums
    return paths


@pytest.mark.parametrize("costs", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_paths_are_those_of_brute_force(seed: int, costs: int) -> None:
    edges = network(seed, costs)
    everything = all_paths(edges)
    best = shortest_paths(LAYERS, "a", lambda layer, state: edges[layer, state], most=10_000)
    assert {path.costs for path in best} == set(unbeaten(list(everything.values()), lambda one: one))
    assert [path.costs for path in best] == sorted(path.costs for path in best)
    for path in best:
        assert everything[path.choices] == path.costs


@pytest.mark.parametrize("seed", range(5))
def test_a_rule_that_rises_with_all_costs_finds_its_best(seed: int) -> None:
    edges = network(seed, 2)
    best = shortest_paths(LAYERS, "a", lambda layer, state: edges[layer, state])
    everything = all_paths(edges).values()
    for rule in (max, sum, lambda costs: max(costs[0], costs[1] + costs[0] / 3)):
        assert min(rule(path.costs) for path in best) == min(map(rule, everything))


def test_hopeless_paths_are_left_out() -> None:
    edges = network(0, 1)
    best = shortest_paths(LAYERS, "a", lambda layer, state: edges[layer, state], hopeless=lambda layer, costs: costs[0] > 0)
    assert all(path.costs == (0.0,) for path in best)


def test_what_cannot_matter_is_not_compared() -> None:
    edges = network(1, 2)
    best = shortest_paths(LAYERS, "a", lambda layer, state: edges[layer, state], compared=lambda layer, costs: costs[:1])
    assert [path.costs[0] for path in best] == [min(costs[0] for costs in all_paths(edges).values())]


def test_no_more_paths_are_kept_than_asked_for() -> None:
    line = {(layer, "a"): [Edge(k, (float(k), float(9 - k)), "a") for k in range(10)] for layer in range(3)}
    assert len(shortest_paths(3, "a", lambda layer, state: line[layer, state], most=4)) <= 4


def test_unbeaten_items_are_the_first_of_equals() -> None:
    assert unbeaten([(2.0, 1.0), (1.0, 2.0), (2.0, 2.0), (1.0, 2.0)], lambda one: one) == [(1.0, 2.0), (2.0, 1.0)]


def test_a_choice_may_be_none() -> None:
    (path,) = shortest_paths(2, "a", lambda layer, state: [Edge(None, (1.0,), "a")])
    assert path.choices == (None, None)
