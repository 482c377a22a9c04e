"""Every operation of virtual ranks against its serial definition, promptly and adversarially."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from hpctrain.comm.base import Communicator, Handle
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
        handle = comm.iallreduce(whole)  # travels beside the part's own
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


def test_it_is_a_communicator_and_its_handles_are_handles() -> None:
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
        (lambda comm, x: comm.ireduce_scatter(x, x[:4].copy(), [4, 5]), "as its counts say, 9, but this one has 8"),
        (lambda comm, x: comm.ireduce_scatter(x, x[4:], [4, 4]), "overlap"),
        (lambda comm, x: comm.ireduce_scatter(x, np.zeros(4, np.float32), [4, 4]), "float64 and float32"),
        (lambda comm, x: comm.ialltoall(x, np.zeros(9), [4, 4], [4, 4]), "this one has 9"),
        (lambda comm, x: comm.iallgather(x[:4], x, [4, 4]), "overlap"),
        (lambda comm, x: comm.iallgather(None, x, [8]), "2 ranks"),
        (lambda comm, x: comm.iallgather(None, x, [9, -1]), "0 or more"),
        (lambda comm, x: comm.ibroadcast(x, 2), "ranks 0 to 1, but got rank 2"),
        (lambda comm, x: comm.isend(x, -1, 0), "got rank -1"),
        (lambda comm, x: comm.irecv(x, 0, -1), "tag is not negative"),
        (lambda comm, x: comm.iallreduce(np.frombuffer(bytes(8))), "read-only"),
    ],
)
def test_unusable_arguments_are_refused_with_a_sentence(call: Callable[..., Handle], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        run_virtual(2, lambda comm: wait(call(comm, np.zeros(8))))


@pytest.mark.parametrize("seed", [None, 5])
def test_64_ranks(seed: int | None) -> None:
    """An 8 x 8 grid: split groups, data groups, neighbours and the world at once."""

    def program(comm: ThreadCommunicator) -> None:
        split = comm.split(comm.rank // 8, comm.rank, "split")
        data = comm.split(comm.rank % 8, comm.rank, "data")
        assert split is not None
        assert data is not None
        for _ in range(3):
            x, y, halo = np.array([float(comm.rank)]), np.arange(64.0), np.zeros(2)
            mine, everyone = np.zeros(8), np.zeros(64)
            everyone[comm.rank] = comm.rank
            wait(
                comm.iallgather(None, everyone, [1] * 64),
                split.iallreduce(x),
                data.ireduce_scatter(y, mine, [8] * 8),
                comm.isend(np.full(2, float(comm.rank)), (comm.rank + 1) % 64, 0),
                comm.irecv(halo, (comm.rank - 1) % 64, 0),
            )
            assert x[0] == sum(range(comm.rank // 8 * 8, comm.rank // 8 * 8 + 8))
            np.testing.assert_array_equal(mine, 8 * np.arange(64.0)[comm.rank // 8 * 8 :][:8])
            np.testing.assert_array_equal(everyone, np.arange(64))
            assert halo[0] == (comm.rank - 1) % 64

    run_virtual(64, program, seed=seed)
