"""When buffers are read, filled with garbage and written, for every choice of moments."""

from itertools import product

import numpy as np
import pytest

from hpctrain.virtual.collectives import Allgather, Allreduce, Broadcast
from hpctrain.virtual.operations import Moments, Posting, RankState
from hpctrain.virtual.rank import SourceLine

LINE = SourceLine("program.py", 1)
choices = pytest.mark.parametrize("moments", [Moments(*flags) for flags in product((False, True), repeat=3)])


def posting(rank: RankState, contribution: np.ndarray | None, target: np.ndarray | None) -> Posting:
    return Posting("call", rank, "text", LINE, (), contribution, target)


@choices
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_a_sum_in_place(moments: Moments, dtype: str) -> None:
    ranks = [RankState(rank) for rank in range(2)]
    buffers = [np.full(3, 1 + rank, dtype) for rank in range(2)]
    operation = Allreduce(ranks, "0 on world")
    for rank, buffer in enumerate(buffers):
        operation.post(rank, posting(ranks[rank], buffer, buffer), moments)
        if moments.read_early and moments.scramble:
            assert not np.isin(buffer, (1, 2, 3)).any()
        else:
            assert (buffer == 1 + rank).all()
    if not moments.scramble:
        for buffer in buffers:
            buffer[:] = 10  # counts only where buffers are read late
    expected = 3 if moments.read_early or moments.scramble else 20
    operation.move()
    early = [buffer.copy() for buffer in buffers]
    if moments.write_early:
        assert all((buffer == expected).all() for buffer in early)
        buffers[0][:] = 50
    elif moments.scramble:
        assert not any(np.isin(buffer, (1, 2, 3)).any() for buffer in early)
    else:
        assert all((buffer == 10).all() for buffer in early)
    assert [operation.deliver(party).complete for party in (1, 0)] == [True, True]
    assert (buffers[1] == expected).all()
    assert (buffers[0] == (50 if moments.write_early else expected)).all()


@choices
def test_garbage_spares_the_part_in_place_until_it_is_read(moments: Moments) -> None:
    ranks = [RankState(rank) for rank in range(2)]
    buffers = [np.array([1.0, 0.0, 0.0]), np.array([0.0, 2.0, 3.0])]
    operation = Allgather(ranks, "0 on world")
    for rank, part in enumerate((slice(0, 1), slice(1, 3))):
        mine = buffers[rank][part].copy()
        operation.post(rank, posting(ranks[rank], buffers[rank][part], buffers[rank]), moments)
        if not moments.read_early:
            np.testing.assert_array_equal(buffers[rank][part], mine)
        assert np.isnan(buffers[rank]).sum() == (0 if not moments.scramble else 3 if moments.read_early else 3 - mine.size)
    for party in range(2):
        operation.deliver(party)
        np.testing.assert_array_equal(buffers[party], [1.0, 2.0, 3.0])


@choices
def test_a_root_that_runs_ahead(moments: Moments) -> None:
    ranks = [RankState(rank) for rank in range(3)]
    operation = Broadcast(ranks, "0 on world", root=1, synchronous=False)
    source, first, last = np.ones(2), np.zeros(2), np.zeros(2)
    operation.post(0, posting(ranks[0], None, first), moments)
    assert not operation.may_move()
    assert operation.absent() == [1]
    operation.post(1, posting(ranks[1], source, None), moments)
    assert operation.may_move()
    assert operation.deliver(1).owner is ranks[1]
    source[:] = 5.0  # the root is complete
    operation.post(2, posting(ranks[2], None, last), moments)
    operation.deliver(2)
    operation.deliver(0)
    np.testing.assert_array_equal([first, last], np.ones((2, 2)))
