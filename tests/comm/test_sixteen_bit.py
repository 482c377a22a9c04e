"""Sums in 16-bit messages: sums of rounded parts in rank order, the same bits everywhere, in exactly so many bytes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

import numpy as np
import pytest

from hpctrain.boxes import even, even_intervals
from hpctrain.comm.base import Communicator, GradientSums, Handle
from hpctrain.comm.single import SingleCommunicator
from hpctrain.comm.sixteen_bit import Caster, MessageBuffers, SixteenBitSums, sums_over
from hpctrain.comm.two_level import in_levels, levels
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.counters import Counters, CountingCommunicator
from hpctrain.virtual.run import run_virtual, wait
from tests.support.bfloat16 import UNIT, PlainBfloat16, rounded

PLAIN: Caster = PlainBfloat16
_Flying = tuple[Handle, Callable[[], None]]


def _values(rank: int, size: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """Numbers of many magnitudes."""
    random = np.random.default_rng((seed, rank))
    return (random.standard_normal(size) * 10.0 ** random.integers(-6, 4, size)).astype(dtype)


def _in_rank_order(parts: list[np.ndarray]) -> np.ndarray:
    """The sum of rounded parts, from rank 0 on."""
    total = rounded(parts[0])
    for part in parts[1:]:
        total = total + rounded(part)
    return total


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_reduce_scatter_gives_the_sum_of_rounded_parts_in_rank_order(ranks: int, dtype: str) -> None:
    counts = [7, 0, 4, 1, 9][:ranks]
    sent = [_values(rank, sum(counts), dtype) for rank in range(ranks)]
    expected = _in_rank_order(sent)
    bounds = list(pairwise(accumulate(counts, initial=0)))

    def program(comm: ThreadCommunicator) -> np.ndarray:
        sums = sums_over(comm, PLAIN, allreduces=False)
        received = np.full(counts[comm.rank], np.nan, dtype)
        mine = sent[comm.rank].copy()
        handle = sums.ireduce_scatter(mine, received, counts)
        mine[...] = np.nan  # it has been packed
        wait(handle)
        assert handle.test()
        return received

    for (start, stop), received in zip(bounds, run_virtual(ranks, program), strict=True):
        assert received.tobytes() == expected[start:stop].tobytes()
        exact = np.sum([part.astype(np.float64) for part in sent], axis=0)[start:stop]
        magnitudes = np.sum([np.abs(part.astype(np.float64)) for part in sent], axis=0)[start:stop]
        adding = ranks * float(np.finfo(dtype).eps)
        assert (np.abs(received - exact) <= (UNIT + adding) * magnitudes).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("ranks", "size"), [(2, 9), (3, 2), (4, 64), (5, 0), (5, 31)])
def test_an_allreduce_rounds_each_sum_once_and_gives_the_same_bits_to_all(ranks: int, size: int, dtype: str) -> None:
    sent = [_values(rank, size, dtype) for rank in range(ranks)]
    expected = rounded(_in_rank_order(sent))

    def program(comm: ThreadCommunicator) -> np.ndarray:
        buffer = sent[comm.rank].copy()
        wait(sums_over(comm, PLAIN, allreduces=True).iallreduce(buffer))
        return buffer

    for result in run_virtual(ranks, program, seed=size):
        assert result.tobytes() == expected.tobytes()


@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_do_not_depend_on_how_a_buffer_is_cut(ranks: int) -> None:
    size = 40

    def program(comm: ThreadCommunicator) -> list[bytes]:
        sums, values, whole = sums_over(comm, PLAIN, allreduces=True), _values(comm.rank, size), []
        for cuts in (1, 3, 7):
            total = values.copy()
            wait(*(sums.iallreduce(total[begin:end]) for begin, end in even_intervals(size, cuts)))
            whole.append(total.tobytes())
        return whole

    for whole in run_virtual(ranks, program):
        assert len(set(whole)) == 1


def _reduce_scatter(comm: Communicator, sums: GradientSums, seed: int) -> _Flying:
    counts = [int(count) for count in np.random.default_rng(seed).integers(0, 6, comm.size)]
    sent = [_values(rank, sum(counts), seed=seed) for rank in range(comm.size)]
    received = np.empty(counts[comm.rank], np.float32)
    begin = sum(counts[: comm.rank])
    expected = _in_rank_order(sent)[begin : begin + received.size]
    handle = sums.ireduce_scatter(sent[comm.rank], received, counts)
    return handle, lambda: np.testing.assert_array_equal(received, expected)


def _allreduce(comm: Communicator, sums: GradientSums, seed: int) -> _Flying:
    sent = [_values(rank, 11, seed=seed) for rank in range(comm.size)]
    buffer, expected = sent[comm.rank].copy(), rounded(_in_rank_order(sent))
    return sums.iallreduce(buffer), lambda: np.testing.assert_array_equal(buffer, expected)


def _norms(comm: Communicator, sums: GradientSums, seed: int) -> _Flying:
    """A sum that stays exact goes through the communicator itself."""
    buffer = np.array([1.0 + 2.0**-40 * comm.rank, seed])
    expected = np.sum([[1.0 + 2.0**-40 * rank, seed] for rank in range(comm.size)], axis=0)
    return comm.iallreduce(buffer), lambda: np.testing.assert_array_equal(buffer, expected)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_many_operations_at_once_whatever_is_complete_first(ranks: int) -> None:
    kinds = (_reduce_scatter, _allreduce, _norms)

    def program(comm: ThreadCommunicator) -> None:
        sums = sums_over(comm, PLAIN, allreduces=True)
        flying = [kinds[number % 3](comm, sums, number) for number in range(15)]
        left = [flying[position] for position in np.random.default_rng(comm.rank).permutation(len(flying))]
        while left:
            left = [(handle, check) for handle, check in left if not handle.test()]
        for _, check in flying:
            check()

    for seed in (None, *range(20)):
        run_virtual(ranks, program, seed=seed)


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (2, 1, 0, 0, 1, 2)])
def test_in_two_levels_only_what_crosses_nodes_is_rounded(nodes: tuple[int, ...]) -> None:
    size = 24
    two = levels(nodes)
    assert two is not None
    sent = [_values(rank, size) for rank in range(len(nodes))]
    sums_of_nodes = [
        sum((sent[rank] for rank in range(len(nodes)) if nodes[rank] == node), np.zeros(size, np.float32))
        for node in range(two.nodes)
    ]
    expected = _in_rank_order(_by_lowest_rank(nodes, sums_of_nodes))

    def program(comm: ThreadCommunicator) -> tuple[int, np.ndarray]:
        counters = Counters()
        made = in_levels(CountingCommunicator(comm, counters), two, "gradients")
        sums = sums_over(made, PLAIN, allreduces=False)
        counts = list(even(size, made.size))
        received, exact = np.empty(counts[made.rank], np.float32), np.empty(counts[made.rank], np.float32)
        handles = [sums.ireduce_scatter(sent[comm.rank], received, counts), made.ireduce_scatter(sent[comm.rank], exact, counts)]
        norms = np.array([1.0 + 2.0**-40])
        wait(*handles, made.iallreduce(norms))
        assert norms[0] == made.size * (1.0 + 2.0**-40)
        plain = np.sum([part.astype(np.float64) for part in sent], axis=0)[sum(counts[: made.rank]) :][: counts[made.rank]]
        np.testing.assert_allclose(exact, plain, rtol=1e-4, atol=1e-3)
        of_node, across = size // two.per_node, size // two.per_node * (two.nodes - 1) // two.nodes
        assert counters["gradients within nodes", "ireduce_scatter"].exchanged_bytes == 2 * 4 * (size - of_node)
        assert counters["gradients across nodes", "ialltoall"].exchanged_bytes == 2 * across
        assert counters["gradients across nodes", "ireduce_scatter"].exchanged_bytes == 4 * across  # the exact one
        return made.rank, received

    pieces = dict(run_virtual(len(nodes), program, seed=3))
    np.testing.assert_array_equal(np.concatenate([pieces[rank] for rank in range(len(nodes))]), expected)


@pytest.mark.parametrize(
    ("nodes", "size"), [((0, 0, 1, 1), 24), ((0, 1, 0, 1), 3), ((2, 1, 0, 0, 1, 2), 37), ((1, 0, 1, 0), 0)], ids=str
)
def test_an_allreduce_in_two_levels_rounds_what_crosses_nodes_and_gives_the_same_bits_to_all(
    nodes: tuple[int, ...], size: int
) -> None:
    two = levels(nodes)
    assert two is not None
    sent = [_values(rank, size) for rank in range(len(nodes))]
    of_nodes = [
        sum((part for part, at in zip(sent, nodes, strict=True) if at == node), np.zeros(size, np.float32)) for node in nodes
    ]
    expected = rounded(_in_rank_order([of_nodes[nodes.index(node)] for node in dict.fromkeys(nodes)]))

    def program(comm: ThreadCommunicator) -> np.ndarray:
        counters = Counters()
        made = in_levels(CountingCommunicator(comm, counters), two, "gradients")
        sums = sums_over(made, PLAIN, allreduces=True)
        buffers = [sent[comm.rank].copy() for _ in range(3)]
        received = np.empty(even(size, made.size)[made.rank], np.float32)
        reduction = sums.ireduce_scatter(sent[comm.rank].copy(), received, even(size, made.size))
        wait(*(sums.iallreduce(buffer) for buffer in buffers), reduction)
        assert len({buffer.tobytes() for buffer in buffers}) == 1
        counts = even(size, made.size)
        first = made.rank // two.nodes * two.nodes
        run, own = sum(counts[first : first + two.nodes]), counts[made.rank]
        crossed, within = "gradients across nodes", "gradients within nodes"
        assert counters[crossed, "ialltoall"].exchanged_bytes == 4 * 2 * (run - own)  # with the reduce-scatter
        assert counters[f"{crossed} sums", "iallgather"].exchanged_bytes == 3 * 2 * (run - own)
        assert counters[within, "ireduce_scatter"].exchanged_bytes == 4 * 4 * (size - run)
        assert counters[within, "iallgather"].exchanged_bytes == 3 * 4 * (size - run)
        return buffers[0]

    for seed in (None, 5, 6):
        for result in run_virtual(len(nodes), program, seed=seed):
            assert result.tobytes() == expected.tobytes()


def _by_lowest_rank(nodes: tuple[int, ...], of_node: list[np.ndarray]) -> list[np.ndarray]:
    return [of_node[node] for node in dict.fromkeys(nodes)]


def test_bytes_are_half_of_those_of_float32() -> None:
    ranks, counts = 3, [5, 4, 4]

    def program(comm: ThreadCommunicator) -> None:
        counters = Counters()
        counting = CountingCommunicator(comm, counters)
        sums = sums_over(counting, PLAIN, allreduces=True)
        received = np.empty(counts[comm.rank], np.float32)
        wait(sums.ireduce_scatter(_values(comm.rank, 13), received, counts), sums.iallreduce(_values(comm.rank, 13)))
        others = 13 - counts[comm.rank]
        assert counters[comm.name, "ialltoall"].exchanged_bytes == 2 * 2 * others
        assert counters[f"{comm.name} sums", "iallgather"].exchanged_bytes == 2 * others
        assert counters.total().exchanged_bytes == 6 * others  # nothing else has bytes

    run_virtual(ranks, program)


def test_numbers_that_fit_are_summed_exactly() -> None:
    """Integers of 8 bits have a bfloat16 each, and their sums a float32."""

    def program(comm: ThreadCommunicator) -> None:
        sums = sums_over(comm, PLAIN, allreduces=False)
        sent = [np.random.default_rng(rank).integers(-128, 129, 30).astype(np.float32) for rank in range(3)]
        received, plain = np.empty(10, np.float32), np.empty(10, np.float32)
        wait(sums.ireduce_scatter(sent[comm.rank], received, [10] * 3), comm.ireduce_scatter(sent[comm.rank], plain, [10] * 3))
        assert received.tobytes() == plain.tobytes()

    run_virtual(3, program)


def test_what_is_not_finite_stays_so_and_harms_nothing_else() -> None:
    def program(comm: ThreadCommunicator) -> None:
        sums, buffer = sums_over(comm, PLAIN, allreduces=True), np.ones(9, np.float32)
        buffer[comm.rank] = (np.nan, np.inf, -np.inf)[comm.rank]
        buffer[3] = np.inf if comm.rank else -np.inf
        wait(sums.iallreduce(buffer))
        np.testing.assert_array_equal(buffer, [np.nan, np.inf, -np.inf, np.nan, 3, 3, 3, 3, 3])

    run_virtual(3, program)


def test_one_rank_and_numbers_as_they_are_need_no_messages() -> None:
    alone = SingleCommunicator()
    assert sums_over(alone, PLAIN, allreduces=True) is alone

    def program(comm: ThreadCommunicator) -> bool:
        return sums_over(comm, None, allreduces=True) is comm

    assert run_virtual(2, program) == [True, True]


@pytest.mark.parametrize("at_once", [1, 3])
def test_buffers_are_used_again(at_once: int) -> None:
    """As many as operations on their way, however many steps there are."""

    def program(comm: ThreadCommunicator) -> tuple[int, ...]:
        sums = sums_over(comm, PLAIN, allreduces=True)
        assert isinstance(sums, SixteenBitSums)
        sizes = []
        for step in range(6):
            handles = []
            for number in range(at_once):
                handles += [_reduce_scatter_of(sums, comm), sums.iallreduce(_values(comm.rank, 12, seed=number))]
            wait(*handles)
            kept = [buffer for buffers in sums._buffers._spare._spare.values() for buffer in buffers]
            sizes.append(len(kept))
            assert len({buffer.ctypes.data for buffer in kept}) == len(kept), step
        return tuple(sizes)

    for seed in (None, 1, 2):
        for sizes in run_virtual(3, program, seed=seed):
            assert max(sizes) <= 4 * at_once
            assert len(set(sizes[2:])) == 1 or seed is not None


def _reduce_scatter_of(sums: GradientSums, comm: Communicator) -> Handle:
    return sums.ireduce_scatter(_values(comm.rank, 12), np.empty(4, np.float32), [4] * 3)


def test_messages_lie_one_after_the_other_and_empty_parts_have_none() -> None:
    parts = MessageBuffers(PLAIN).parts([3, 0, 2], np.dtype(np.float64))
    assert parts.elements == ((0, 3), (3, 3), (3, 5))
    assert parts.bytes == ((0, 6), (6, 6), (6, 10))
    assert (parts.sizes, parts.total_bytes) == ([6, 0, 4], 10)
