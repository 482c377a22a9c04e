"""Processes stand for all ranks, each rank for one class."""

from __future__ import annotations

from collections import Counter

import pytest

from hpctrain.errors import ConfigError
from hpctrain.planner.simulation.places import MOST_PLACES, MOST_SINGLE_RANKS, class_of_ranks, places
from hpctrain.planner.tasks import RankClass, StepProgram
from tests.support.simulated import placement


def _program(split: int, *classes: tuple[int, int]) -> StepProgram:
    """Classes of (ranks, first split rank)."""
    ranks = sum(count for count, _ in classes)
    return StepProgram(
        tuple(RankClass(f"class {k}", count, begin, 1, ()) for k, (count, begin) in enumerate(classes)),
        {},
        placement(ranks),
        placement(split),
        placement(ranks // split),
    )


@pytest.mark.parametrize(
    ("split", "classes", "expected"),
    [
        (1, [(4, 0)], [0, 0, 0, 0]),
        (2, [(2, 0), (2, 1)], [0, 1, 0, 1]),
        (1, [(1, 0), (3, 0)], [0, 1, 1, 1]),  # the first data rank has one sample more
        (4, [(2, 0), (4, 1), (2, 3)], [0, 1, 1, 2, 0, 1, 1, 2]),
        (4, [(4, 0), (4, 1)], [0, 1, 1, 0, 0, 1, 1, 0]),  # both ends of an image are alike
        (2, [(1, 0), (2, 0), (1, 1), (2, 1)], [0, 2, 1, 3, 1, 3]),
    ],
)
def test_ranks_have_the_classes_of_their_places(split: int, classes: list[tuple[int, int]], expected: list[int]) -> None:
    assert class_of_ranks(_program(split, *classes)) == expected


@pytest.mark.parametrize("ranks_per_node", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    "program", [_program(1, (8, 0)), _program(2, (1, 0), (3, 0), (4, 1)), _program(4, (2, 0), (4, 1), (2, 3))], ids="abc"
)
def test_every_rank_is_in_one_process(program: StepProgram, ranks_per_node: int) -> None:
    folded = places(program, ranks_per_node)
    counts: Counter[str] = Counter()
    for place in folded:
        counts[place.rank_class.name] += place.ranks
        assert 0 < place.node_ranks <= ranks_per_node
    assert counts == {one.name: one.ranks for one in program.classes}
    single = places(program, ranks_per_node, single=True)
    assert [place.first_rank for place in single] == list(range(8))
    assert {place.rank_class.name for place in single} == set(counts)


def test_many_ranks_are_few_processes() -> None:
    (place,) = places(_program(1, (8192, 0)), 32)
    assert (place.ranks, place.node_ranks) == (8192, 32)
    assert len(places(_program(4, (2048, 0), (4096, 1), (2048, 3)), 32)) == 3


def test_too_many_single_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match=f"1,024 ranks .* {MOST_SINGLE_RANKS} ranks"):
        places(_program(1, (1024, 0)), 32, single=True)


def test_nodes_that_differ_in_too_many_ways_count_as_alike() -> None:
    classes = [(50, row) for row in range(20)]
    program = _program(20, *classes[:7], *((count, row) for row in range(7, 20) for count in (20, 30)))
    folded = places(program, 32)
    assert len(folded) <= MOST_PLACES
    assert sum(place.ranks for place in folded) == 1000
    assert {place.node for place in folded} == {folded[0].node}
    assert sum(place.node_ranks for place in folded) == pytest.approx(1000 / 32, rel=0.03)  # of 32 nodes, the last is not full
    few = places(program, 1000)
    assert len({place.node for place in few}) == 1
