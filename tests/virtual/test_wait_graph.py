"""A reported cycle is one, and one is reported exactly where there is one."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.virtual.wait_graph import find_cycle

graphs = st.integers(1, 7).flatmap(
    lambda size: st.fixed_dictionaries({node: st.lists(st.integers(0, size - 1), max_size=size) for node in range(size)})
)


def has_cycle(edges: dict[int, list[int]]) -> bool:
    """By taking away nodes that wait for nobody who is left."""
    left = dict(edges)
    while free := [node for node, others in left.items() if not any(other in left for other in others)]:
        for node in free:
            del left[node]
    return bool(left)


@given(graphs)
def test_find_cycle(edges: dict[int, list[int]]) -> None:
    cycle = find_cycle(edges)
    assert bool(cycle) == has_cycle(edges)
    if cycle:
        assert cycle[0] == cycle[-1]
        assert len(set(cycle)) == len(cycle) - 1
        assert all(second in edges[first] for first, second in pairwise(cycle))
