"""Who reads and who receives which samples: every memory gets each sample once, whatever the numbers of ranks and nodes."""

from __future__ import annotations

from collections import Counter

import pytest

from hpctrain.data.filling_plan import FillingPlan

PLACES = [(0,), (0, 0, 0), (0, 1), (0, 0, 1, 1), (0, 1, 0, 1, 2), (0, 0, 0, 1), (2, 1, 0, 0)]


@pytest.mark.parametrize("memory_of", PLACES)
@pytest.mark.parametrize(("samples", "at_once"), [(0, 3), (1, 3), (7, 1), (40, 3), (36, 6), (5, 100)])
def test_every_memory_gets_each_sample_once(memory_of: tuple[int, ...], samples: int, at_once: int) -> None:
    plan = FillingPlan(samples, at_once, memory_of)
    read: list[int] = []
    got = {memory: Counter[int]() for memory in memory_of}
    for turn in range(plan.rounds):
        for rank, memory in enumerate(memory_of):
            mine = range(*plan.chunk(turn, rank))
            assert len(mine) <= at_once
            read += mine
            got[memory].update(mine)
            for receiver in plan.receivers(turn, rank):
                assert rank in plan.senders(turn, receiver)
                got[memory_of[receiver]].update(mine)
            for sender in plan.senders(turn, rank):
                assert rank in plan.receivers(turn, sender)
    assert sorted(read) == list(range(samples))
    assert all(counts == Counter(range(samples)) for counts in got.values())


def test_the_ranks_of_a_node_receive_in_turn() -> None:
    plan = FillingPlan(1_000, 1, (0, 1, 1, 1))
    assert {plan.receivers(turn, 0) for turn in range(3)} == {(1,), (2,), (3,)}
    assert plan.rounds == 250
