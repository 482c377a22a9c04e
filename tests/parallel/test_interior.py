"""Convolutions in three parts: the interior reads own rows only, the edges the rest, and together they are the whole."""

import random

import pytest

from hpctrain.backend.kernels.graph import Node
from hpctrain.backend.kernels.specs import Conv2dSpec, PoolSpec, TensorSpec, Window
from hpctrain.boxes import shape_of
from hpctrain.parallel import layout
from hpctrain.parallel.interior import InteriorSplit, JoinRowsSpec, NoInterior, split_interior
from hpctrain.parallel.layout import Layout
from hpctrain.parallel.parallel_plan import Parallelism
from hpctrain.parallel.sharding_rules import OperatorSharding, SplitContext, shard

NO_ROW = NoInterior("leaves rank 0 of a split group no row to compute while its halo travels", by_size=True)


def _split(
    spec: Conv2dSpec | PoolSpec, shape: tuple[int, ...], tiles: tuple[int, int]
) -> tuple[InteriorSplit | NoInterior, OperatorSharding, Layout]:
    ranks = tiles[0] * tiles[1]
    own = layout.tiles(shape, tiles)
    output = spec.output(TensorSpec(shape, "float64")).shape
    context = SplitContext((shape[0], *(0,) * (ranks - 1)), tiles)
    sharding = shard(Node("conv", spec, (0,), 1), [own], output, Parallelism.DOMAIN, context)
    return split_interior(spec, sharding, own), sharding, own


def _convolution(kernel: int, stride: int, padding: int) -> Conv2dSpec:
    return Conv2dSpec(2, 3, Window((kernel, 3), (stride, 1), (padding, padding, 1, 1)))


def test_random_convolutions_are_cut_into_what_they_are() -> None:
    chance = random.Random(0)
    found = 0
    for _ in range(300):
        kernel, stride = chance.randint(1, 7), chance.randint(1, 3)
        spec = _convolution(kernel, stride, chance.randint(0, kernel))
        ranks, shape = chance.randint(2, 5), (2, chance.randint(kernel, 40), 5, 2)
        split, sharding, own = _split(spec, shape, (ranks, 1))
        if isinstance(split, NoInterior):
            continue
        found += 1
        for rank in range(ranks):
            rows = [part.writes.boxes[rank][1] for part in (split.top, split.interior, split.bottom)]
            whole = sharding.writes.boxes[rank][1]
            assert [r for part in rows for r in range(*part)] == list(range(*whole))
            assert rows[1][0] < rows[1][1]  # something is computed while halos travel
            assert split.interior.reads.boxes[rank] == own.boxes[rank]
            for part in (split.top, split.interior, split.bottom):
                x = TensorSpec(shape_of(part.reads.boxes[rank]), "float64")
                assert part.specs[rank].output(x).shape == shape_of(part.writes.boxes[rank])
    assert found > 60


def test_a_halo_of_one_row_leaves_all_others_to_the_interior() -> None:
    split, _, _ = _split(_convolution(3, 1, 1), (1, 12, 5, 2), (3, 1))
    assert isinstance(split, InteriorSplit)
    assert [box[1] for box in split.interior.writes.boxes] == [(0, 3), (5, 7), (9, 12)]
    assert [box[1] for box in split.top.reads.boxes] == [(0, 0), (3, 6), (7, 10)]


@pytest.mark.parametrize(
    ("spec", "shape", "tiles", "why"),
    [
        (_convolution(1, 1, 0), (1, 12, 5, 2), (3, 1), NoInterior("reads no row of another rank")),
        (_convolution(7, 1, 3), (1, 9, 5, 2), (3, 1), NO_ROW),
        (_convolution(3, 1, 1), (1, 2, 5, 2), (3, 1), NO_ROW),
        (_convolution(3, 1, 1), (1, 12, 8, 2), (2, 2), NoInterior("has images that are split by columns too (grid.tiles)")),
        (PoolSpec("max", Window((3, 3), (1, 1), (1, 1, 1, 1))), (1, 12, 5, 2), (3, 1), NoInterior("is no convolution")),
    ],
)
def test_what_is_left_undivided_and_why(
    spec: Conv2dSpec | PoolSpec, shape: tuple[int, ...], tiles: tuple[int, int], why: NoInterior
) -> None:
    assert _split(spec, shape, tiles)[0] == why


@pytest.mark.parametrize("use", [Parallelism.MODEL, Parallelism.BATCH])
def test_other_uses_are_left_undivided(use: Parallelism) -> None:
    spec, shape = _convolution(3, 1, 1), (2, 12, 5, 2)
    own = layout.tiles(shape, (2, 1))
    sharding = shard(Node("conv", spec, (0,), 1), [own], (2, 12, 5, 3), use, SplitContext((1, 1), (2, 1)))
    assert split_interior(spec, sharding, own) == NoInterior("is not under domain")


def test_windows_that_lie_in_the_padding_beside_the_image_are_left_undivided() -> None:
    spec = Conv2dSpec(2, 3, Window((3, 4), (1, 3), (1, 1, 4, 0)))
    assert isinstance(_split(spec, (1, 12, 1, 2), (2, 1))[0], NoInterior)


def test_joined_rows_add_up() -> None:
    parts = [TensorSpec((2, rows, 5, 3), "float64") for rows in (0, 4, 1)]
    assert JoinRowsSpec().output(*parts).shape == (2, 5, 5, 3)
