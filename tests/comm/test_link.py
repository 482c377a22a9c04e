"""The link model's relations among operations."""

import pytest

from hpctrain.comm.link import LinkModel

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


@pytest.mark.parametrize("numbers", [(-1e-9, 1.0), (1.0, -1e-9)])
def test_negative_costs_are_refused(numbers: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        LinkModel(*numbers)
