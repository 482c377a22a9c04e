"""Runs on virtual ranks: their time on a modelled link, their results and ends, and the line that each rank has reached."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import numpy as np
import pytest

from hpctrain.comm.base import Handle
from hpctrain.comm.link import LinkModel
from hpctrain.core.errors import CommunicationTimeoutError, DeadlockError
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine, wait
from tests.support.recorded import line

LINK = LinkModel(alpha_seconds=1e-5, beta_seconds_per_byte=1e-9)
RANKS = (1, 2, 3, 5, 7, 8)


@pytest.mark.parametrize("ranks", RANKS)
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


SEEDS = (None, 0, 1, 2, 3)
seeded = pytest.mark.parametrize("seed", SEEDS)


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
