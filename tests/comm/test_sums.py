"""Sums in 16-bit messages, by parts and in the order of a tree: their bits and bytes; stages, turns and spare buffers."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.comm.base import Communicator, Complete, GradientSums, Handle, SingleCommunicator
from hpctrain.comm.groups import in_levels, levels
from hpctrain.comm.order import Finished, InOrder, SecondStage, SpareBuffers
from hpctrain.comm.sums import Caster, MessageBuffers, SixteenBitSums, Terms, TreeSums, sums_over, tree_sums_over
from hpctrain.comm.transports import over_mpi
from hpctrain.core.intervals import ShardsOfRank, TreeAddition, even, even_intervals
from hpctrain.testing.operators import put
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.counters import Counters, CountingCommunicator
from hpctrain_testing.virtual.run import run_virtual, wait
from tests.support.bfloat16 import UNIT, PlainBfloat16, rounded
from tests.support.device_operations import DeviceRank
from tests.support.device_views import ViewingCommunicator
from tests.support.emulated import EmulatedDeviceFactory

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
def test_a_reduce_scatter_returns_the_sum_of_rounded_parts_in_rank_order(ranks: int, dtype: str) -> None:
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
def test_an_allreduce_rounds_each_sum_once_and_returns_the_same_bits_to_all(ranks: int, size: int, dtype: str) -> None:
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


@pytest.mark.sample(1)
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
    expected = _in_rank_order([sums_of_nodes[node] for node in dict.fromkeys(nodes)])

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
def test_an_allreduce_in_two_levels_rounds_what_crosses_nodes_and_returns_the_same_bits_to_all(
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
                handles.append(sums.ireduce_scatter(_values(comm.rank, 12), np.empty(4, np.float32), [4] * 3))
                handles.append(sums.iallreduce(_values(comm.rank, 12, seed=number)))
            wait(*handles)
            kept = [buffer for buffers in sums._buffers._spare._spare.values() for buffer in buffers]
            sizes.append(len(kept))
            assert len({buffer.ctypes.data for buffer in kept}) == len(kept), step
        return tuple(sizes)

    for seed in (None, 1, 2):
        for sizes in run_virtual(3, program, seed=seed):
            assert max(sizes) <= 4 * at_once
            assert len(set(sizes[2:])) == 1 or seed is not None


def test_messages_lie_one_after_the_other_and_empty_parts_have_none() -> None:
    parts = MessageBuffers(PLAIN).parts([3, 0, 2], np.dtype(np.float64))
    assert parts.elements == ((0, 3), (3, 3), (3, 5))
    assert parts.bytes == ((0, 6), (6, 6), (6, 10))
    assert (parts.sizes, parts.total_bytes) == ([6, 0, 4], 10)


#: shards, and numbers of ranks: with one term each, and with several
CASES = [(8, 2), (8, 4), (8, 8), (6, 2), (6, 3), (6, 6), (12, 2), (12, 3), (12, 4), (24, 8), (5, 5)]


def _shard_values(shards: int, size: int, dtype: str = "float32") -> np.ndarray:
    random = np.random.default_rng((shards, size))
    return (random.standard_normal((shards, size)) * 10.0 ** random.integers(-6, 4, (shards, size))).astype(dtype)


def _added(values: np.ndarray, steps: tuple[TreeAddition, ...]) -> np.ndarray:
    values = values.copy()
    for step in steps:
        values[step.left] += values[step.right]
    return values


def _terms(values: np.ndarray, share: ShardsOfRank) -> Terms:
    """The terms that are left on a rank."""
    own = _added(values[share.rank * share.count : (share.rank + 1) * share.count], share.additions)
    terms = tuple(own[place].copy() for place in share.sums)
    return terms if len(terms) > 1 else terms[0]


def _alone(values: np.ndarray) -> np.ndarray:
    whole: np.ndarray = _added(values, ShardsOfRank(0, 1, len(values)).additions)[0]
    return whole


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("shards", "ranks"), CASES)
def test_a_reduce_scatter_has_the_bits_of_one_rank(shards: int, ranks: int, dtype: str) -> None:
    counts = [7, 0, 4, 1, 9, 2, 30, 5][:ranks]
    values = _shard_values(shards, sum(counts), dtype)
    expected = _alone(values)

    def program(comm: ThreadCommunicator) -> np.ndarray:
        share = ShardsOfRank(comm.rank, ranks, shards)
        sums = TreeSums(comm, share)
        received = np.full(counts[comm.rank], np.nan, dtype)
        mine = _terms(values, share)
        handle = sums.ireduce_scatter(mine, received, counts)
        if isinstance(mine, tuple):
            for term in mine:  # they have been packed
                term[...] = np.nan
        wait(handle)
        return received

    bounds = pairwise(accumulate(counts, initial=0))
    for (start, stop), received in zip(bounds, run_virtual(ranks, program, seed=shards), strict=True):
        assert received.tobytes() == expected[start:stop].tobytes()


@pytest.mark.parametrize("size", [0, 1, 5, 64])
@pytest.mark.parametrize(("shards", "ranks"), CASES)
def test_allreduces_have_the_bits_of_one_rank_whatever_is_complete_first(shards: int, ranks: int, size: int) -> None:
    values = [_shard_values(shards, size), _shard_values(shards, size + 3)]

    def program(comm: ThreadCommunicator) -> list[np.ndarray]:
        share = ShardsOfRank(comm.rank, ranks, shards)
        sums = tree_sums_over(comm, share, allreduces=True)
        assert sums is not None
        terms = [_terms(one, share) for one in values]
        flying: list[Handle] = [sums.iallreduce(one) for one in terms]
        while flying:  # the last one first
            flying = [handle for handle in flying[::-1] if not handle.test()][::-1]
        return [one[-1] if isinstance(one, tuple) else one for one in terms]

    for results in run_virtual(ranks, program, seed=size):
        for result, one in zip(results, values, strict=True):
            assert result.tobytes() == _alone(one).tobytes()


@pytest.mark.parametrize(("shards", "ranks", "terms"), [(8, 2, 1), (8, 4, 1), (12, 3, 1), (6, 2, 2)])
def test_a_rank_sends_its_terms_and_nothing_else(shards: int, ranks: int, terms: int) -> None:
    """With one term the bytes are those of a ring: (P - 1) / P of the array for a reduce-scatter, twice that for an allreduce."""
    size = 24 * ranks
    values = _shard_values(shards, size)

    def program(comm: ThreadCommunicator) -> tuple[int, int]:
        counters = Counters()
        share = ShardsOfRank(comm.rank, ranks, shards)
        sums = tree_sums_over(CountingCommunicator(comm, counters), share, allreduces=True)
        assert sums is not None
        mine = _terms(values, share)
        wait(sums.ireduce_scatter(mine, np.empty(24, np.float32), even(size, ranks)))
        reduced = counters.total().exchanged_bytes
        wait(sums.iallreduce(mine))
        return reduced, counters.total().exchanged_bytes - reduced

    of_ring = 4 * 24 * (ranks - 1)
    for reduced, allreduced in run_virtual(ranks, program):
        assert reduced == terms * of_ring
        assert allreduced == (terms + 1) * of_ring


def test_buffers_are_made_once() -> None:
    def program(comm: ThreadCommunicator) -> tuple[int, int]:
        share = ShardsOfRank(comm.rank, 2, 6)
        sums = tree_sums_over(comm, share, allreduces=True)
        assert sums is not None
        mine = _terms(_shard_values(6, 10), share)
        numbers = []
        for _ in range(3):
            wait(sums.iallreduce(mine), sums.ireduce_scatter(mine, np.empty(5, np.float32), (5, 5)))
            numbers.append(len(sums._spare))
        return numbers[0], numbers[-1]

    for first, last in run_virtual(2, program):
        assert first == last > 0


def _reach_mpi(comm: Communicator, arithmetic: Arithmetic) -> Communicator:
    return over_mpi(ViewingCommunicator(comm), arithmetic)


def _numbers(rank: int, size: int) -> np.ndarray:
    """Numbers whose sum depends on its order."""
    return np.random.default_rng(rank).standard_normal(size) * 10.0 ** np.random.default_rng(100 + rank).integers(-8, 8, size)


@pytest.mark.parametrize(("ranks", "size"), [(2, 7), (3, 8), (4, 2), (3, 0)])
def test_parts_are_added_in_the_order_of_ranks(ranks: int, size: int, emulated_device: EmulatedDeviceFactory) -> None:
    """To the last bit, whatever arrives first; some ranks own nothing."""
    total = np.zeros(size)
    for other in range(ranks):
        total = total + _numbers(other, size) if other else _numbers(0, size)

    def program(comm: ThreadCommunicator) -> None:
        rank = DeviceRank(comm, emulated_device(comm.rank), _reach_mpi)
        counts = even(size, ranks)
        begin = sum(counts[: comm.rank])
        received = rank.on_device(np.zeros(counts[comm.rank]))
        whole, halves = (rank.on_device(_numbers(comm.rank, size)) for _ in range(2))
        for _ in range(2):
            put(rank.kernels, whole, _numbers(comm.rank, size))
            wait(rank.comm.iallreduce(whole), rank.comm.ireduce_scatter(halves, received, counts))
            np.testing.assert_array_equal(rank.on_host(whole), total)
            np.testing.assert_array_equal(rank.on_host(received), total[begin : begin + counts[comm.rank]])

    for seed in range(5):
        run_virtual(ranks, program, seed=seed)


def test_second_stages_keep_the_order_of_the_first(emulated_device: EmulatedDeviceFactory) -> None:
    """Allreduces that are tested in another order on each rank."""

    def program(comm: ThreadCommunicator) -> None:
        rank = DeviceRank(comm, emulated_device(comm.rank), _reach_mpi)
        buffers = [rank.on_device(np.full(4 + n, comm.rank + 1.0)) for n in range(4)]
        handles = [rank.comm.iallreduce(buffer) for buffer in buffers]
        order = list(reversed(handles)) if comm.rank else handles
        while [handle for handle in order if not handle.test()]:  # as an engine's wait drives all
            pass
        for buffer in buffers:
            np.testing.assert_array_equal(rank.on_host(buffer), np.full(buffer.size, 6.0))

    for seed in range(10):
        run_virtual(3, program, seed=seed)


class _Step:
    """A handle that is complete once `complete` is set."""

    def __init__(self, name: str) -> None:
        self.name, self.complete, self.tests = name, False, 0

    def test(self) -> bool:
        self.tests += 1
        return self.complete

    def __str__(self) -> str:
        return self.name


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_second_stages_begin_in_posting_order(order: tuple[int, ...]) -> None:
    stages, begun, finished = InOrder(), [], []
    firsts, seconds = [_Step(f"first {i}") for i in range(3)], [_Step(f"second {i}") for i in range(3)]

    def staged(i: int) -> SecondStage:
        def begin() -> _Step:
            begun.append(i)
            return seconds[i]

        return stages.second_stage(firsts[i], begin, lambda: finished.append(i))

    handles = [staged(i) for i in range(3)]
    for position in order:
        firsts[position].complete = True
        assert not handles[position].test()
        missing = [i for i in range(3) if not firsts[i].complete]
        assert begun == list(range(min(missing, default=3)))
    for second in reversed(seconds):
        second.complete = True
    assert all(handle.test() and handle.test() for handle in reversed(handles))
    assert finished == [2, 1, 0]


def test_what_follows_an_operation_is_done_once_and_in_the_test_that_finds_it_complete() -> None:
    calls: list[int] = []
    operation = _Step("all-to-all of 3 elements")
    handle = Finished(operation, lambda: calls.append(operation.tests))
    assert str(handle) == "all-to-all of 3 elements"
    assert not handle.test()
    assert calls == []
    operation.complete = True
    assert handle.test()
    assert handle.test()
    assert calls == [2]
    assert operation.tests == 2


@given(st.integers(1, 12), st.randoms(use_true_random=False))
def test_operations_begin_in_the_order_of_their_places(count: int, source: random.Random) -> None:
    begun: list[int] = []

    def start(number: int) -> Handle:
        begun.append(number)
        return Complete()

    turns = InOrder()
    places = [turns.reserve() for _ in range(count)]
    for number in source.sample(range(count), count):
        places[number].fill(partial(start, number))
        assert begun == list(range(len(begun)))
        source.choice(places).test()
    assert begun == list(range(count))
    assert all(place.test() for place in places)


def test_buffers_are_used_again_and_by_one_at_a_time() -> None:
    spare, like = SpareBuffers(), np.ones(3, np.float32)
    first, second = spare.take(5, like), spare.take(5, like)
    assert not np.shares_memory(first, second)
    spare.give_back(first, second)
    assert len(spare) == 2
    again = {id(spare.take(5, like)), id(spare.take(5, like))}
    assert again == {id(first), id(second)}
    assert len(spare) == 0


def test_sizes_and_dtypes_have_their_own() -> None:
    spare = SpareBuffers()
    buffer = spare.take(4, np.ones(1, np.float32))
    assert (buffer.shape, buffer.dtype) == ((4,), np.float32)
    spare.give_back(buffer)
    for size, dtype in ((4, np.float64), (3, np.float32), (0, np.uint8)):
        other = spare.take(size, np.ones((2, 2), dtype))
        assert (other.shape, other.dtype) == ((size,), dtype)
        assert not np.shares_memory(other, buffer)
    assert spare.take(4, np.zeros(9, np.float32)) is buffer
