"""Schedules: random programs, what MPI may reorder, deadlocks and mismatches with each rank's call and line, and ends of runs."""

import random
import re
from collections.abc import Callable

import numpy as np
import pytest

from hpctrain.comm.base import Handle
from hpctrain.comm.link import LinkModel
from hpctrain.core.errors import CollectiveMismatchError, DeadlockError
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual, wait
from tests.support.recorded import line

SEEDS = (None, 0, 1, 2, 3)
seeded = pytest.mark.parametrize("seed", SEEDS)


@seeded
def test_a_deadlock_names_ranks_calls_and_lines(seed: int | None) -> None:
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
        call = rf"irecv on world \(5 float32 from rank {other}, tag 7\), posted at \S*{lines[rank]}; not posted by rank {other}\b"
        assert re.search(rf"  rank {rank} waits at \S*{lines[-1]} for {call}", message)
    assert "  rank 3 has ended" in message
    assert caught.value.__notes__[-1] == f"4 virtual ranks, seed {seed}"


@seeded
def test_a_missing_collective_is_a_deadlock_that_names_who_lacks(seed: int | None) -> None:
    def program(comm: ThreadCommunicator) -> None:
        if comm.rank not in (2, 3, 6):
            wait(comm.iallreduce(np.zeros(9)))

    with pytest.raises(DeadlockError, match=r"iallreduce 0 on world \(9 float64\), .*; not posted by ranks 2, 3, 6"):
        run_virtual(7, program, seed=seed)


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


LINK = LinkModel(alpha_seconds=1e-5, beta_seconds_per_byte=1e-9)


# --- Random programs --------------------------------------------------------------------------------------------------------
def normal_numbers(*key: int, size: int) -> np.ndarray:
    """Normal numbers, whose sum depends on the order of the terms."""
    return np.random.default_rng(key).standard_normal(size).astype(np.float32)


def in_order(parts: list[np.ndarray]) -> np.ndarray:
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


Started = tuple[Handle, np.ndarray, np.ndarray]  # handle, what is received, what it must be


def start_collective(comm: ThreadCommunicator, members: list[int], step: int, kind: int) -> Started:
    """Post operation `step` among world ranks `members`; return it with its serial definition."""
    me, size = comm.rank, comm.size
    counts = [int(c) for c in np.random.default_rng(step).integers(0, 4, size)]
    begin = sum(counts[:me])
    mine = slice(begin, begin + counts[me])
    whole = [normal_numbers(step, rank, size=sum(counts)) for rank in members]
    if kind == 0:
        buffer = whole[me].copy()
        return comm.iallreduce(buffer), buffer, in_order(whole)
    if kind == 1:
        recv = np.zeros(counts[me], np.float32)
        return comm.ireduce_scatter(whole[me].copy(), recv, counts), recv, in_order(whole)[mine]
    if kind == 2:
        recv = np.zeros(sum(counts), np.float32)
        recv[mine] = normal_numbers(step, members[me], size=counts[me])
        return (
            comm.iallgather(None, recv, counts),
            recv,
            np.concatenate([normal_numbers(step, rank, size=count) for rank, count in zip(members, counts, strict=True)]),
        )
    if kind == 3:
        recv = np.zeros(size * counts[me], np.float32)
        expected = [part[mine] for part in whole]
        return comm.ialltoall(whole[me].copy(), recv, counts, [counts[me]] * size), recv, np.concatenate(expected)
    root = step % size
    buffer = whole[me].copy()
    return comm.ibroadcast(buffer, root), buffer, whole[root]


def start_messages(comm: ThreadCommunicator, step: int) -> list[Started]:
    """Everyone to the rank `hop` further, twice with the same tag."""
    hop = step % comm.size
    to, source = (comm.rank + hop) % comm.size, (comm.rank - hop) % comm.size
    received = np.zeros((2, 5), np.float32)
    sent = [normal_numbers(step, comm.rank, number, size=5) for number in range(2)]
    started = [(comm.isend(sent[number], to, step % 3), sent[number], sent[number].copy()) for number in range(2)]
    for number in range(2):
        handle = comm.irecv(received[number], source, step % 3)
        started.append((handle, received[number], normal_numbers(step, source, number, size=5)))
    return started


def random_program(seed: int) -> Callable[[ThreadCommunicator], str]:
    """The same operations on every rank; each completes them in its own order, some only at the end."""

    def program(comm: ThreadCommunicator) -> str:
        world = list(range(comm.size))
        odd = comm.split(comm.rank % 2, comm.rank, "odd")
        assert odd is not None
        same_parity = world[comm.rank % 2 :: 2]
        shared, own = random.Random(seed), random.Random(seed * 1000 + comm.rank)
        open_operations: list[Started] = []
        order = []
        for step in range(12):
            kind = shared.randrange(7)
            if kind == 5:
                open_operations += start_messages(comm, step)
            elif kind == 6:
                wait(comm.ibarrier())
            elif shared.random() < 0.5:
                open_operations.append(start_collective(comm, world, step, kind))
            else:
                open_operations.append(start_collective(odd, same_parity, step, kind))
            for started in [one for one in open_operations if own.random() < 0.3 and one[0].test()]:
                np.testing.assert_array_equal(started[1], started[2])
                open_operations = [one for one in open_operations if one is not started]
                order.append(step)
        own.shuffle(open_operations)
        for handle, received, expected in open_operations:
            wait(handle)
            np.testing.assert_array_equal(received, expected)
        return str(order)

    return program


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("block", range(8))
def test_random_programs_of_200_seeds_give_the_serial_results(block: int) -> None:
    for seed in range(25 * block, 25 * block + 25):
        run_virtual((2, 3, 5, 7)[seed % 4], random_program(seed), seed=seed)


def test_random_programs_on_a_modelled_link_give_the_serial_results() -> None:
    for seed in range(20):
        run_virtual((2, 3, 5, 7)[seed % 4], random_program(seed), seed=seed, link=LINK)


# --- The adversary ----------------------------------------------------------------------------------------------------------
def interleaving(seed: int | None) -> list[tuple[int, int]]:
    """Which rank went on when, in a program that posts, tests and waits."""
    log: list[tuple[int, int]] = []

    def program(comm: ThreadCommunicator) -> None:
        handles = []
        for step in range(5):
            handles.append(comm.iallreduce(np.ones(3)))
            log.append((comm.rank, step))
            handles[step // 2].test()
        wait(*reversed(handles))
        log.append((comm.rank, -1))

    run_virtual(4, program, seed=seed)
    return log


def test_the_same_seed_is_the_same_run() -> None:
    seeds = [None, *range(12)]
    runs = [interleaving(seed) for seed in seeds]
    assert runs == [interleaving(seed) for seed in seeds]
    assert len({tuple(run) for run in runs}) > 6


def test_a_broadcasts_root_may_or_may_not_wait_for_the_others() -> None:
    def program(comm: ThreadCommunicator) -> int:
        if comm.rank == 0:
            wait(comm.ibroadcast(np.ones(2), 0))
            posted.append(0)
            return posted.index(0)
        posted.append(1)
        wait(comm.ibroadcast(np.zeros(2), 0))
        return -1

    outcomes = set()
    for seed in range(40):
        posted: list[int] = []
        outcomes.add(run_virtual(2, program, seed=seed)[0])
    assert outcomes == {0, 1}


def rounds_until_complete(seed: int) -> int:
    """How many messages two ranks can exchange one by one before an operation of two others completes."""
    rounds = 0

    def program(comm: ThreadCommunicator) -> int:
        nonlocal rounds
        pair = comm.split(comm.rank // 2, comm.rank, "pair")
        assert pair is not None
        if comm.rank < 2:
            wait(pair.ibarrier())
            return rounds
        for _ in range(50):
            wait(pair.isend(np.ones(1), 1, 0) if pair.rank == 0 else pair.irecv(np.zeros(1), 0, 0))
            rounds += pair.rank
        return 0

    return run_virtual(4, program, seed=seed)[0]


def test_some_operations_complete_when_nothing_else_is_left() -> None:
    waits = [rounds_until_complete(seed) for seed in range(40)]
    assert min(waits) <= 1
    assert sum(rounds == 50 for rounds in waits) >= 3


def reuse_of_a_sent_buffer(comm: ThreadCommunicator) -> bool:
    send, recv = np.full(4, 1.0), np.zeros(2)
    handle = comm.ireduce_scatter(send, recv, [2, 2])
    send[:] = 5.0
    wait(handle)
    return bool((recv == 2.0).all())


def late_contribution(comm: ThreadCommunicator) -> bool:
    buffer = np.zeros(4)
    handle = comm.iallreduce(buffer)
    buffer[:] = 1.0
    wait(handle)
    return bool((buffer == 2.0).all())


def early_look(comm: ThreadCommunicator) -> bool:
    recv = np.full(2, 7.0)
    recv[comm.rank] = 1.0
    handle = comm.iallgather(None, recv, [1, 1])
    seen = recv.copy()  # hopes for the old value, or the new one
    wait(handle)
    return bool(np.isin(seen, (7.0, 1.0)).all())


def early_look_at_a_sum(comm: ThreadCommunicator) -> bool:
    buffer = np.ones(2)
    handle = comm.iallreduce(buffer)
    seen = buffer.copy()
    wait(handle)
    return bool(np.isin(seen, (1.0, 2.0)).all())


def scratch_in_a_receive_buffer(comm: ThreadCommunicator) -> bool:
    recv = np.zeros(2)
    handle = comm.iallgather(np.array([1.0]), recv, [1, 1])
    other = comm.ibarrier()
    other.test()
    recv[:] = 3.0
    wait(handle, other)
    return bool((recv == 1.0).all())


def receive_buffer_of_a_message(comm: ThreadCommunicator) -> bool:
    recv = np.full(2, 7, np.int32)
    receive, send = comm.irecv(recv, 1 - comm.rank, 0), comm.isend(np.full(2, 1, np.int32), 1 - comm.rank, 0)
    seen = recv.copy()
    wait(send, receive)
    return bool(np.isin(seen, (7, 1)).all())


@pytest.mark.parametrize(
    "mistake",
    [
        reuse_of_a_sent_buffer,
        late_contribution,
        early_look,
        early_look_at_a_sum,
        scratch_in_a_receive_buffer,
        receive_buffer_of_a_message,
    ],
)
def test_touching_a_buffer_in_flight_is_found_by_most_seeds_for_it(mistake: Callable[[ThreadCommunicator], bool]) -> None:
    wrong = sum(not all(run_virtual(2, mistake, seed=seed)) for seed in range(40))
    assert wrong >= 8


def test_sent_buffers_may_be_read_in_flight() -> None:
    def program(comm: ThreadCommunicator) -> None:
        gathered, part, mine, received = np.zeros(6), np.full(2, 3.0), np.zeros(2), np.zeros(2)
        whole = np.full(6, 4.0)
        handles = [comm.iallgather(part, gathered, [2] * 3), comm.ireduce_scatter(whole, mine, [2] * 3)]
        handles += [comm.isend(part, (comm.rank + 1) % 3, 0), comm.irecv(received, (comm.rank - 1) % 3, 0)]
        for handle in handles:
            while not handle.test():
                assert (part == 3.0).all()
                assert (whole == 4.0).all()

    for seed in range(40):
        run_virtual(3, program, seed=seed)
