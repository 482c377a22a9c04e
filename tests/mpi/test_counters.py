"""Counting over MPI: the operations work as without it, and the counts are those of virtual ranks."""

import numpy as np
import pytest

from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.virtual.counters import Count, Counters, CountingCommunicator


@pytest.mark.parallel([1, 2, 3, 4])
def test_counts_of_a_step(world: Communicator, progress: ProgressEngine) -> None:
    ranks, rank, counters = world.size, world.rank, Counters()
    comm = CountingCommunicator(world, counters)
    data = comm.split(0, rank, "data")
    assert data is not None
    counts = [2 * r + 1 for r in range(ranks)]
    n, start = sum(counts), rank**2
    send, mine, everyone, total = np.arange(n, dtype=np.float64), np.zeros(counts[rank]), np.zeros(n), np.ones(n)
    progress.wait_handle(data.ireduce_scatter(send, mine, counts), "reduce-scatter")
    np.testing.assert_array_equal(mine, ranks * send[start : start + counts[rank]])
    progress.wait_handle(data.iallgather(mine, everyone, counts), "allgather")
    np.testing.assert_array_equal(everyone, ranks * send)
    progress.wait_handle(comm.iallreduce(total), "allreduce")
    np.testing.assert_array_equal(total, np.full(n, ranks))
    others = Count(1, 8 * n, 8 * (n - counts[rank]))
    assert counters["data", "ireduce_scatter"] == counters["data", "iallgather"] == others
    assert counters["world", "iallreduce"] == Count(1, 8 * n, 16 * (n - (n // ranks + (rank < n % ranks))))
