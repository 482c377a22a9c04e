"""Every operation of virtual ranks against its serial definition, promptly and adversarially, and its counters."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from hpctrain.comm.base import Communicator, Handle
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.counters import Count, Counters, CountingCommunicator
from hpctrain_testing.virtual.run import run_virtual, wait

RANKS = (1, 2, 3, 5, 7, 8)
SEEDS = (None, 0, 1, 2)
everywhere = pytest.mark.parametrize("ranks", RANKS)
seeded = pytest.mark.parametrize("seed", SEEDS)


@seeded
def test_sums_are_in_rank_order_and_the_same_bits_everywhere(seed: int | None) -> None:
    parts = [np.random.default_rng(rank).standard_normal(49).astype(np.float32) for rank in range(7)]
    expected = parts[0].copy()
    for part in parts[1:]:
        expected += part

    def program(comm: ThreadCommunicator) -> tuple[np.ndarray, np.ndarray]:
        whole, send, mine = parts[comm.rank].copy(), parts[comm.rank].copy(), np.empty(7, np.float32)
        wait(comm.iallreduce(whole), comm.ireduce_scatter(send, mine, [7] * 7))
        return whole, mine

    results = run_virtual(7, program, seed=seed)
    for whole, _ in results:
        assert whole.tobytes() == expected.tobytes()
    assert b"".join(mine.tobytes() for _, mine in results) == expected.tobytes()


@everywhere
@seeded
def test_no_rank_leaves_a_barrier_before_all_have_come(ranks: int, seed: int | None) -> None:
    came = [0] * ranks

    def program(comm: ThreadCommunicator) -> None:
        for lap in range(1, 4):
            came[comm.rank] = lap
            wait(comm.ibarrier())
            assert min(came) >= lap

    run_virtual(ranks, program, seed=seed)


@everywhere
@seeded
def test_split_orders_by_key_and_talks_apart(ranks: int, seed: int | None) -> None:
    def program(comm: ThreadCommunicator) -> tuple[int, int, float] | None:
        part = comm.split(None if comm.rank == 4 else comm.rank % 3, -comm.rank, "data")
        whole = np.array([1.0])
        handle = comm.iallreduce(whole)  # travels at the same time as the part's own
        if part is None:
            wait(handle)
            return None
        assert part.name == "data"
        total = np.array([float(comm.rank)])
        again = part.split(part.rank // 2, part.rank, "cell")
        assert again is not None
        pair = np.array([float(part.rank)])
        wait(part.iallreduce(total), again.iallreduce(pair), handle)
        assert whole[0] == ranks
        assert pair[0] == sum(range(part.size)[part.rank // 2 * 2 :][:2])
        return part.rank, part.size, total[0]

    results = run_virtual(ranks, program, seed=seed)
    for rank, result in enumerate(results):
        members = [other for other in range(ranks - 1, -1, -1) if other % 3 == rank % 3 and other != 4]
        assert result == (None if rank == 4 else (members.index(rank), len(members), sum(members)))


@pytest.mark.parametrize("per_node", [None, 1, 2, 4, 9])
def test_split_shared_memory_makes_nodes(per_node: int | None) -> None:
    def program(comm: ThreadCommunicator) -> list[int]:
        reordered = comm.split(0, -comm.rank, "reordered")
        assert reordered is not None
        here = reordered.split_shared_memory("node")  # by world rank, in the order of the communicator that is split
        assert here.name == "node"
        node: list[int] = here.allgather_object(comm.rank)
        return node

    node = 7 if per_node is None else per_node
    for rank, members in enumerate(run_virtual(7, program, ranks_per_node=per_node)):
        assert members == [other for other in reversed(range(7)) if other // node == rank // node]


@everywhere
@seeded
def test_objects_are_copies_in_rank_order(ranks: int, seed: int | None) -> None:
    def program(comm: ThreadCommunicator) -> None:
        mine = {"rank": comm.rank, "list": [comm.rank] * comm.rank}
        everyone = comm.allgather_object(mine)
        assert everyone == [{"rank": rank, "list": [rank] * rank} for rank in range(ranks)]
        everyone[comm.rank]["list"].append("changed")
        assert mine["list"] == [comm.rank] * comm.rank
        for root in range(ranks):
            assert comm.broadcast_object(mine if comm.rank == root else "not sent", root)["rank"] == root

    run_virtual(ranks, program, seed=seed)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda comm, x: comm.iallreduce(x[::2]), "C-contiguous"),
        (lambda comm, x: comm.iallreduce(x.astype(np.float16)), "float16"),
        (lambda comm, x: comm.iallreduce([1.0]), "list"),
        (lambda comm, x: comm.ireduce_scatter(x, x[:4].copy(), [4, 5]), "must have 9 elements, the sum of its counts, but has 8"),
        (lambda comm, x: comm.ireduce_scatter(x, x[4:], [4, 4]), "overlap"),
        (lambda comm, x: comm.ireduce_scatter(x, np.zeros(4, np.float32), [4, 4]), "float64 and float32"),
        (lambda comm, x: comm.ialltoall(x, np.zeros(9), [4, 4], [4, 4]), "but has 9"),
        (lambda comm, x: comm.iallgather(x[:4], x, [4, 4]), "overlap"),
        (lambda comm, x: comm.iallgather(None, x, [8]), "2 ranks"),
        (lambda comm, x: comm.iallgather(None, x, [9, -1]), "0 or more"),
        (lambda comm, x: comm.ibroadcast(x, 2), "ranks 0 to 1, but got rank 2"),
        (lambda comm, x: comm.isend(x, -1, 0), "got rank -1"),
        (lambda comm, x: comm.irecv(x, 0, -1), "must not be negative"),
        (lambda comm, x: comm.iallreduce(np.frombuffer(bytes(8))), "read-only"),
    ],
)
def test_unusable_arguments_are_refused_with_a_sentence(call: Callable[..., Handle], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        run_virtual(2, lambda comm: wait(call(comm, np.zeros(8))))


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


def test_communicators_are_distinguished_by_name() -> None:
    def program(comm: Communicator) -> None:
        split = comm.split(comm.rank // 2, comm.rank, "split")
        node = comm.split_shared_memory("node")
        assert split is not None
        assert comm.split(None, 0, "none") is None
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
        assert counters["none", "iallreduce"] == Count()
