"""The line that tells which cores the ranks run on."""

from __future__ import annotations

import os

import pytest

from hpctrain.comm.single import SingleCommunicator
from hpctrain.experiment.cores import cores_of_ranks, describe_cores, ranges


@pytest.mark.parametrize(
    ("numbers", "text"),
    [({0, 1, 2, 5}, "0-2,5"), ({3}, "3"), ({7, 6, 64, 65}, "6-7,64-65"), (set(), ""), ({0, 2, 4}, "0,2,4")],
)
def test_numbers_are_written_as_people_do(numbers: set[int], text: str) -> None:
    assert ranges(numbers) == text


def _masks(*texts: range) -> list[frozenset[int]]:
    return [frozenset(cores) for cores in texts]


@pytest.mark.parametrize(
    ("cpus", "node_of", "line"),
    [
        (_masks(range(8)), [0], "0-7"),
        (_masks(range(8), range(8, 16)), [0, 0], "0-7 | 8-15"),
        (_masks(range(2), range(2)), [0, 0], "0-1, shared by 2 ranks"),
        (_masks(range(2), range(2, 4)) * 3, [0, 0, 1, 1, 2, 2], "0-1 | 2-3 on each of 3 nodes"),
        (_masks(range(2), range(2), range(2, 4), range(2, 4)), [0, 1, 0, 1], "0-1 | 2-3 on each of 2 nodes"),  # dealt out in turn
        (_masks(range(2), range(2, 4), range(4)), [0, 0, 1], "0-1 | 2-3 (ranks 0-1); 0-3 (rank 2)"),
    ],
)
def test_nodes_that_are_alike_are_told_once(cpus: list[frozenset[int]], node_of: list[int], line: str) -> None:
    assert describe_cores(cpus, node_of) == f"cores of the ranks: {line}"


def test_many_ranks_of_a_node_are_shortened() -> None:
    line = describe_cores(_masks(*(range(2 * rank, 2 * rank + 2) for rank in range(64))), [0] * 64)
    assert line == "cores of the ranks: 0-1 | 2-3 | 4-5 | 6-7 | 8-9 | 10-11 | 12-13 | ... | 126-127"


def test_many_kinds_of_node_are_shortened() -> None:
    line = describe_cores(_masks(*(range(rank + 1) for rank in range(9))), list(range(9)))
    assert line.endswith("0-3 (rank 3); and 5 more kinds of node")


def test_the_line_is_about_what_the_system_says() -> None:
    assert cores_of_ranks(SingleCommunicator(), (0,)) == f"cores of the ranks: {ranges(os.sched_getaffinity(0))}"
