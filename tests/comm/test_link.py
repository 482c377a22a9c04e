"""The link model's relations among operations."""

import pytest

from hpctrain.comm.link import LinkModel, measure_operation_seconds
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine

LINK = LinkModel(alpha_seconds=2e-6, beta_seconds_per_byte=1 / 6e9)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 64])
@pytest.mark.parametrize("n_bytes", [0, 4, 12345])
def test_an_allreduce_is_a_reduce_scatter_and_an_allgather(ranks: int, n_bytes: int) -> None:
    halves = LINK.reduce_scatter_seconds(n_bytes, ranks) + LINK.allgather_seconds(n_bytes, ranks)
    assert LINK.allreduce_seconds(n_bytes, ranks) == halves
    expected = 2 * (ranks - 1) * 2e-6 + 2 * (ranks - 1) / ranks * n_bytes / 6e9
    assert halves == pytest.approx(expected, rel=1e-12)


def test_one_rank_costs_nothing() -> None:
    assert LINK.allreduce_seconds(10**9, 1) == LINK.alltoall_seconds(10**9, 1) == LINK.broadcast_seconds(10**9, 1) == 0
    assert LINK.barrier_seconds(1) == 0


@pytest.mark.parametrize(("ranks", "rounds"), [(2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4)])
def test_trees_take_the_logarithm_of_rounds(ranks: int, rounds: int) -> None:
    assert LINK.barrier_seconds(ranks) == rounds * 2e-6
    assert LINK.broadcast_seconds(6000, ranks) == pytest.approx(rounds * (2e-6 + 1e-6))


@pytest.mark.parametrize("numbers", [(-1e-9, 1.0), (1.0, -1e-9), (1.0, 1.0, -1e-9)])
def test_negative_costs_are_refused(numbers: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        LinkModel(*numbers)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_an_operation_takes_of_a_core_is_what_many_at_a_time_do(ranks: int) -> None:
    """Over a modelled link that serves one after the other: a message, as if it were the core's. All ranks get the same."""

    def program(comm: ThreadCommunicator) -> float:
        return measure_operation_seconds(comm, virtual_engine(comm))

    link = LinkModel(alpha_seconds=1e-3, beta_seconds_per_byte=0.0)
    results = run_virtual(ranks, program, link=link)
    assert results == pytest.approx([link.allgather_seconds(4 * ranks, ranks)] * ranks, rel=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_operations_are_measured_under_adversarial_scheduling(seed: int) -> None:
    results = run_virtual(3, lambda comm: measure_operation_seconds(comm, virtual_engine(comm)), seed=seed)
    assert len(set(results)) == 1
    assert results[0] >= 0.0
