"""One process: every operation is what the sum, gather or exchange over one rank is."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.comm.base import Communicator, Handle
from hpctrain.comm.single import SingleCommunicator
from tests.support.jobs import run_job

X = np.arange(7, dtype=np.float32)


def test_it_is_a_communicator() -> None:
    comm = SingleCommunicator("row")
    assert isinstance(comm, Communicator)
    assert isinstance(comm.ibarrier(), Handle)
    assert (comm.rank, comm.size, comm.name) == (0, 1, "row")


def test_sums_and_broadcasts_leave_the_buffer() -> None:
    comm, buffer = SingleCommunicator(), X.copy()
    assert comm.iallreduce(buffer).test()
    assert comm.ibroadcast(buffer, 0).test()
    assert comm.ibarrier().test()
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


def test_a_gather_in_place_leaves_what_is_there() -> None:
    recv = X.copy()
    assert SingleCommunicator().iallgather(None, recv, [7]).test()
    np.testing.assert_array_equal(recv, X)


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


def test_wrong_sizes_types_and_strides_are_refused() -> None:
    comm = SingleCommunicator()
    with pytest.raises(AssertionError):
        comm.iallgather(X, np.zeros(6, np.float32), [7])
    with pytest.raises(AssertionError):
        comm.ireduce_scatter(X, np.zeros(7), [7])
    with pytest.raises(AssertionError, match="contiguous"):
        comm.iallreduce(np.zeros((3, 3))[:, 0])
    comm.isend(X, 0, 0)
    with pytest.raises(AssertionError, match="differ"):
        comm.irecv(np.zeros(6, np.float32), 0, 0)


def test_splits_and_objects() -> None:
    comm = SingleCommunicator()
    assert comm.split(None, 0, "nobody") is None
    part = comm.split(3, 0, "part")
    assert part is not None
    assert (part.name, part.size) == ("part", 1)
    assert comm.split_shared_memory("node").size == 1
    value = {"a": 1}
    assert comm.allgather_object(value) == [value]
    assert comm.broadcast_object(value) is value


@pytest.mark.job
def test_abort_ends_the_process() -> None:
    program = "from hpctrain.comm.single import SingleCommunicator as S; print('said', end=''); S().abort(9); print('never')"
    outcome = run_job(0, ["-c", program])
    assert (outcome.code, outcome.stdout) == (9, "said")
