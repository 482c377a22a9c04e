"""Two levels of ranks: the same sums and gathers as in one, whatever stage is complete first, with fewer bytes between nodes."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.comm.base import Communicator, Handle
from hpctrain.comm.two_level import Levels, TwoLevel, across_nodes, in_levels, levels, node_numbers, within_node
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.counters import Counters, CountingCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine, wait

PLACEMENTS = [
    (0, 0, 1, 1),
    (0, 1, 0, 1),
    (1, 0, 0, 1),
    (0, 0, 0, 1, 1, 1),
    (0, 0, 1, 1, 2, 2),
    (2, 1, 0, 0, 1, 2),
    (0, 0, 0, 0, 1, 1, 1, 1),
    (3, 3, 2, 2, 1, 1, 0, 0),
]


@pytest.mark.parametrize("nodes", [(0,), (0, 0, 0), (0, 1, 2), (0, 0, 1), (0, 0, 1, 1, 1)])
def test_one_level_is_left_as_it_is(nodes: tuple[int, ...]) -> None:
    assert levels(nodes) is None

    def program(comm: ThreadCommunicator) -> tuple[bool, int]:
        made = in_levels(comm, levels(nodes), "gradients")
        return isinstance(made, TwoLevel), made.rank

    assert run_virtual(len(nodes), program) == [(False, rank) for rank in range(len(nodes))]


def test_ranks_of_one_place_are_neighbours() -> None:
    assert levels((0, 0, 0, 1, 1, 1)) == Levels((0, 3, 1, 4, 2, 5), nodes=2, per_node=3)
    assert levels(("b", "a", "a", "b")) == Levels((0, 1, 3, 2), nodes=2, per_node=2)


@pytest.mark.parametrize(("ranks", "per_node"), [(4, 2), (6, 3), (5, 2), (3, 4)])
def test_nodes_are_counted_by_their_lowest_rank(ranks: int, per_node: int) -> None:
    found = run_virtual(ranks, lambda comm: node_numbers(comm, comm.split_shared_memory("node")), ranks_per_node=per_node)
    assert found == [tuple(rank // per_node for rank in range(ranks))] * ranks


def _counts(random: np.random.Generator, ranks: int) -> list[int]:
    """Parts of many sizes, none too."""
    return [int(count) for count in random.integers(0, 9, ranks) * random.integers(0, 2, ranks)]


def _sums(comm: Communicator, counts: list[int], seed: int) -> tuple[Handle, np.ndarray, np.ndarray]:
    """A reduce-scatter of integers in float64; its handle, what arrives, and what should."""
    whole = [np.random.default_rng((seed, rank)).integers(-99, 99, sum(counts)).astype(np.float64) for rank in range(comm.size)]
    received = np.full(counts[comm.rank], np.nan)
    begin = sum(counts[: comm.rank])
    handle = comm.ireduce_scatter(whole[comm.rank].copy(), received, counts)
    return handle, received, np.sum(whole, axis=0)[begin : begin + counts[comm.rank]]


def _gather(comm: Communicator, counts: list[int], seed: int, in_place: bool) -> tuple[Handle, np.ndarray, np.ndarray]:
    whole = np.random.default_rng(seed).standard_normal(sum(counts))
    begin = sum(counts[: comm.rank])
    mine = whole[begin : begin + counts[comm.rank]].copy()
    received = np.full(sum(counts), np.nan)
    if in_place:
        received[begin : begin + mine.size] = mine
    return comm.iallgather(None if in_place else mine, received, counts), received, whole


@pytest.mark.slow
@pytest.mark.parametrize("nodes", PLACEMENTS)
def test_many_operations_at_once_give_what_one_level_gives(nodes: tuple[int, ...]) -> None:
    def program(comm: ThreadCommunicator) -> None:
        made = in_levels(comm, levels(nodes), "gradients")
        random = np.random.default_rng(len(nodes))
        flying = []
        for number in range(12):
            counts = _counts(random, made.size)
            flying.append(_sums(made, counts, number) if number % 3 else _gather(made, counts, number, number % 2 == 0))
        order = np.random.default_rng(comm.rank).permutation(len(flying))  # ranks wait in orders of their own
        left = [flying[position] for position in order]
        while left:
            left = [each for each in left if not each[0].test()]
        for handle, received, expected in flying:
            assert handle.test()
            np.testing.assert_array_equal(received, expected)

    for seed in (None, *range(25)):
        run_virtual(len(nodes), program, seed=seed)


def test_everything_else_is_done_by_the_ranks_in_their_new_order() -> None:
    nodes = (0, 0, 1, 1)

    def program(comm: ThreadCommunicator) -> None:
        made = in_levels(comm, levels(nodes), "gradients")
        assert made.allgather_object(comm.rank) == [0, 2, 1, 3]
        assert made.broadcast_object(comm.rank, root=1) == 2
        total, sent, told = np.array([float(comm.rank)]), np.full(4, comm.rank, np.int64), np.array([comm.rank])
        received = np.zeros(4, np.int64)
        message, heard = np.array([made.rank]), np.array([-1])
        wait(
            made.iallreduce(total),
            made.ialltoall(sent, received, [1] * 4, [1] * 4),
            made.ibroadcast(told, root=3),
            made.ibarrier(),
            made.isend(message, (made.rank + 1) % 4, tag=5),
            made.irecv(heard, (made.rank - 1) % 4, tag=5),
        )
        assert (total[0], list(received), told[0], heard[0]) == (6.0, [0, 2, 1, 3], 3, (made.rank - 1) % 4)
        part = made.split(made.rank // 2, -made.rank, "part")
        assert part is not None
        assert (part.size, part.rank) == (2, 1 - made.rank % 2)
        assert made.split_shared_memory("node").size == 4

    run_virtual(4, program)


def test_a_node_sends_and_receives_as_if_it_were_one_rank() -> None:
    """Beside what stays on it: (N - 1) / N of the whole, shared by its ranks."""
    nodes, elements = (0, 0, 0, 1, 1, 1, 2, 2, 2), 36

    def program(comm: ThreadCommunicator) -> tuple[int, int]:
        counters = Counters()
        made = in_levels(CountingCommunicator(comm, counters), levels(nodes), "gradients")
        counts = [elements // made.size] * made.size
        for handle, _, _ in (_sums(made, counts, 0), _gather(made, counts, 0, True)):
            wait(handle)
        across, within = (counters.total(f"gradients {where} nodes").exchanged_bytes for where in ("across", "within"))
        return across, within

    for across, within in run_virtual(len(nodes), program):
        assert across == 2 * 8 * elements // 3 * 2 // 3  # 2 operations of float64; a third of the whole; (N - 1) / N of it
        assert within == 2 * 8 * elements * 2 // 3


def test_a_handle_says_at_which_stage_it_is() -> None:
    def program(comm: ThreadCommunicator) -> None:
        made = in_levels(comm, levels((0, 0, 1, 1)), "gradients")
        if comm.rank == 3:
            virtual_engine(comm).wait_handle(comm.ibarrier(), "the others")
        handle, _, _ = _sums(made, [1] * 4, 0)
        if comm.rank != 3:
            assert not handle.test()
            stage = "the second of two stages" if comm.rank < 2 else "the first of two stages"
            for _ in range(5):
                handle.test()
            assert str(handle).endswith(stage)
            wait(comm.ibarrier())
        wait(handle)

    run_virtual(4, program)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 2, 0, 1, 2)])
def test_equal_sums_on_their_way_have_buffers_of_their_own_and_later_ones_use_them_again(nodes: tuple[int, ...]) -> None:
    at_once = 4

    def program(comm: ThreadCommunicator) -> int:
        made = in_levels(comm, levels(nodes), "gradients")
        assert isinstance(made, TwoLevel)
        left = []
        for number in range(30):
            left.append(_sums(made, [3] * made.size, number))
            while len(left) == at_once:
                for handle, received, expected in left:
                    if handle.test():
                        np.testing.assert_array_equal(received, expected)
                left = [each for each in left if not each[0].test()]
        wait(*(handle for handle, _, _ in left))
        for _, received, expected in left:
            np.testing.assert_array_equal(received, expected)
        return len(made._spare)

    for seed in (None, *range(8)):
        for kept in run_virtual(len(nodes), program, seed=seed):
            assert 1 <= kept <= at_once, seed


def test_buffers_of_one_size_and_two_types_are_not_mixed_up() -> None:
    def program(comm: ThreadCommunicator) -> None:
        made = in_levels(comm, levels((0, 1, 0, 1)), "gradients")
        for dtype in (np.float64, np.float32, np.int64, np.float64):
            whole, received = np.full(8, comm.rank + 0.5).astype(dtype), np.zeros(2, dtype)
            wait(made.ireduce_scatter(whole, received, [2] * 4))
            np.testing.assert_array_equal(received, np.full(2, 6 if dtype is np.int64 else 8, dtype))

    run_virtual(4, program)


@pytest.mark.parametrize("nodes", [(0, 1, 0, 1), (2, 1, 0, 0, 1, 2), (0, 0, 0, 1, 1, 1)], ids=str)
def test_ranks_of_a_node_and_of_a_number_find_each_other(nodes: tuple[int, ...]) -> None:
    """Across nodes in their order of first rank; without levels every rank is a node."""
    two = levels(nodes)
    assert two is not None

    def program(comm: ThreadCommunicator) -> None:
        flat = in_levels(comm, two, "x")
        inside = within_node(flat, two, "x").allgather_object((nodes[comm.rank], comm.rank))
        assert inside == [(nodes[comm.rank], rank) for rank, node in enumerate(nodes) if node == nodes[comm.rank]]
        number = inside.index((nodes[comm.rank], comm.rank))
        across = across_nodes(comm, two, "x")
        first = dict.fromkeys(nodes)
        assert across.allgather_object(nodes[comm.rank]) == list(first)
        assert set(across.allgather_object(number)) == {number}
        alone = across_nodes(comm, None, "x")
        assert (alone.rank, alone.size) == (comm.rank, comm.size)

    run_virtual(len(nodes), program)
