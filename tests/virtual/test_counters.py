"""Counts are exact, per communicator and operation, and their mean is the formula."""

from collections.abc import Sequence

import numpy as np
import pytest

from hpctrain.comm.base import Communicator
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.counters import Count, Counters, CountingCommunicator
from hpctrain.virtual.run import run_virtual, wait

everywhere = pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7, 8])


def counted(ranks: int, program, seed: int | None = 3) -> Sequence[Counters]:
    """The counters of every rank after `program(counting communicator)`."""

    def run(comm: ThreadCommunicator) -> Counters:
        counters = Counters()
        program(CountingCommunicator(comm, counters))
        return counters

    return run_virtual(ranks, run, seed=seed)


@everywhere
@pytest.mark.parametrize("n", [0, 1, 49, 225])
def test_the_mean_over_ranks_is_the_formula(ranks: int, n: int) -> None:
    """(P-1)/P n, twice that for an allreduce, in integers also where P does not divide n or n < P."""
    counts = [n // ranks + (rank < n % ranks) for rank in range(ranks)]

    def program(comm: Communicator) -> None:
        whole, mine = np.zeros(n, np.float32), np.zeros(counts[comm.rank], np.float32)
        wait(comm.iallreduce(whole), comm.ireduce_scatter(whole.copy(), mine, counts))
        wait(comm.iallgather(mine, whole, counts), comm.ibroadcast(whole.copy(), ranks // 2))

    results = counted(ranks, program)
    for operation, factor in (("iallreduce", 2), ("ireduce_scatter", 1), ("iallgather", 1), ("ibroadcast", 1)):
        each = [counters["world", operation] for counters in results]
        assert sum(count.exchanged_bytes for count in each) == factor * (ranks - 1) * 4 * n
        assert {(count.operations, count.payload_bytes) for count in each} == {(1, 4 * n)}


@everywhere
def test_uneven_parts_are_counted_as_they_are(ranks: int) -> None:
    counts = [3 * rank for rank in range(ranks)]
    total = sum(counts)

    def program(comm: Communicator) -> None:
        send, received = np.zeros(total), np.zeros(counts[comm.rank] * ranks)
        wait(comm.ialltoall(send, received, counts, [counts[comm.rank]] * ranks))
        wait(comm.ireduce_scatter(send, np.zeros(counts[comm.rank]), counts), comm.iallgather(None, send.copy(), counts))

    for rank, counters in enumerate(counted(ranks, program)):
        for operation in ("ialltoall", "ireduce_scatter", "iallgather"):
            assert counters["world", operation] == Count(1, 8 * total, 8 * (total - counts[rank]))


def test_messages_are_the_senders() -> None:
    def program(comm: Communicator) -> None:
        wait(comm.isend(np.zeros(3), (comm.rank + 1) % 3, 0), comm.irecv(np.zeros(3), (comm.rank - 1) % 3, 0))
        wait(comm.isend(np.zeros(3), comm.rank, 0), comm.irecv(np.zeros(3), comm.rank, 0))

    for counters in counted(3, program):
        assert counters["world", "isend"] == Count(2, 48, 24)
        assert counters["world", "irecv"] == Count(2, 0, 0)


def test_communicators_are_told_apart_by_name() -> None:
    def program(comm: Communicator) -> None:
        split = comm.split(comm.rank // 2, comm.rank, "split")
        node = comm.split_shared_memory("node")
        assert split is not None
        assert comm.split(None, 0, "nobody") is None
        assert (split.name, split.size, split.rank) == ("split", 2, comm.rank % 2)
        wait(split.iallreduce(np.zeros(2)), split.iallreduce(np.zeros(4)), comm.iallreduce(np.zeros(4)), node.ibarrier())
        assert comm.allgather_object(comm.rank) == [0, 1, 2, 3]
        assert comm.broadcast_object("value", 1) == "value"

    for counters in counted(4, program):
        assert counters["split", "iallreduce"] == Count(2, 48, 48)
        assert counters["world", "iallreduce"] == Count(1, 32, 48)
        assert counters.total("split") == counters["split", "iallreduce"]
        assert counters.total(operation="iallreduce") == Count(3, 80, 96)
        assert counters.total().operations == 6
        assert list(counters) == [
            ("node", "ibarrier"),
            ("split", "iallreduce"),
            ("world", "allgather_object"),
            ("world", "broadcast_object"),
            ("world", "iallreduce"),
        ]
        assert counters["nobody", "iallreduce"] == Count()


def test_since_a_snapshot_gives_one_step() -> None:
    counters = Counters()
    counters.add("world", "isend", 5, 5)
    counters.add("world", "ibarrier")
    before = counters.snapshot()
    counters.add("world", "isend", 7, 6)
    step = counters.since(before)
    assert list(step) == [("world", "isend")]
    assert step["world", "isend"] == Count(1, 7, 6)
    assert before["world", "isend"] == Count(1, 5, 5)


def test_it_is_a_communicator_and_abort_reaches_the_inner_one() -> None:
    def program(comm: ThreadCommunicator) -> None:
        counting = CountingCommunicator(comm, Counters())
        assert isinstance(counting, Communicator)
        counting.abort(3)

    with pytest.raises(SystemExit):
        run_virtual(1, program)
