"""Every collective among virtual ranks against its serial definition, promptly and adversarially."""

from collections.abc import Sequence

import numpy as np
import pytest

from hpctrain.comm.base import Handle
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, wait

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
def test_reduce_scatter_gives_each_rank_its_part_of_the_sum(ranks: int, seed: int | None, key: int) -> None:
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
def test_allgather_gives_everyone_all_parts(ranks: int, seed: int | None, in_place: bool) -> None:
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
def test_broadcast_from_every_root(ranks: int, seed: int | None) -> None:
    def program(comm: ThreadCommunicator) -> list[np.ndarray]:
        buffers = [values((comm.rank, root), 9) for root in range(ranks)]
        wait(*[comm.ibroadcast(buffer, root) for root, buffer in enumerate(buffers)])
        return buffers

    for buffers in run_virtual(ranks, program, seed=seed):
        for root, buffer in enumerate(buffers):
            np.testing.assert_array_equal(buffer, values((root, root), 9))


@everywhere
@seeded
def test_nobody_leaves_a_barrier_before_all_have_come(ranks: int, seed: int | None) -> None:
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
