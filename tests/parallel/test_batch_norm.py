"""Merged statistics equal those of all samples together: uneven and empty shares, large offsets, any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm.base import Communicator
from hpctrain.parallel.batch_norm import RankStatistics, merge_moments
from hpctrain.virtual.run import run_virtual, virtual_engine


def _moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sum of squared deviations over the samples of x (n, C); rubbish where there are none."""
    if not len(x):
        return np.full(x.shape[1], np.nan), np.full(x.shape[1], np.inf)
    mean = x.mean(axis=0)
    return mean, ((x - mean) ** 2).sum(axis=0)


def _share(counts: list[int], channels: int, offset: float, seed: int) -> list[np.ndarray]:
    chance = np.random.default_rng(seed)
    return [offset + chance.standard_normal((count, channels)) for count in counts]


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(1, 5), st.sampled_from([0.0, -3.0, 1e6]), st.integers(0, 99)
)
def test_merged_moments_are_those_of_all_samples(counts: list[int], channels: int, offset: float, seed: int) -> None:
    parts = _share(counts, channels, offset, seed)
    means, m2s = zip(*map(_moments, parts), strict=True)
    total, mean, m2 = merge_moments(np.array(counts, np.float64), np.array(means), np.array(m2s))
    assert total == sum(counts)
    if total == 0:
        assert not mean.any()
        assert not m2.any()
        return
    expected_mean, expected_m2 = _moments(np.concatenate(parts))
    np.testing.assert_allclose(mean, expected_mean, rtol=1e-12, atol=1e-14)  # a mean near 0 is a difference of values near 1
    np.testing.assert_allclose(m2, expected_m2, rtol=1e-8, atol=1e-8)


def test_a_large_offset_does_not_cancel() -> None:
    """At an offset of 1e8 a float64 sum of squares has no digit of the variance left; the merged moments have ten."""
    parts = [np.array([[1.0], [2.0]]), np.array([[4.0]])]
    means, m2s = zip(*(_moments(part + 1e8) for part in parts), strict=True)
    _, mean, m2 = merge_moments(np.array([2.0, 1.0]), np.array(means), np.array(m2s))
    assert mean[0] - 1e8 == pytest.approx(7 / 3, rel=1e-7)
    assert m2[0] == pytest.approx(14 / 3, rel=1e-10)


def test_groups_of_equal_values_have_no_spread() -> None:
    _, mean, m2 = merge_moments(np.array([3.0, 5.0, 1.0]), np.full((3, 2), 0.1), np.zeros((3, 2)))
    assert (mean == 0.1).all()
    assert (m2 == 0.0).all()


@pytest.mark.parametrize("counts", [[7], [4, 3], [0, 9, 2], [1, 0, 0, 6, 2], [0, 0, 0]])
def test_ranks_agree_bit_by_bit_and_with_one_process(counts: list[int]) -> None:
    parts = _share(counts, 3, 5.0, seed=len(counts))

    def program(comm: Communicator) -> tuple[int, bytes, bytes]:
        merger = RankStatistics(comm, virtual_engine(comm))  # type: ignore[arg-type]
        totals = []
        for _ in range(2):  # buffers are used again
            mean, m2 = _moments(parts[comm.rank])
            totals.append((merger.merge(len(parts[comm.rank]), mean, m2), mean.tobytes(), m2.tobytes()))
        assert totals[0] == totals[1]
        return totals[0]

    results = run_virtual(len(counts), program, seed=1)
    assert len(set(results)) == 1
    total, mean, m2 = results[0]
    assert total == sum(counts)
    if total:
        expected = _moments(np.concatenate(parts))
        np.testing.assert_allclose(np.frombuffer(mean), expected[0], rtol=1e-13)
        np.testing.assert_allclose(np.frombuffer(m2), expected[1], rtol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_sums_go_over_the_ranks_and_agree_bit_by_bit(ranks: int) -> None:
    values = [np.random.default_rng(rank).standard_normal((2, 7)) * 10.0**rank for rank in range(ranks)]

    def program(comm: Communicator) -> bytes:
        mine = values[comm.rank].copy()
        RankStatistics(comm, virtual_engine(comm)).sum(mine)  # type: ignore[arg-type]
        return mine.tobytes()

    results = run_virtual(ranks, program, seed=2)
    assert len(set(results)) == 1
    np.testing.assert_allclose(np.frombuffer(results[0]).reshape(2, 7), sum(values), rtol=1e-13)


def test_statistics_wait_behind_what_their_queue_holds() -> None:
    """The order on one communicator is that of posting, so a merge never overtakes a gradient that stands before it."""

    def program(comm: Communicator) -> float:
        engine = virtual_engine(comm)  # type: ignore[arg-type]
        gradient, values = np.full(4, comm.rank + 1.0), np.array([float(comm.rank)])
        ticket = engine.queue(comm).post(lambda: comm.iallreduce(gradient), "gradient")
        RankStatistics(comm, engine).sum(values)
        engine.wait(ticket)
        assert (gradient == 6.0).all()
        return float(values[0])

    assert run_virtual(3, program, seed=3) == [3.0, 3.0, 3.0]
