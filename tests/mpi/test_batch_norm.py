"""Merged batch statistics over real ranks: the same bits everywhere, those of all samples together."""

import numpy as np
import pytest

from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.parallel.batch_norm import RankStatistics


@pytest.mark.parallel([1, 2, 3, 4])
def test_uneven_shares(world: Communicator, progress: ProgressEngine) -> None:
    own = world.split(0, world.rank, "statistics")
    assert own is not None
    merger = RankStatistics(own, progress)
    counts = [5 * rank for rank in range(world.size)]  # rank 0 has none
    parts = [1e4 + np.random.default_rng(rank).standard_normal((count, 9)) for rank, count in enumerate(counts)]
    mine = parts[world.rank]
    mean = mine.mean(axis=0) if len(mine) else np.full(9, np.nan)
    m2 = ((mine - mean) ** 2).sum(axis=0)
    assert merger.merge(len(mine), mean, m2) == sum(counts)
    assert len(set(world.allgather_object((mean.tobytes(), m2.tobytes())))) == 1
    everything = np.concatenate(parts)
    if len(everything):
        np.testing.assert_allclose(mean, everything.mean(axis=0), rtol=1e-13)
        np.testing.assert_allclose(m2, len(everything) * everything.var(axis=0), rtol=1e-10)
    values = np.array([world.rank, 1.0])
    merger.sum(values)
    np.testing.assert_array_equal(values, [world.size * (world.size - 1) / 2, world.size])
