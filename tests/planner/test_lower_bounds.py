"""No path ends with less than the bound of how it begins, nor adds more than the most."""

import random

from hpctrain.planner.lower_bounds import remaining_costs
from hpctrain.planner.shortest_path import Edge


def test_bounds_hold_for_every_path() -> None:
    draw = random.Random(3)
    edges = {
        (layer, state): [Edge("", (draw.random(), draw.random()), draw.choice("ab")) for _ in range(3)]
        for layer in range(6)
        for state in "ab"
    }
    rest = remaining_costs(edges, 6, 2)
    for _ in range(100):
        state, begun = draw.choice("ab"), [(0.0, 0.0)]
        for layer in range(6):
            edge = draw.choice(edges[layer, state])
            begun.append((begun[-1][0] + edge.costs[0], begun[-1][1] + edge.costs[1]))
            state = edge.state
        for layer, costs in enumerate(begun):
            for dim, end in enumerate(begun[-1]):
                assert rest.bound(layer, costs)[dim] <= end + 1e-12
                assert end - costs[dim] <= rest.most[layer][dim] + 1e-12


def test_at_the_end_nothing_remains() -> None:
    rest = remaining_costs({(0, "a"): [Edge("", (2.0,), "a"), Edge("", (3.0,), "a")]}, 1, 1)
    assert rest.bound(1, (5.0,)) == (5.0,)
    assert rest.bound(0, (5.0,)) == (7.0,)
    assert rest.most == ((3.0,), (0.0,))
