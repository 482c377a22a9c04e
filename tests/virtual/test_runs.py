"""Runs on virtual ranks: each operation against its serial definition, their modelled time, their counters, and their ends."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from hpctrain.comm.base import Communicator, Handle
from hpctrain.comm.link import LinkModel
from hpctrain.core.errors import CommunicationTimeoutError, DeadlockError
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.counters import Count, Counters, CountingCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine, wait
from tests.support.recorded import line

LINK = LinkModel(alpha_seconds=1e-5, beta_seconds_per_byte=1e-9)
RANKS = (1, 2, 3, 5, 7, 8)
seeded = pytest.mark.parametrize("seed", [None, 0, 1, 2, 3])
everywhere = pytest.mark.parametrize("ranks", RANKS)


@everywhere
def test_each_operation_takes_its_modelled_time(ranks: int) -> None:
    n = 840  # a multiple of every P here, so that parts are even

    def program(comm: ThreadCommunicator) -> list[float]:
        whole, part, parts = np.zeros(n), np.zeros(n // ranks), [n // ranks] * ranks
        posts: list[Callable[[], Handle]] = [
            lambda: comm.iallreduce(whole),
            lambda: comm.ireduce_scatter(whole, part, parts),
            lambda: comm.iallgather(part, whole, parts),
            lambda: comm.ialltoall(whole, np.zeros(n), parts, parts),
            lambda: comm.ibroadcast(whole, ranks - 1),
            lambda: comm.ibarrier(),
        ]
        times = []
        for post in posts:
            begin = comm.now()
            wait(post())
            times.append(comm.now() - begin)
        return times

    n_bytes, p = 8 * n, ranks
    reduce_scatter = (p - 1) * LINK.alpha_seconds + (p - 1) / p * n_bytes * LINK.beta_seconds_per_byte
    rounds = int(np.ceil(np.log2(p)))
    tree = rounds * (LINK.alpha_seconds + n_bytes * LINK.beta_seconds_per_byte)
    expected = [2 * reduce_scatter, reduce_scatter, reduce_scatter, reduce_scatter, tree, rounds * LINK.alpha_seconds]
    for times in run_virtual(ranks, program, link=LINK):
        np.testing.assert_allclose(times, expected, rtol=1e-9, atol=1e-15)


def test_compute_hides_what_is_posted_before_it() -> None:
    """max(compute, wire), and the engine's waiting is the exposed rest."""
    wire = 2 * LINK.reduce_scatter_seconds(8000, 3)

    def program(comm: ThreadCommunicator, compute_seconds: float) -> tuple[float, float]:
        engine = virtual_engine(comm)
        ticket = engine.queue(comm).post(lambda: comm.iallreduce(np.zeros(1000)), "w")
        comm.compute(compute_seconds)
        engine.wait(ticket)
        return comm.now(), engine.waited_seconds

    for compute in (0.0, 0.4 * wire, 3.0 * wire):
        for end, waited in run_virtual(3, lambda comm, s=compute: program(comm, s), link=LINK):
            assert end == pytest.approx(max(compute, wire))
            assert waited == pytest.approx(max(0.0, wire - compute))


def test_a_link_serves_one_transfer_after_the_other() -> None:
    one = 2 * LINK.reduce_scatter_seconds(8000, 2)

    def program(comm: ThreadCommunicator) -> list[float]:
        handles = [comm.iallreduce(np.zeros(1000)) for _ in range(4)]
        ends = []
        for handle in handles:
            wait(handle)
            ends.append(comm.now())
        return ends

    for ends in run_virtual(2, program, link=LINK):
        np.testing.assert_allclose(ends, [one, 2 * one, 3 * one, 4 * one])


def test_links_of_other_ranks_are_free_and_messages_are_full_duplex() -> None:
    """Everyone to the right: all at once. All to rank 0, or from it: one after the other."""
    one = LINK.point_to_point_seconds(8000)

    def ring(comm: ThreadCommunicator) -> float:
        wait(comm.isend(np.zeros(1000), (comm.rank + 1) % 5, 0), comm.irecv(np.zeros(1000), (comm.rank - 1) % 5, 0))
        return comm.now()

    def to_one(comm: ThreadCommunicator) -> float:
        if comm.rank:
            wait(comm.isend(np.zeros(1000), 0, 0))
        else:
            wait(*[comm.irecv(np.zeros(1000), source, 0) for source in range(1, 5)])
        return comm.now()

    def from_one(comm: ThreadCommunicator) -> float:
        if comm.rank:
            wait(comm.irecv(np.zeros(1000), 0, 0))
        else:
            wait(*[comm.isend(np.zeros(1000), dest, 0) for dest in range(1, 5)])
        return comm.now()

    np.testing.assert_allclose(run_virtual(5, ring, link=LINK), [one] * 5)
    for program in (to_one, from_one):
        np.testing.assert_allclose(sorted(run_virtual(5, program, link=LINK)), [one, 2 * one, 3 * one, 4 * one, 4 * one])


def test_a_link_serves_in_the_order_of_virtual_time() -> None:
    """The later a rank's number, the earlier its message: rank 4 at half a message's time, rank 1 at two."""
    one = LINK.point_to_point_seconds(8000)

    def program(comm: ThreadCommunicator) -> float:
        if comm.rank:
            comm.compute(0.5 * one * (5 - comm.rank))
            wait(comm.isend(np.zeros(1000), 0, 0))
        else:
            wait(*[comm.irecv(np.zeros(1000), source, 0) for source in range(1, 5)])
        return comm.now()

    np.testing.assert_allclose(run_virtual(5, program, link=LINK), one * np.array([4.5, 4.5, 3.5, 2.5, 1.5]))


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_modelled_time_does_not_depend_on_when_buffers_are_touched(seed: int | None) -> None:
    def program(comm: ThreadCommunicator) -> float:
        handles: list[Handle] = []
        for layer in range(6):
            comm.compute(1e-5 * (1 + (comm.rank * layer) % 3))
            handles.append(comm.iallreduce(np.zeros(100 * (layer + 1))))
            handles[layer // 2].test()
        wait(*handles)
        return comm.now()

    assert run_virtual(7, program, link=LINK, seed=seed) == run_virtual(7, program, link=LINK)


@seeded
def test_unmatched_operations_are_reported_at_the_end(seed: int | None) -> None:
    def program(comm: ThreadCommunicator) -> None:
        part = comm.split(0, comm.rank, "part")
        assert part is not None
        if comm.rank == 1:
            part.iallreduce(np.zeros(3))
            comm.isend(np.zeros(2), 0, 4)

    with pytest.raises(DeadlockError, match="never matched") as caught:
        run_virtual(3, program, seed=seed)
    assert "rank 1: iallreduce 0 on part (3 float64)" in str(caught.value)
    assert "rank 1: isend on world (2 float64 to rank 0, tag 4)" in str(caught.value)


@seeded
def test_the_first_failure_ends_all_ranks(seed: int | None) -> None:
    ended = []

    def program(comm: ThreadCommunicator) -> None:
        try:
            if comm.rank == 2:
                wait(comm.ibarrier())
                raise KeyError("broken")
            wait(comm.ibarrier(), comm.iallreduce(np.zeros(1)))
        finally:
            ended.append(comm.rank)

    with pytest.raises(KeyError, match="broken") as caught:
        run_virtual(5, program, seed=seed)
    assert caught.value.__notes__ == ["raised on virtual rank 2 of 5", f"5 virtual ranks, seed {seed}"]
    assert sorted(ended) == list(range(5))


def test_abort_is_the_exit_of_the_job() -> None:
    def program(comm: ThreadCommunicator) -> None:
        try:
            if comm.rank == 1:
                raise ValueError("the reason")
            wait(comm.ibarrier())
        except ValueError:
            comm.abort(124)

    with pytest.raises(SystemExit) as caught:
        run_virtual(3, program)
    assert caught.value.code == 124
    assert str(caught.value.__cause__) == "the reason"
    assert "raised on virtual rank 1 of 3" in caught.value.__notes__


def test_a_run_that_is_not_over_in_time_says_where_each_rank_is() -> None:
    lines = {}

    def program(comm: ThreadCommunicator) -> None:
        if comm.rank == 1:
            wait(comm.ibarrier())
        for _ in range(20):
            lines[0] = line(1)
            time.sleep(0.02)

    with pytest.raises(CommunicationTimeoutError, match=r"2 virtual ranks had not ended after 0\.1 s") as caught:
        run_virtual(2, program, deadline_seconds=0.1)
    assert not isinstance(caught.value, DeadlockError)
    assert re.search(rf"  rank 0 is at \S*{lines[0]}", str(caught.value))


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
