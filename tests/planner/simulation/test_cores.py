"""Ranks share cores where there are fewer of them."""

import pytest

from hpctrain.planner.simulation.cores import Cores
from hpctrain.planner.simulation.event_loop import EventLoop


def _ends(count: float, ranks: int, *works: tuple[float, float], waiting: float = 0.0, charged: float = 0.0) -> list[float]:
    loop = EventLoop()
    cores, ends = Cores(loop, count, ranks), [0.0] * len(works)
    cores.begin_wait(waiting)
    cores.charge(charged, 1)
    for number, (seconds, weight) in enumerate(works):
        cores.run(seconds, weight, lambda number=number: ends.__setitem__(number, loop.now))  # type: ignore[misc]
    loop.run()
    return ends


def test_ranks_with_cores_of_their_own_disturb_nobody() -> None:
    assert _ends(4, 4, (1.0, 4), (2.0, 4), waiting=4, charged=1.0) == [1.0, 2.0]


def test_two_ranks_on_one_core_take_twice_as_long() -> None:
    assert _ends(1, 2, (1.0, 1), (1.0, 1)) == pytest.approx([2.0, 2.0])
    assert _ends(1, 2, (1.0, 2)) == pytest.approx([2.0])


def test_a_rank_whose_neighbour_waits_has_nearly_all_of_the_core() -> None:
    (end,) = _ends(1, 2, (1.0, 1), waiting=1)
    assert 1.0 < end < 1.1


def test_charged_work_is_taken_from_others() -> None:
    assert _ends(1, 2, (1.0, 1), charged=0.5) == pytest.approx([1.5])
