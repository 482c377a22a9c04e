"""A function on virtual ranks: results in rank order, the same ones for the same seed, and time that is modelled."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.comm.link import LinkModel
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine, wait


@pytest.mark.parametrize("seed", [None, 0, 7])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_results_come_in_rank_order(ranks: int, seed: int | None) -> None:
    assert run_virtual(ranks, lambda comm: (comm.rank, comm.size), seed=seed) == [(rank, ranks) for rank in range(ranks)]


def test_a_seed_is_one_run() -> None:
    def program(comm: ThreadCommunicator) -> int:
        """How often a rank polled, which tells one schedule from another."""
        polls = 0
        for _ in range(5):
            handle = comm.iallreduce(np.zeros(3))
            while not handle.test():
                polls += 1
        return polls

    runs = {seed: run_virtual(4, program, seed=seed) for seed in range(6)}
    assert all(run_virtual(4, program, seed=seed) == polls for seed, polls in runs.items())
    assert len(set(map(tuple, runs.values()))) > 1


def test_an_engine_measures_virtual_time() -> None:
    link = LinkModel(alpha_seconds=1.0, beta_seconds_per_byte=0.25)

    def program(comm: ThreadCommunicator) -> float:
        engine = virtual_engine(comm)
        begin = comm.now()
        engine.wait_handle(comm.isend(np.zeros(3), 1, 0) if comm.rank == 0 else comm.irecv(np.zeros(3), 0, 0), "a message")
        return comm.now() - begin

    assert run_virtual(2, program, link=link) == [link.point_to_point_seconds(24)] * 2


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_a_straggler_stretches_what_it_takes_part_in(factor: float) -> None:
    link = LinkModel(alpha_seconds=1.0, beta_seconds_per_byte=0.25)

    def program(comm: ThreadCommunicator) -> float:
        wait(comm.iallreduce(np.zeros(5)))
        return comm.now()

    assert run_virtual(3, program, link=link, stragglers={1: factor}) == [factor * link.allreduce_seconds(40, 3)] * 3
    with pytest.raises(ValueError, match="Stragglers need a link"):
        run_virtual(3, program, stragglers={1: factor})
