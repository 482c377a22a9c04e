"""Groups of ranks: two levels, grids, one process, objects, errors that all raise alike, links and clocks."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm import mpi
from hpctrain.comm.base import Communicator, ForwardingCommunicator, Handle, SingleCommunicator, raise_on_all_ranks
from hpctrain.comm.groups import (
    GridAxis,
    Levels,
    ProcessGrid,
    TwoLevel,
    across_nodes,
    coordinates,
    in_levels,
    levels,
    node_numbers,
    within_node,
)
from hpctrain.comm.link import ClockMap, LinkModel, Offset, calibrate, measure_offset
from hpctrain.core.errors import CommunicationTimeoutError, DataError, ShapeError
from hpctrain_testing.run import run_job
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.counters import Counters, CountingCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine, wait

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


def _uneven_counts(random: np.random.Generator, ranks: int) -> list[int]:
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


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("nodes", PLACEMENTS)
def test_many_operations_at_once_return_what_one_level_returns(nodes: tuple[int, ...]) -> None:
    def program(comm: ThreadCommunicator) -> None:
        made = in_levels(comm, levels(nodes), "gradients")
        random = np.random.default_rng(len(nodes))
        flying = []
        for number in range(12):
            counts = _uneven_counts(random, made.size)
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
        total, sent, shared = np.array([float(comm.rank)]), np.full(4, comm.rank, np.int64), np.array([comm.rank])
        received = np.zeros(4, np.int64)
        message, heard = np.array([made.rank]), np.array([-1])
        wait(
            made.iallreduce(total),
            made.ialltoall(sent, received, [1] * 4, [1] * 4),
            made.ibroadcast(shared, root=3),
            made.ibarrier(),
            made.isend(message, (made.rank + 1) % 4, tag=5),
            made.irecv(heard, (made.rank - 1) % 4, tag=5),
        )
        assert (total[0], list(received), shared[0], heard[0]) == (6.0, [0, 2, 1, 3], 3, (made.rank - 1) % 4)
        part = made.split(made.rank // 2, -made.rank, "part")
        assert part is not None
        assert (part.size, part.rank) == (2, 1 - made.rank % 2)
        assert made.split_shared_memory("node").size == 4

    run_virtual(4, program)


def test_a_node_sends_and_receives_as_if_it_were_one_rank() -> None:
    """Its ranks together send (N - 1) / N of the whole, in addition to what stays on the node."""
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


@pytest.mark.sample(1)
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


@given(st.integers(1, 12), st.integers(1, 12), st.randoms(use_true_random=False))
def test_every_place_is_taken_once(rows: int, cols: int, chance) -> None:
    node_of = tuple(chance.randrange(4) for _ in range(rows * cols))
    places = coordinates(node_of, rows)
    assert sorted(places) == [(r, c) for r in range(rows) for c in range(cols)]


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_a_split_group_lies_inside_a_node_where_ranks_divide(rows: int, groups_per_node: int, nodes: int, cyclic: bool) -> None:
    ranks = rows * groups_per_node * nodes
    node_of = tuple(rank % nodes if cyclic else rank // (rows * groups_per_node) for rank in range(ranks))
    places = coordinates(node_of, rows)
    for c in range(groups_per_node * nodes):
        assert len({node_of[rank] for rank in range(ranks) if places[rank][1] == c}) == 1
    assert places[0] == (0, 0)
    if not cyclic:
        assert places == [(rank % rows, rank // rows) for rank in range(ranks)]


def test_one_process_is_a_grid() -> None:
    grid = ProcessGrid(SingleCommunicator(), 1, 1)
    assert (grid.row, grid.col, grid.node_of) == (0, 0, (0,))
    assert [grid.along(axis).name for axis in GridAxis] == ["split", "data"]
    assert [grid.along(axis).size for axis in GridAxis] == [1, 1]
    with pytest.raises(ShapeError):
        ProcessGrid(SingleCommunicator(), 1, 2)


X = np.arange(7, dtype=np.float32)


def test_a_single_process_is_a_communicator() -> None:
    comm = SingleCommunicator("row")
    assert isinstance(comm, Communicator)
    assert isinstance(comm.ibarrier(), Handle)
    assert (comm.rank, comm.size, comm.name) == (0, 1, "row")
    buffer = X.copy()
    for handle in (comm.iallreduce(buffer), comm.ibroadcast(buffer, 0), comm.iallgather(None, buffer, [7]), comm.ibarrier()):
        assert handle.test()
    np.testing.assert_array_equal(buffer, X)


@pytest.mark.parametrize("size", [0, 7])
def test_what_is_sent_is_received(size: int) -> None:
    comm, send = SingleCommunicator(), X[:size].copy()
    for post in (
        lambda recv: comm.ireduce_scatter(send, recv, [size]),
        lambda recv: comm.iallgather(send, recv, [size]),
        lambda recv: comm.ialltoall(send, recv, [size], [size]),
    ):
        recv = np.full(size, -1, np.float32)
        assert post(recv).test()
        np.testing.assert_array_equal(recv, send)


@pytest.mark.parametrize("receive_first", [False, True])
def test_messages_to_oneself_match_by_tag_in_order(receive_first: bool) -> None:
    comm = SingleCommunicator()
    got = {(tag, turn): np.zeros(3, np.float32) for tag in (1, 2) for turn in (0, 1)}

    def send() -> None:
        for tag in (2, 1):
            for turn in (0, 1):
                message = np.full(3, 10 * tag + turn, np.float32)
                assert comm.isend(message, 0, tag).test()
                message[...] = -1  # complete: the sender may write it

    def receive() -> list[Handle]:
        return [comm.irecv(buffer, 0, tag) for (tag, _), buffer in got.items()]

    if receive_first:
        handles = receive()
        assert not any(handle.test() for handle in handles)
        send()
    else:
        send()
        handles = receive()
    assert all(handle.test() for handle in handles)
    for (tag, turn), buffer in got.items():
        np.testing.assert_array_equal(buffer, np.full(3, 10 * tag + turn))


def test_splits_and_objects() -> None:
    comm = SingleCommunicator()
    assert comm.split(None, 0, "none") is None
    part = comm.split(3, 0, "part")
    assert part is not None
    assert (part.name, part.size) == ("part", 1)
    assert comm.split_shared_memory("node").size == 1
    value = {"a": 1}
    assert comm.allgather_object(value) == [value]
    assert comm.broadcast_object(value) is value


@pytest.mark.job
def test_abort_ends_the_process() -> None:
    program = "from hpctrain.comm.base import SingleCommunicator as S; print('said', end=''); S().abort(9); print('never')"
    outcome = run_job(0, ["-c", program])
    assert (outcome.code, outcome.stdout) == (9, "said")


def value_of(rank: int) -> Any:
    """Values of unlike types and sizes; None on some ranks."""
    chance = random.Random(rank)
    return [None, {"rank": rank}, [chance.random() for _ in range(chance.randint(0, 500))], "ü" * rank][rank % 4]


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("seed", [None, 3])
def test_every_rank_has_all_values_in_rank_order(ranks: int, seed: int | None) -> None:
    def program(comm: ThreadCommunicator) -> list[Any]:
        value = value_of(comm.rank)
        gathered = mpi.allgather_object(comm, value, virtual_engine(comm).wait_handle)
        assert value is None or gathered[comm.rank] is not value  # a rank may change what it gets
        return gathered

    for gathered in run_virtual(ranks, program, seed=seed):
        assert gathered == [value_of(rank) for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "root"), [(1, 0), (3, 0), (3, 2)])
def test_the_root_s_value_is_everywhere_and_the_root_keeps_its_own_object(ranks: int, root: int) -> None:
    def program(comm: ThreadCommunicator) -> Any:
        value = {"sizes": [1, 2, 3], "from": comm.rank}
        received = mpi.broadcast_object(comm, value, root, virtual_engine(comm).wait_handle)
        assert (received is value) == (comm.rank == root)
        return received

    assert run_virtual(ranks, program) == [{"sizes": [1, 2, 3], "from": root}] * ranks


class Scripted(SingleCommunicator):
    """Rank `rank` among ranks whose outcomes are known beforehand."""

    def __init__(self, rank: int, outcomes: list) -> None:
        super().__init__()
        self.rank, self.size, self._outcomes = rank, len(outcomes), outcomes
        self.world_ranks = tuple(10 + each for each in range(len(outcomes)))

    def allgather_object(self, value: object) -> list:
        assert value == self._outcomes[self.rank]
        return self._outcomes


def _work(outcome: tuple | None) -> str:
    if outcome is not None:
        raise outcome[0](outcome[1], ranks=outcome[2])
    return "result"


@pytest.mark.parametrize(
    ("outcomes", "kind", "message", "ranks"),
    [
        ([(DataError, "a", ()), (DataError, "a", ())], DataError, "a", ()),
        ([(DataError, "a", (3,))] * 2, DataError, "a", (3,)),
        ([None, (DataError, "bad", ()), None], DataError, "bad (on rank 1 of 3)", (11,)),
        ([None, (DataError, "bad", (3, 4))], DataError, "bad (on rank 1 of 2)", (3, 4)),
        ([None, (ShapeError, "s", ()), (DataError, "d", ())], ShapeError, "s (on ranks 1 and 2 of 3)", (11, 12)),
        ([(DataError, "x", ())] * 3 + [None], DataError, "x (on ranks 0, 1 and 2 of 4)", (10, 11, 12)),
        ([(DataError, "x", ())] * 12 + [None], DataError, "x (on 12 of 13 ranks, the first is 0)", tuple(range(10, 22))),
    ],
)
def test_every_rank_raises_the_lowest_ranks_error(outcomes: list, kind: type, message: str, ranks: tuple[int, ...]) -> None:
    """The error knows the ranks of the world, and the first of these ranks, which all know to have the error."""
    for rank, outcome in enumerate(outcomes):
        with pytest.raises(kind) as caught:
            raise_on_all_ranks(Scripted(rank, outcomes), lambda outcome=outcome: _work(outcome))
        assert type(caught.value) is kind
        assert (str(caught.value), tuple(caught.value.ranks), caught.value.reported_by) == (message, ranks, 10)


def test_without_errors_everyone_has_its_result() -> None:
    assert raise_on_all_ranks(Scripted(1, [None, None]), lambda: "result") == "result"
    assert raise_on_all_ranks(SingleCommunicator(), lambda: 3) == 3


def test_one_process_raises_its_own_error() -> None:
    error = DataError("mine")

    def work() -> None:
        raise error

    with pytest.raises(DataError) as caught:
        raise_on_all_ranks(SingleCommunicator(), work)
    assert caught.value is error


@pytest.mark.parametrize("kind", [ZeroDivisionError, CommunicationTimeoutError])
def test_bugs_and_deadlines_are_not_agreed_on(kind: type[Exception]) -> None:
    def work() -> None:
        raise kind("at once")

    comm = Scripted(0, [None, None])
    comm.allgather_object = lambda value: pytest.fail("must not communicate")  # type: ignore[method-assign]
    with pytest.raises(kind, match="at once"):
        raise_on_all_ranks(comm, work)


LINK = LinkModel(alpha_seconds=2e-6, beta_seconds_per_byte=1 / 6e9)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 64])
@pytest.mark.parametrize("n_bytes", [0, 4, 12345])
def test_a_rank_sends_all_pieces_but_its_own(ranks: int, n_bytes: int) -> None:
    expected = (ranks - 1) * 2e-6 + (ranks - 1) / ranks * n_bytes / 6e9
    assert LINK.reduce_scatter_seconds(n_bytes, ranks) == LINK.allgather_seconds(n_bytes, ranks)
    assert LINK.allgather_seconds(n_bytes, ranks) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("numbers", [(-1e-9, 1.0), (1.0, -1e-9), (1.0, 1.0, -1e-9)])
def test_negative_costs_are_refused(numbers: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        LinkModel(*numbers)


@pytest.mark.parametrize("ranks", [2, 3, 7])
@pytest.mark.parametrize("link", [LinkModel(50e-6, 8e-9), LinkModel(2e-6, 1e-10), LinkModel(0.0, 1e-9)])
def test_a_modelled_link_is_found_again_on_every_rank(ranks: int, link: LinkModel) -> None:
    def program(comm: ThreadCommunicator) -> LinkModel:
        return calibrate(comm, virtual_engine(comm))

    results = run_virtual(ranks, program, link=link)
    assert len(set(results)) == 1
    assert results[0].alpha_seconds == pytest.approx(link.alpha_seconds, rel=1e-6, abs=1e-12)
    assert results[0].beta_seconds_per_byte == pytest.approx(link.beta_seconds_per_byte, rel=1e-6)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_link_that_takes_no_time_has_no_cost(ranks: int) -> None:
    assert set(run_virtual(ranks, lambda comm: calibrate(comm, virtual_engine(comm)))) == {LinkModel(0.0, 0.0)}


class Time:
    """True time, which every look at any clock advances: by how much is chance."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.now = 0.0

    def clock_ns(self, shift_ns: int, rate: float) -> Callable[[], int]:
        def read() -> int:
            self.now += self._chance.expovariate(1 / 5000)
            return round(self.now * rate) + shift_ns

        return read


@pytest.mark.sample(3)
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("seed", range(6))
def test_an_offset_is_true_to_within_its_bound(ranks: int, seed: int) -> None:
    time = Time(seed)
    shifts = [0, 10**12, -(10**9), 17, -3]

    def measure(comm: ThreadCommunicator) -> Offset:
        wait = virtual_engine(comm).wait_handle
        return measure_offset(comm, wait, clock_ns=time.clock_ns(shifts[comm.rank], 1.0), rounds=7)

    found = run_virtual(ranks, measure, seed=seed)
    assert (found[0].offset_ns, found[0].error_ns) == (0, 0)
    for rank in range(1, ranks):
        assert 0 < found[rank].error_ns < 10**6
        assert abs(found[rank].offset_ns - shifts[rank]) <= found[rank].error_ns


def test_a_drifting_clock_follows_the_line() -> None:
    begin, end = Offset(1000, 500, 3), Offset(1_001_000, 1500, 8)
    clock = ClockMap(begin, end)
    assert clock.error_ns == 8
    assert clock.to_root(np.array([1000, 501_000, 1_001_000])).tolist() == [500, 500_000, 999_500]
    once = Offset(1000, 400, 1)
    assert ClockMap(once, once).to_root(np.array([5, 10**15])).tolist() == [-395, 10**15 - 400]
    assert measure_offset(SingleCommunicator(), lambda handle, what: None).offset_ns == 0


class _Recording:
    """Remembers what is called, and returns that."""

    rank, size, name, world_ranks = 1, 3, "recorded", (4, 6, 8)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *values: (method, *values)


class _Wrapping(ForwardingCommunicator):
    def wrap(self, part: Communicator) -> Any:
        return "wrapped", part


def test_a_communicator_that_forwards_forwards_all_of_the_protocol() -> None:
    inner: Any = _Recording()
    plain, wrapping = ForwardingCommunicator(inner), _Wrapping(inner)
    assert isinstance(plain, Communicator)
    assert (plain.rank, plain.size, plain.name, plain.world_ranks) == (1, 3, "recorded", (4, 6, 8))
    methods = [name for name, value in vars(Communicator).items() if inspect.isfunction(value) and not name.startswith("_")]
    assert len(methods) == 13
    for method in methods:
        values = tuple(map(str, list(inspect.signature(getattr(Communicator, method)).parameters)[1:]))
        result = None if method == "abort" else (method, *values)
        assert getattr(plain, method)(*values) == result
        expected = ("wrapped", result) if method.startswith("split") else result
        assert getattr(wrapping, method)(*values) == expected
