"""Stand-ins behave as a group whose messages are complete at once, and as ranks that all hold the same."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.parallel.batch_norm import merge_moments
from hpctrain.planner.stand_ins import StandInGroup, StandInStatistics


def test_exchanges_are_complete_at_once_and_change_nothing() -> None:
    group = StandInGroup(1, 4)
    assert (group.rank, group.size) == (1, 4)
    send, recv = np.arange(4.0), np.full(4, 7.0)
    ticket = group.alltoall(send, recv, [2, 0, 2, 0], [1, 0, 1, 2], "move")
    assert ticket.done
    group.wait(ticket)
    assert (recv == 7.0).all()


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_merged_moments_are_those_of_equal_ranks(ranks: int) -> None:
    random = np.random.default_rng(0)
    mean, m2 = random.standard_normal(3), random.random(3)
    expected = merge_moments(np.full(ranks, 6.0), np.tile(mean, (ranks, 1)), np.tile(m2, (ranks, 1)))
    merger = StandInStatistics(ranks)
    assert merger.alone == (ranks == 1)
    total = merger.merge(6, mean, m2)
    assert total == expected[0] == 6 * ranks
    np.testing.assert_allclose(mean, expected[1])
    np.testing.assert_allclose(m2, expected[2])
    values = random.standard_normal(5)
    sums = ranks * values
    merger.sum(values)
    np.testing.assert_allclose(values, sums)


def test_ranks_without_samples_merge_to_nothing() -> None:
    mean, m2 = np.ones(2), np.ones(2)
    assert StandInStatistics(3).merge(0, mean, m2) == 0
    assert not mean.any()
