"""How a run on virtual ranks ends: with results, with the first failure, or with a sentence about each rank."""

import re
import time

import numpy as np
import pytest

from hpctrain.errors import CommunicationTimeoutError, DeadlockError
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, wait
from tests.support.source_lines import line

SEEDS = (None, 0, 1, 2, 3)

seeded = pytest.mark.parametrize("seed", SEEDS)


@seeded
def test_operations_that_nobody_matched_are_reported_at_the_end(seed: int | None) -> None:
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

    with pytest.raises(CommunicationTimeoutError, match=r"2 virtual ranks were not over after 0\.1 s") as caught:
        run_virtual(2, program, deadline_seconds=0.1)
    assert not isinstance(caught.value, DeadlockError)
    assert re.search(rf"  rank 0 is at \S*{lines[0]}", str(caught.value))
