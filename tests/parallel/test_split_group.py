"""The split group of operators: pieces go where they belong, one buffer serves all exchanges, and waits are counted."""

import numpy as np
import pytest

from hpctrain.parallel.split_group import SplitGroup
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_an_exchange_is_a_transposition(ranks: int) -> None:
    """Piece r of rank q's message is piece q of what rank r has received, whatever the pieces' sizes; some are empty."""
    sizes = np.random.default_rng(ranks).integers(0, 4, (ranks, ranks))

    def program(comm: ThreadCommunicator) -> bool:
        group = SplitGroup(comm, virtual_engine(comm))
        assert (group.rank, group.size) == (comm.rank, comm.size)
        send_counts, recv_counts = sizes[comm.rank].tolist(), sizes[:, comm.rank].tolist()
        send = np.repeat(10.0 * comm.rank + np.arange(ranks), send_counts)
        recv = np.full(sum(recv_counts), -1.0)
        group.wait(group.alltoall(send, recv, send_counts, recv_counts, "pieces"))
        return np.array_equal(recv, np.repeat(10.0 * np.arange(ranks) + comm.rank, recv_counts))

    assert all(run_virtual(ranks, program, seed=1))


def test_the_buffer_grows_and_older_users_keep_theirs() -> None:
    def program(comm: ThreadCommunicator) -> None:
        group = SplitGroup(comm, virtual_engine(comm))
        small = group.reserve(8)
        assert np.shares_memory(group.reserve(5), small)
        small[...] = 7
        large = group.reserve(100)
        assert (large.size, group.buffer_bytes) == (100, 100)
        assert not np.shares_memory(large, small)
        assert small.tolist() == [7] * 8
        assert np.shares_memory(group.reserve(8), large)

    run_virtual(1, program)


def test_waits_for_exchanges_alone_are_counted() -> None:
    def program(comm: ThreadCommunicator) -> None:
        engine = virtual_engine(comm)
        group = SplitGroup(comm, engine)
        others = comm.split(0, comm.rank, "others")
        assert others is not None
        engine.wait_handle(others.ibarrier(), "others")
        assert group.waited_seconds == 0
        x = np.zeros(2)
        group.wait(group.alltoall(x, np.zeros(2), [1, 1], [1, 1], "pieces"))
        assert 0 <= group.waited_seconds <= engine.waited_seconds

    run_virtual(2, program)
