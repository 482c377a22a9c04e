"""Every operation of virtual ranks against its serial definition, promptly and adversarially, and its counters."""

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest

from hpctrain.comm.base import Communicator, Handle
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.counters import Count, Counters, CountingCommunicator
from hpctrain_testing.virtual.operations import Allgather, Allreduce, Broadcast, Moments, Posting, RankState, SourceLine
from hpctrain_testing.virtual.run import run_virtual, wait

RANKS = (1, 2, 3, 5, 7, 8)
DTYPES = ("float32", "float64", "int32", "int64", "uint8", "uint16")
SEEDS = (None, 0, 1, 2)
everywhere = pytest.mark.parametrize("ranks", RANKS)
seeded = pytest.mark.parametrize("seed", SEEDS)


def values(key: tuple[int, ...], size: int, dtype: str = "float64") -> np.ndarray:
    """The same small whole numbers wherever they are asked for, so that sums are exact in every type."""
    return np.random.default_rng(key).integers(0, 9, size).astype(dtype)


def uneven(key: int, ranks: int, most: int = 5) -> list[int]:
    """Counts with zeros among them."""
    return [int(count) for count in np.random.default_rng(key).integers(0, most, ranks)]


def starts(counts: Sequence[int]) -> list[int]:
    return [sum(counts[:rank]) for rank in range(len(counts))]


@everywhere
@seeded
@pytest.mark.parametrize("dtype", DTYPES)
def test_allreduce_is_the_sum(ranks: int, seed: int | None, dtype: str) -> None:
    sizes = (0, 1, 225)

    def program(comm: ThreadCommunicator) -> list[np.ndarray]:
        buffers = [values((comm.rank, size), size, dtype) for size in sizes]
        wait(*[comm.iallreduce(buffer) for buffer in buffers])
        return buffers

    expected = [sum(values((rank, size), size, dtype) for rank in range(ranks)) for size in sizes]
    for buffers in run_virtual(ranks, program, seed=seed):
        for buffer, total in zip(buffers, expected, strict=True):
            assert buffer.dtype == dtype
            np.testing.assert_array_equal(buffer, total)


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
@pytest.mark.parametrize("key", [0, 1])
def test_reduce_scatter_returns_its_part_of_the_sum_on_each_rank(ranks: int, seed: int | None, key: int) -> None:
    counts = uneven(key, ranks)

    def program(comm: ThreadCommunicator) -> np.ndarray:
        send, recv = values((comm.rank,), sum(counts)), np.full(counts[comm.rank], -1.0)
        wait(comm.ireduce_scatter(send, recv, counts))
        np.testing.assert_array_equal(send, values((comm.rank,), sum(counts)))
        return recv

    total = sum(values((rank,), sum(counts)) for rank in range(ranks))
    for recv, start, count in zip(run_virtual(ranks, program, seed=seed), starts(counts), counts, strict=True):
        np.testing.assert_array_equal(recv, total[start : start + count])


@everywhere
@seeded
@pytest.mark.parametrize("in_place", [False, True])
def test_allgather_returns_all_parts_on_every_rank(ranks: int, seed: int | None, in_place: bool) -> None:
    counts = uneven(3, ranks)
    start = starts(counts)

    def program(comm: ThreadCommunicator) -> np.ndarray:
        mine, recv = values((comm.rank,), counts[comm.rank]), np.full(sum(counts), -1.0)
        if in_place:
            recv[start[comm.rank] : start[comm.rank] + counts[comm.rank]] = mine
        wait(comm.iallgather(None if in_place else mine, recv, counts))
        return recv

    expected = np.concatenate([values((rank,), count) for rank, count in enumerate(counts)])
    for recv in run_virtual(ranks, program, seed=seed):
        np.testing.assert_array_equal(recv, expected)


@everywhere
@seeded
def test_alltoall_transposes_the_parts(ranks: int, seed: int | None) -> None:
    counts = [uneven(10 + rank, ranks) for rank in range(ranks)]  # counts[s][r] go from s to r
    sends = [values((rank,), sum(counts[rank])) for rank in range(ranks)]

    def program(comm: ThreadCommunicator) -> np.ndarray:
        recv_counts = [counts[other][comm.rank] for other in range(ranks)]
        recv = np.full(sum(recv_counts), -1.0)
        wait(comm.ialltoall(sends[comm.rank].copy(), recv, counts[comm.rank], recv_counts))
        return recv

    for rank, recv in enumerate(run_virtual(ranks, program, seed=seed)):
        begin = [starts(counts[other])[rank] for other in range(ranks)]
        pieces = [sends[other][begin[other] : begin[other] + counts[other][rank]] for other in range(ranks)]
        np.testing.assert_array_equal(recv, np.concatenate(pieces))


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
def test_messages_of_one_channel_keep_their_order(ranks: int, seed: int | None) -> None:
    """Of the same source and tag in order; other tags and the rank itself do not matter."""

    def program(comm: ThreadCommunicator) -> list[list[np.ndarray]]:
        handles: list[Handle] = []
        received = [[np.full(3, -1.0) for _ in range(4)] for _ in range(ranks)]
        for other in range(ranks):
            for number in range(4):
                handles.append(comm.isend(values((comm.rank, other, number), 3), other, number % 2))
            for number in (1, 3, 0, 2):  # tag 1 first: each tag is a channel of its own
                handles.append(comm.irecv(received[other][number], other, number % 2))
        wait(*handles)
        return received

    for rank, received in enumerate(run_virtual(ranks, program, seed=seed)):
        for other in range(ranks):
            for number in range(4):
                np.testing.assert_array_equal(received[other][number], values((other, rank, number), 3))


@seeded
def test_buffers_of_any_contiguous_shape(seed: int | None) -> None:

    def program(comm: ThreadCommunicator) -> np.ndarray:
        image = values((comm.rank,), 24).reshape(2, 3, 4)
        recv = np.full((3, 2), 7.0)
        wait(comm.iallreduce(image), comm.iallgather(np.full((1, 2), 1.0 * comm.rank), recv, [2, 2, 2]))
        np.testing.assert_array_equal(recv, [[0, 0], [1, 1], [2, 2]])
        return image

    expected = sum(values((rank,), 24) for rank in range(3)).reshape(2, 3, 4)
    for image in run_virtual(3, program, seed=seed):
        np.testing.assert_array_equal(image, expected)


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


def test_a_virtual_rank_has_a_communicator_with_handles() -> None:
    def program(comm: ThreadCommunicator) -> None:
        assert isinstance(comm, Communicator)
        handle = comm.ibarrier()
        assert isinstance(handle, Handle)
        wait(handle)
        assert handle.test()
        assert handle.test()

    run_virtual(2, program)


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


LINE = SourceLine("program.py", 1)
choices = pytest.mark.parametrize("moments", [Moments(*flags) for flags in product((False, True), repeat=3)])


def posting(rank: RankState, contribution: np.ndarray | None, target: np.ndarray | None) -> Posting:
    return Posting("call", rank, "text", LINE, (), contribution, target)


@choices
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_a_sum_in_place(moments: Moments, dtype: str) -> None:
    ranks = [RankState(rank) for rank in range(2)]
    buffers = [np.full(3, 1 + rank, dtype) for rank in range(2)]
    operation = Allreduce(ranks, "0 on world")
    for rank, buffer in enumerate(buffers):
        operation.post(rank, posting(ranks[rank], buffer, buffer), moments)
        if moments.read_early and moments.scramble:
            assert not np.isin(buffer, (1, 2, 3)).any()
        else:
            assert (buffer == 1 + rank).all()
    if not moments.scramble:
        for buffer in buffers:
            buffer[:] = 10  # counts only where buffers are read late
    expected = 3 if moments.read_early or moments.scramble else 20
    operation.move()
    early = [buffer.copy() for buffer in buffers]
    if moments.write_early:
        assert all((buffer == expected).all() for buffer in early)
        buffers[0][:] = 50
    elif moments.scramble:
        assert not any(np.isin(buffer, (1, 2, 3)).any() for buffer in early)
    else:
        assert all((buffer == 10).all() for buffer in early)
    assert [operation.deliver(party).complete for party in (1, 0)] == [True, True]
    assert (buffers[1] == expected).all()
    assert (buffers[0] == (50 if moments.write_early else expected)).all()


@choices
def test_garbage_spares_the_part_in_place_until_it_is_read(moments: Moments) -> None:
    ranks = [RankState(rank) for rank in range(2)]
    buffers = [np.array([1.0, 0.0, 0.0]), np.array([0.0, 2.0, 3.0])]
    operation = Allgather(ranks, "0 on world")
    for rank, part in enumerate((slice(0, 1), slice(1, 3))):
        mine = buffers[rank][part].copy()
        operation.post(rank, posting(ranks[rank], buffers[rank][part], buffers[rank]), moments)
        if not moments.read_early:
            np.testing.assert_array_equal(buffers[rank][part], mine)
        assert np.isnan(buffers[rank]).sum() == (0 if not moments.scramble else 3 if moments.read_early else 3 - mine.size)
    for party in range(2):
        operation.deliver(party)
        np.testing.assert_array_equal(buffers[party], [1.0, 2.0, 3.0])


@choices
def test_a_root_that_runs_ahead(moments: Moments) -> None:
    ranks = [RankState(rank) for rank in range(3)]
    operation = Broadcast(ranks, "0 on world", root=1, synchronous=False)
    source, first, last = np.ones(2), np.zeros(2), np.zeros(2)
    operation.post(0, posting(ranks[0], None, first), moments)
    assert not operation.may_move()
    assert operation.absent() == [1]
    operation.post(1, posting(ranks[1], source, None), moments)
    assert operation.may_move()
    assert operation.deliver(1).owner is ranks[1]
    source[:] = 5.0  # the root is complete
    operation.post(2, posting(ranks[2], None, last), moments)
    operation.deliver(2)
    operation.deliver(0)
    np.testing.assert_array_equal([first, last], np.ones((2, 2)))


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


def test_since_a_snapshot_returns_one_step() -> None:
    counters = Counters()
    counters.add("world", "isend", 5, 5)
    counters.add("world", "ibarrier")
    before = counters.snapshot()
    counters.add("world", "isend", 7, 6)
    step = counters.since(before)
    assert list(step) == [("world", "isend")]
    assert step["world", "isend"] == Count(1, 7, 6)
    assert before["world", "isend"] == Count(1, 5, 5)


def test_abort_of_a_counting_communicator_reaches_the_inner_one() -> None:
    def program(comm: ThreadCommunicator) -> None:
        counting = CountingCommunicator(comm, Counters())
        assert isinstance(counting, Communicator)
        counting.abort(3)

    with pytest.raises(SystemExit):
        run_virtual(1, program)
