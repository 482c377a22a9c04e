"""Sums of the parameters that a step read count each element once, and later writes to the parameters do not change them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.averaging.read_sums import ReadSums
from tests.support.averaging import make_group


@given(cut=st.integers(0, 70), places=st.lists(st.integers(0, 100), max_size=5), written=st.integers(0, 1))
def test_a_part_that_is_taken_before_it_is_written_has_the_sums_of_before(cut: int, places: list[int], written: int) -> None:
    group = make_group()
    parts = [group.covering(0, cut), group.covering(cut, group.size)]
    reads = ReadSums(group, parts, places)
    assert [element for piece in reads.pieces for element in range(piece.start, piece.stop)] == list(range(group.size))
    words = [group.data[piece.start : piece.stop].view(np.uint32).copy() for piece in reads.pieces]
    expected = [int(of_piece.sum(dtype=np.uint32)) for of_piece in words]
    step = reads.begin()
    step.take(written)
    begin, end = ((0, min(cut, group.size)), (min(cut, group.size), group.size))[written]
    group.data[begin:end] += 1.0
    fetched = [fetch.result() for fetch in reads.complete()]
    assert np.concatenate(fetched).tolist() == expected
    step.take(1 - written)  # what a step posts late does not reach the next one
    after = np.concatenate([fetch.result() for fetch in reads.complete()]).tolist()
    inside = [begin <= piece.start and piece.stop <= end for piece in reads.pieces]
    assert all((new != old) == changed for new, old, changed in zip(after, expected, inside, strict=True))


def test_pieces_end_at_places() -> None:
    group = make_group()
    reads = ReadSums(group, [group.segments], [3, 40])
    bounds = {bound for piece in reads.pieces for bound in (piece.start, piece.stop)}
    assert {3, 40} <= bounds
    assert all(piece.size for piece in reads.pieces)
