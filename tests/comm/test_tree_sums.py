"""Sums in the order of a tree: the bits of one rank on any number of ranks, in the bytes of a ring where a rank has one term."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import pytest

from hpctrain.boxes import even
from hpctrain.comm.base import Handle
from hpctrain.comm.single import SingleCommunicator
from hpctrain.comm.tree_sums import Terms, TreeSums, tree_sums_over
from hpctrain.summation_tree import ShardsOfRank, TreeAddition
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.counters import Counters, CountingCommunicator
from hpctrain.virtual.run import run_virtual, wait

#: shards, and numbers of ranks: with one term each, and with several
CASES = [(8, 2), (8, 4), (8, 8), (6, 2), (6, 3), (6, 6), (12, 2), (12, 3), (12, 4), (24, 8), (5, 5)]


def _values(shards: int, size: int, dtype: str = "float32") -> np.ndarray:
    random = np.random.default_rng((shards, size))
    return (random.standard_normal((shards, size)) * 10.0 ** random.integers(-6, 4, (shards, size))).astype(dtype)


def _added(values: np.ndarray, steps: tuple[TreeAddition, ...]) -> np.ndarray:
    values = values.copy()
    for step in steps:
        values[step.left] += values[step.right]
    return values


def _terms(values: np.ndarray, share: ShardsOfRank) -> Terms:
    """The terms that are left on a rank."""
    own = _added(values[share.rank * share.count : (share.rank + 1) * share.count], share.additions)
    terms = tuple(own[place].copy() for place in share.sums)
    return terms if len(terms) > 1 else terms[0]


def _alone(values: np.ndarray) -> np.ndarray:
    whole: np.ndarray = _added(values, ShardsOfRank(0, 1, len(values)).additions)[0]
    return whole


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("shards", "ranks"), CASES)
def test_a_reduce_scatter_has_the_bits_of_one_rank(shards: int, ranks: int, dtype: str) -> None:
    counts = [7, 0, 4, 1, 9, 2, 30, 5][:ranks]
    values = _values(shards, sum(counts), dtype)
    expected = _alone(values)

    def program(comm: ThreadCommunicator) -> np.ndarray:
        share = ShardsOfRank(comm.rank, ranks, shards)
        sums = TreeSums(comm, share)
        received = np.full(counts[comm.rank], np.nan, dtype)
        mine = _terms(values, share)
        handle = sums.ireduce_scatter(mine, received, counts)
        if isinstance(mine, tuple):
            for term in mine:  # they have been packed
                term[...] = np.nan
        wait(handle)
        return received

    bounds = pairwise(accumulate(counts, initial=0))
    for (start, stop), received in zip(bounds, run_virtual(ranks, program, seed=shards), strict=True):
        assert received.tobytes() == expected[start:stop].tobytes()


@pytest.mark.parametrize("size", [0, 1, 5, 64])
@pytest.mark.parametrize(("shards", "ranks"), CASES)
def test_allreduces_have_the_bits_of_one_rank_whatever_is_complete_first(shards: int, ranks: int, size: int) -> None:
    values = [_values(shards, size), _values(shards, size + 3)]

    def program(comm: ThreadCommunicator) -> list[np.ndarray]:
        share = ShardsOfRank(comm.rank, ranks, shards)
        sums = tree_sums_over(comm, share, allreduces=True)
        assert sums is not None
        terms = [_terms(one, share) for one in values]
        flying: list[Handle] = [sums.iallreduce(one) for one in terms]
        while flying:  # the last one first
            flying = [handle for handle in flying[::-1] if not handle.test()][::-1]
        return [one[-1] if isinstance(one, tuple) else one for one in terms]

    for results in run_virtual(ranks, program, seed=size):
        for result, one in zip(results, values, strict=True):
            assert result.tobytes() == _alone(one).tobytes()


def test_the_sums_of_a_transport_have_other_bits() -> None:
    """The law above can fail."""
    values = _values(8, 50)
    sums = []
    for ranks in (2, 4):

        def program(comm: ThreadCommunicator) -> np.ndarray:
            count = 8 // comm.size
            buffer = values[comm.rank * count : (comm.rank + 1) * count].sum(axis=0)
            wait(comm.iallreduce(buffer))
            return buffer

        sums.append(run_virtual(ranks, program)[0])
    assert sums[0].tobytes() != sums[1].tobytes()


@pytest.mark.parametrize(("shards", "ranks", "terms"), [(8, 2, 1), (8, 4, 1), (12, 3, 1), (6, 2, 2)])
def test_a_rank_sends_its_terms_and_nothing_else(shards: int, ranks: int, terms: int) -> None:
    """With one term the bytes are those of a ring: (P - 1) / P of the array for a reduce-scatter, twice that for an allreduce."""
    size = 24 * ranks
    values = _values(shards, size)

    def program(comm: ThreadCommunicator) -> tuple[int, int]:
        counters = Counters()
        share = ShardsOfRank(comm.rank, ranks, shards)
        sums = tree_sums_over(CountingCommunicator(comm, counters), share, allreduces=True)
        assert sums is not None
        mine = _terms(values, share)
        wait(sums.ireduce_scatter(mine, np.empty(24, np.float32), even(size, ranks)))
        reduced = counters.total().exchanged_bytes
        wait(sums.iallreduce(mine))
        return reduced, counters.total().exchanged_bytes - reduced

    of_ring = 4 * 24 * (ranks - 1)
    for reduced, allreduced in run_virtual(ranks, program):
        assert reduced == terms * of_ring
        assert allreduced == (terms + 1) * of_ring


def test_buffers_are_made_once() -> None:
    def program(comm: ThreadCommunicator) -> tuple[int, int]:
        share = ShardsOfRank(comm.rank, 2, 6)
        sums = tree_sums_over(comm, share, allreduces=True)
        assert sums is not None
        mine = _terms(_values(6, 10), share)
        numbers = []
        for _ in range(3):
            wait(sums.iallreduce(mine), sums.ireduce_scatter(mine, np.empty(5, np.float32), (5, 5)))
            numbers.append(len(sums._spare))
        return numbers[0], numbers[-1]

    for first, last in run_virtual(2, program):
        assert first == last > 0


def test_one_rank_needs_no_sums() -> None:
    assert tree_sums_over(SingleCommunicator(), ShardsOfRank(0, 1, 8), allreduces=True) is None
