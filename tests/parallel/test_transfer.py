"""Transfers as data: nothing is lost, nothing comes twice, and both sides of every message agree."""

import numpy as np
import pytest

from hpctrain.boxes import even_intervals, relative, slices, whole
from hpctrain.data.loader import cut
from hpctrain.parallel import layout
from hpctrain.parallel.transfer import moved, moved_back, transfer
from tests.support.layouts import random_moves


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_pieces_put_together_are_the_target(ranks: int) -> None:
    for source, target in random_moves(ranks, ranks, 60):
        x = np.random.default_rng(0).standard_normal(source.shape)
        transfers = [transfer(source, target, rank) for rank in range(ranks)]
        for rank, mine in enumerate(transfers):
            y = cut(x, target.boxes[rank])
            found, seen = np.zeros_like(y), np.zeros(y.shape, int)
            if mine.local is not None:
                found[slices(mine.local[1])] = x[relative(source.boxes[rank], whole(x.shape))][slices(mine.local[0])]
                seen[slices(mine.local[1])] += 1
            for piece in mine.receives:
                (theirs,) = [each for each in transfers[piece.peer].sends if each.peer == rank]
                assert theirs.shape == piece.shape
                found[slices(piece.box)] = x[relative(source.boxes[piece.peer], whole(x.shape))][slices(theirs.box)]
                seen[slices(piece.box)] += 1
            np.testing.assert_array_equal(found, y)
            assert seen.max(initial=0) <= 1
            assert mine.gaps == bool((seen == 0).any())
            kept = np.zeros([stop - start for start, stop in source.boxes[rank]], int)
            if mine.local is not None:
                kept[slices(mine.local[0])] = 1
            assert mine.spare == bool((kept == 0).any())


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_pieces_lie_behind_each_other_and_add_up(ranks: int) -> None:
    for source, target in random_moves(50 + ranks, ranks, 60):
        transfers = [transfer(source, target, rank) for rank in range(ranks)]
        for pieces in (pieces for each in transfers for pieces in (each.sends, each.receives)):
            assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces)][: len(pieces)]
            assert all(piece.stop - piece.start == np.prod(piece.shape) > 0 for piece in pieces)
            assert [piece.peer for piece in pieces] == sorted({piece.peer for piece in pieces})
        assert moved(source, target) == tuple(each.send_size for each in transfers)
        assert moved_back(source, target) == tuple(each.receive_size for each in transfers)
        assert sum(moved(source, target)) == sum(moved_back(source, target))


def test_gathers_and_halos_in_closed_form() -> None:
    shape, ranks = (6, 10, 7, 5), 3
    parts = even_intervals(5, ranks)
    for own, words in zip(parts, moved(layout.channels(shape, parts), layout.everything(shape, ranks)), strict=True):
        assert words == (ranks - 1) * 6 * 10 * 7 * (own[1] - own[0])
    tiles = layout.tiles(shape, (ranks, 1))  # rows 0-4, 4-7, 7-10
    read = [(0, 5), (3, 8), (6, 10)]  # 3x3
    halo = layout.needed(shape, [(box[0], rows, *box[2:]) for box, rows in zip(tiles.boxes, read, strict=True)])
    assert moved(tiles, halo) == moved_back(tiles, halo) == (6 * 7 * 5, 2 * 6 * 7 * 5, 6 * 7 * 5)
