"""Mistakes end the run at once, with every rank's call and line."""

import re

import numpy as np
import pytest

from hpctrain.errors import CollectiveMismatchError, DeadlockError
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine, wait
from tests.support.source_lines import line

SEEDS = (None, 0, 1, 2, 3)
seeded = pytest.mark.parametrize("seed", SEEDS)


@seeded
def test_a_deadlock_names_ranks_calls_lines_and_the_cycle(seed: int | None) -> None:
    lines = {}

    def program(comm: ThreadCommunicator) -> None:
        if comm.rank == 3:
            return
        lines[comm.rank] = line(1)
        handle = comm.irecv(np.zeros(5, np.float32), (comm.rank + 1) % 3, tag=7)
        lines[-1] = line(1)
        wait(handle)

    with pytest.raises(DeadlockError) as caught:
        run_virtual(4, program, seed=seed)
    message = str(caught.value)
    for rank in range(3):
        other = (rank + 1) % 3
        call = rf"irecv on world \(5 float32 from rank {other}, tag 7\), posted at \S*{lines[rank]}; not posted by rank {other}\n"
        assert re.search(rf"  rank {rank} waits at \S*{lines[-1]} for {call}", message)
    assert "  rank 3 has ended\n" in message
    assert "cycle: rank 0 -> rank 1 -> rank 2 -> rank 0" in message
    assert caught.value.__notes__[-1] == f"4 virtual ranks, seed {seed}"


@seeded
def test_a_missing_collective_is_a_deadlock_that_names_who_lacks(seed: int | None) -> None:
    def program(comm: ThreadCommunicator) -> None:
        if comm.rank not in (2, 3, 6):
            wait(comm.iallreduce(np.zeros(9)))

    with pytest.raises(DeadlockError, match=r"iallreduce 0 on world \(9 float64\), .*; not posted by ranks 2-3, 6"):
        run_virtual(7, program, seed=seed)


def test_who_holds_up_a_broadcast_depends_on_whether_it_waits_for_all() -> None:
    """Where a root may run ahead only the root can hold up another rank."""

    def program(comm: ThreadCommunicator) -> None:
        if comm.rank == 1:
            wait(comm.ibroadcast(np.zeros(1), 0))

    outcomes = set()
    for seed in range(20):
        with pytest.raises(DeadlockError) as caught:
            run_virtual(3, program, seed=seed)
        outcomes.update(re.findall("not posted by (.*)", str(caught.value)))
    assert outcomes == {"rank 0", "ranks 0, 2"}


@seeded
def test_collectives_that_wait_for_each_other_on_two_communicators(seed: int | None) -> None:
    """Each blocks in its own order: a split wait beside a data that nobody posts."""

    def program(comm: ThreadCommunicator) -> None:
        split, data = comm.split(0, comm.rank, "split"), comm.split(0, comm.rank, "data")
        assert split is not None
        assert data is not None
        for part in (split, data) if comm.rank else (data, split):
            wait(part.iallreduce(np.zeros(1)))

    with pytest.raises(DeadlockError, match="cycle: rank 0 -> rank 1 -> rank 0") as caught:
        run_virtual(2, program, seed=seed)
    assert "rank 0 waits" in str(caught.value)
    assert "iallreduce 0 on data" in str(caught.value)
    assert "iallreduce 0 on split" in str(caught.value)


@seeded
def test_blocking_object_calls_deadlock_too(seed: int | None) -> None:
    def program(comm: ThreadCommunicator) -> None:
        if comm.rank:
            comm.allgather_object(comm.rank)
        else:
            wait(comm.irecv(np.zeros(1), 1, 0))

    with pytest.raises(DeadlockError, match=r"rank 2 waits at .* for allgather_object 0 on world .*; not posted by rank 0"):
        run_virtual(3, program, seed=seed)


def test_two_sends_that_rely_on_buffering_deadlock_without_it() -> None:
    def program(comm: ThreadCommunicator) -> None:
        wait(comm.isend(np.zeros(1), 1 - comm.rank, 0))
        wait(comm.irecv(np.zeros(1), 1 - comm.rank, 0))

    with pytest.raises(DeadlockError, match="isend on world"):
        run_virtual(2, program)
    outcomes = set()
    for seed in range(30):
        try:
            run_virtual(2, program, seed=seed)
            outcomes.add("over")
        except DeadlockError:
            outcomes.add("deadlock")
    assert outcomes == {"over", "deadlock"}


@seeded
def test_an_engine_that_polls_many_operations_is_recognised_as_blocked(seed: int | None) -> None:
    def program(comm: ThreadCommunicator) -> None:
        engine = virtual_engine(comm)
        queue = engine.queue(comm)
        tickets = [queue.post(lambda: comm.iallreduce(np.zeros(4)), f"layer {i}") for i in range(10 + (comm.rank == 1))]
        engine.wait(tickets)

    with pytest.raises(DeadlockError, match=r"rank 1 waits at .* for iallreduce 10 on world .*; not posted by ranks 0, 2-4"):
        run_virtual(5, program, seed=seed)


@seeded
def test_polling_between_kernels_is_not_a_deadlock(seed: int | None) -> None:
    """One rank tests for long before it posts what the others wait for."""

    def program(comm: ThreadCommunicator) -> None:
        if comm.rank == 1:
            own = comm.irecv(np.zeros(1), 0, 0)
            for _ in range(400):
                assert not own.test()
            wait(comm.ibarrier(), own)
        else:
            wait(comm.ibarrier())
            if comm.rank == 0:
                wait(comm.isend(np.zeros(1), 1, 0))

    run_virtual(3, program, seed=seed)


@seeded
@pytest.mark.parametrize("ranks", [2, 5])
def test_mismatched_collectives_name_both_postings(seed: int | None, ranks: int) -> None:
    lines = {}

    def program(comm: ThreadCommunicator) -> None:
        wait(comm.ibarrier())
        if comm.rank != ranks - 1:
            lines["sum"] = line(1)
            wait(comm.iallreduce(np.zeros(100, np.float32)))
        else:
            counts = [100] + [0] * (ranks - 1)
            lines["scatter"] = line(1)
            wait(comm.ireduce_scatter(np.zeros(100), np.zeros(0), counts))

    with pytest.raises(CollectiveMismatchError) as caught:
        run_virtual(ranks, program, seed=seed)
    message = str(caught.value)
    assert "Collective 1 on world does not match" in message
    assert re.search(rf"posted iallreduce of 100 float32 at \S*{lines['sum']}", message)
    assert re.search(
        rf"rank {ranks - 1} posted ireduce_scatter of 100 float64 in parts \(100, 0.*\) at \S*{lines['scatter']}", message
    )


@pytest.mark.parametrize(
    "kind",
    ["size", "dtype", "counts", "root", "alltoall", "message", "message dtype"],
)
@seeded
def test_arguments_that_must_agree(kind: str, seed: int | None) -> None:
    def program(comm: ThreadCommunicator) -> None:
        mine, x = comm.rank, np.zeros(4)
        if kind == "size":
            wait(comm.iallreduce(np.zeros(4 + mine)))
        elif kind == "dtype":
            wait(comm.iallreduce(np.zeros(4, np.int64 if mine else np.float64)))
        elif kind == "counts":
            wait(comm.iallgather(None, x, [2 + mine, 2 - mine]))
        elif kind == "root":
            wait(comm.ibroadcast(x, mine))
        elif kind == "alltoall":
            wait(comm.ialltoall(x, np.zeros(3 + mine), [2, 2], [2, 2] if mine else [2, 1]))
        else:
            dtype = np.dtype("float32" if kind == "message dtype" else "float64")
            wait(comm.isend(x, 1, 0) if mine == 0 else comm.irecv(np.zeros(4 if "dtype" in kind else 3, dtype), 0, 0))

    with pytest.raises(CollectiveMismatchError, match=r"rank 0.*rank 1|rank 1.*rank 0"):
        run_virtual(2, program, seed=seed)


def test_another_thread_must_not_use_a_ranks_communicator() -> None:
    import threading

    def program(comm: ThreadCommunicator) -> list[str]:
        refused: list[str] = []

        def other() -> None:
            try:
                comm.ibarrier()
            except AssertionError as error:
                refused.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return refused

    assert run_virtual(1, program) == [["virtual rank 0 communicates from a thread that is not its own"]]


def test_a_deadlock_of_64_ranks_is_found() -> None:
    def program(comm: ThreadCommunicator) -> None:
        wait(comm.irecv(np.zeros(1), (comm.rank + 1) % 64, 0))

    with pytest.raises(DeadlockError, match="rank 63 -> rank 0"):
        run_virtual(64, program, seed=1)
