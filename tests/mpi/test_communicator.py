"""Every operation of the MPI communicator equals its definition, written with NumPy over what all ranks hold."""

import numpy as np
import pytest

from hpctrain.comm.base import Communicator, Handle
from hpctrain.comm.progress import ProgressEngine

RANKS = [1, 2, 3, 4]
DTYPES = ["float32", "float64", "int32", "int64", "uint8", "uint16"]


def _values(rank: int, size: int, dtype: str) -> np.ndarray:
    """What rank `rank` holds; small whole numbers, so that sums are exact in every type and order."""
    return np.random.default_rng((rank, size)).integers(0, 50, size).astype(dtype)


def _counts(size: int, seed: int = 0) -> list[int]:
    """Uneven parts, one of them empty where there are several."""
    counts = [7 * r + 3 for r in range(size)]
    if size > 1:
        counts[seed % size] = 0
    return counts


def _wait(progress: ProgressEngine, handle: Handle) -> None:
    progress.wait_handle(handle, "test")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("elements", [0, 1, 225])
@pytest.mark.parallel(RANKS)
def test_allreduce_sums_in_place(world: Communicator, progress: ProgressEngine, elements: int, dtype: str) -> None:
    buffer = _values(world.rank, elements, dtype)
    _wait(progress, world.iallreduce(buffer))
    expected = np.sum([_values(r, elements, dtype) for r in range(world.size)], axis=0).astype(dtype)
    np.testing.assert_array_equal(buffer, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("empty", [0, 1])
@pytest.mark.parallel(RANKS)
def test_reduce_scatter_gives_each_rank_its_part(world: Communicator, progress: ProgressEngine, empty: int, dtype: str) -> None:
    counts = _counts(world.size, empty)
    recv = np.zeros(counts[world.rank], dtype)
    _wait(progress, world.ireduce_scatter(_values(world.rank, sum(counts), dtype), recv, counts))
    total = np.sum([_values(r, sum(counts), dtype) for r in range(world.size)], axis=0).astype(dtype)
    begin = sum(counts[: world.rank])
    np.testing.assert_array_equal(recv, total[begin : begin + recv.size])


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parallel(RANKS)
def test_allgather_joins_parts_in_rank_order(world: Communicator, progress: ProgressEngine, dtype: str, in_place: bool) -> None:
    counts = _counts(world.size, 1)
    mine = _values(world.rank, counts[world.rank], dtype)
    recv = np.zeros(sum(counts), dtype)
    if in_place:
        begin = sum(counts[: world.rank])
        recv[begin : begin + mine.size] = mine
    _wait(progress, world.iallgather(None if in_place else mine, recv, counts))
    np.testing.assert_array_equal(recv, np.concatenate([_values(r, counts[r], dtype) for r in range(world.size)]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parallel(RANKS)
def test_all_to_all_transposes(world: Communicator, progress: ProgressEngine, dtype: str) -> None:
    def part(source: int, dest: int) -> np.ndarray:
        return _values(10 * source + dest, (3 * source + 2 * dest) % 5, dtype)

    ranks = range(world.size)
    send, expected = [part(world.rank, r) for r in ranks], [part(r, world.rank) for r in ranks]
    recv = np.zeros(sum(p.size for p in expected), dtype)
    handle = world.ialltoall(np.concatenate(send), recv, [p.size for p in send], [p.size for p in expected])
    _wait(progress, handle)
    np.testing.assert_array_equal(recv, np.concatenate(expected))


@pytest.mark.parallel(RANKS)
def test_all_to_all_in_one_memory_where_some_send_or_receive_nothing(world: Communicator, progress: ProgressEngine) -> None:
    ranks = range(world.size)
    memory = np.zeros(12 * world.size)
    for sender in ranks:  # one rank to all others, then all others to it: empty buffers begin where full ones do
        for sends in ([r == sender for r in ranks], [r != sender for r in ranks]):
            out = [3 if sends[world.rank] and not sends[r] else 0 for r in ranks]
            into = [3 if sends[r] and not sends[world.rank] else 0 for r in ranks]
            send, recv = memory[: sum(out)], memory[sum(out) : sum(out) + sum(into)]
            send[...], recv[...] = world.rank + 1, 0
            _wait(progress, world.ialltoall(send, recv, out, into))
            np.testing.assert_array_equal(recv, np.repeat(np.arange(world.size) + 1.0, into))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parallel(RANKS)
def test_broadcast_from_every_root(world: Communicator, progress: ProgressEngine, dtype: str) -> None:
    for root in range(world.size):
        buffer = _values(world.rank, 9, dtype)
        _wait(progress, world.ibroadcast(buffer, root))
        np.testing.assert_array_equal(buffer, _values(root, 9, dtype))


@pytest.mark.parallel(RANKS)
def test_messages_match_by_tag(world: Communicator, progress: ProgressEngine) -> None:
    left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    received = {tag: np.zeros(tag, np.float32) for tag in (5, 0, 7)}
    queue = progress.queue(world)
    tickets = [
        queue.post(lambda tag=tag, buffer=buffer: world.irecv(buffer, left, tag), "receive") for tag, buffer in received.items()
    ]
    for tag in (7, 5, 0):
        sent = _values(world.rank, tag, "float32")
        tickets.append(queue.post(lambda sent=sent, tag=tag: world.isend(sent, right, tag), "send"))
    progress.wait(tickets)
    for tag, buffer in received.items():
        np.testing.assert_array_equal(buffer, _values(left, tag, "float32"))


@pytest.mark.parallel(RANKS)
def test_multidimensional_buffers_travel_whole(world: Communicator, progress: ProgressEngine) -> None:
    buffer = np.full((2, 3, 5), world.rank + 1.0)
    _wait(progress, world.iallreduce(buffer))
    np.testing.assert_array_equal(buffer, np.full((2, 3, 5), world.size * (world.size + 1) / 2))


@pytest.mark.parallel([2, 3])
def test_strided_buffers_are_refused(world: Communicator) -> None:
    strided = np.zeros((4, 4))[:, 1]
    with pytest.raises(AssertionError, match="contiguous"):
        world.iallreduce(strided)
    with pytest.raises(AssertionError, match="contiguous"):
        world.isend(strided, 0, 0)


@pytest.mark.parallel(RANKS)
def test_float_sums_repeat_and_agree_bit_by_bit(world: Communicator, progress: ProgressEngine) -> None:
    """Rounding depends on the order of a sum: whichever rank comes late, the order stays."""
    source = np.random.default_rng(world.rank).standard_normal(20011).astype(np.float32) * np.float32(3.0) ** world.rank
    counts = [source.size // world.size + (r < source.size % world.size) for r in range(world.size)]
    sums, parts = set(), set()
    for turn in range(2 * world.size):
        if turn % world.size == world.rank:  # late by some computing
            np.linalg.norm(np.random.default_rng(turn).standard_normal((200, 200)))
        total, part = source.copy(), np.zeros(counts[world.rank], np.float32)
        _wait(progress, world.iallreduce(total))
        _wait(progress, world.ireduce_scatter(source, part, counts))
        sums.add(total.tobytes())
        parts.add(part.tobytes())
    assert len(sums) == len(parts) == 1
    assert len(set(world.allgather_object(sums.pop()))) == 1


@pytest.mark.parallel(RANKS)
def test_objects(world: Communicator) -> None:
    value = {"rank": world.rank, "long": "x" * 1000 * world.rank, "none": None}
    gathered = world.allgather_object(value)
    assert [g["rank"] for g in gathered] == list(range(world.size))
    assert [len(g["long"]) for g in gathered] == [1000 * r for r in range(world.size)]
    for root in range(world.size):
        assert world.broadcast_object(("from", world.rank), root) == ("from", root)


@pytest.mark.parallel(RANKS)
def test_split_groups_by_color_and_orders_by_key(world: Communicator, progress: ProgressEngine) -> None:
    part = world.split(world.rank % 2, -world.rank, "parity")
    assert part is not None
    members = [r for r in range(world.size) if r % 2 == world.rank % 2][::-1]
    assert (part.name, part.size, part.rank) == ("parity", len(members), members.index(world.rank))
    assert part.allgather_object(world.rank) == members


@pytest.mark.parallel(RANKS)
def test_split_without_color_gives_nothing(world: Communicator) -> None:
    part = world.split(0 if world.rank == 0 else None, 0, "first")
    assert (part is None) == (world.rank != 0)


@pytest.mark.parallel(RANKS)
def test_one_node_holds_all_ranks_of_this_machine(world: Communicator) -> None:
    node = world.split_shared_memory("node")
    assert (node.rank, node.size) == (world.rank, world.size)


@pytest.mark.parallel(RANKS)
def test_it_is_a_communicator(world: Communicator) -> None:
    assert isinstance(world, Communicator)
    assert isinstance(world.ibarrier(), Handle)
