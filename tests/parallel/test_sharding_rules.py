"""The rules of distribution, kind by kind of operation and use."""

from dataclasses import replace
from typing import Any

import pytest

from hpctrain.backend.kernels.graph import Node
from hpctrain.backend.kernels.specs import (
    AdaptiveAveragePoolSpec,
    AddSpec,
    BatchNormSpec,
    Conv2dSpec,
    DropoutSpec,
    FlattenSpec,
    LinearSpec,
    PoolSpec,
    ReluSpec,
    Spec,
    TensorSpec,
    Window,
)
from hpctrain.boxes import shape_of
from hpctrain.parallel import layout
from hpctrain.parallel.layout import Layout, LayoutKind
from hpctrain.parallel.parallel_plan import Parallelism
from hpctrain.parallel.redistribute import NothingSpec, PartialMeanSpec
from hpctrain.parallel.sharding_rules import OperatorSharding, SplitContext, shard

IMAGES, VECTORS = (4, 9, 6, 8), (4, 10)
_WINDOW = Window((3, 3), (2, 2), (1, 1, 1, 1))
SPECS: dict[str, tuple[Spec, tuple[int, ...]]] = {
    "conv": (Conv2dSpec(8, 5, _WINDOW), IMAGES),
    "grouped": (Conv2dSpec(8, 16, _WINDOW, groups=4), IMAGES),
    "max pool": (PoolSpec("max", _WINDOW), IMAGES),
    "average pool": (PoolSpec("average", _WINDOW, ceil_mode=True), IMAGES),
    "batch norm": (BatchNormSpec(8, synchronised=True), IMAGES),
    "relu": (ReluSpec(), IMAGES),
    "add": (AddSpec(), IMAGES),
    "dropout": (DropoutSpec(0.5, "drop"), IMAGES),
    "global pool": (AdaptiveAveragePoolSpec((1, 1)), IMAGES),
    "adaptive pool": (AdaptiveAveragePoolSpec((3, 2)), IMAGES),
    "flatten": (FlattenSpec(), IMAGES),
    "linear": (LinearSpec(10, 7), VECTORS),
    "vector relu": (ReluSpec(), VECTORS),
}
#: what DOMAIN and MODEL split; the rest falls back to samples
ROWS = {"conv", "grouped", "max pool", "average pool", "batch norm", "relu", "add", "dropout"}
CHANNELS = {*SPECS} - {"flatten"}


def _shard(
    name: str, use: Parallelism, counts: tuple[int, ...] = (3, 0, 1), tiles: tuple[int, int] | None = None
) -> OperatorSharding:
    spec, shape = SPECS[name]
    inputs = 2 if name == "add" else 1
    output = spec.output(*(TensorSpec(shape, "float64"),) * inputs).shape
    samples = layout.samples(shape, counts)
    node = Node(name, spec, tuple(range(inputs)), inputs)
    return shard(node, [samples] * inputs, output, use, SplitContext(counts, tiles or (len(counts), 1)))


@pytest.mark.parametrize("use", Parallelism)
@pytest.mark.parametrize("name", SPECS)
def test_every_rank_writes_what_its_layout_says(name: str, use: Parallelism) -> None:
    """Each rank's own spec, applied to what it reads, gives its part of the output: all shapes agree."""
    for counts, tiles in (((3, 0, 1), None), ((4, 0, 0, 0), (2, 2)), ((1, 1, 1, 1), (1, 4)), ((1,) * 4 + (0,) * 8, (12, 1))):
        sharding = _shard(name, use, counts, tiles)
        for rank, spec in enumerate(sharding.specs):
            reads = [TensorSpec(shape_of(read.boxes[rank]), "float64") for read in sharding.reads]
            shape = spec.output(*reads).shape
            assert shape == (sharding.writes.shape if sharding.summed else shape_of(sharding.writes.boxes[rank])), (name, rank)


@pytest.mark.parametrize("name", SPECS)
def test_what_is_split_by_which_use(name: str) -> None:
    assert _shard(name, Parallelism.BATCH).writes.kind is LayoutKind.SAMPLES
    assert _shard(name, Parallelism.DOMAIN).writes.kind is (LayoutKind.TILES if name in ROWS else LayoutKind.SAMPLES)
    assert _shard(name, Parallelism.MODEL).writes.kind is (LayoutKind.CHANNELS if name in CHANNELS else LayoutKind.SAMPLES)
    assert all(_shard(name, use).writes.is_partition for use in Parallelism)


@pytest.mark.parametrize("name", ["conv", "grouped", "linear", "batch norm"])
def test_shards_are_the_output_channels(name: str) -> None:
    assert _shard(name, Parallelism.BATCH).channel_intervals is None
    assert _shard(name, Parallelism.DOMAIN).channel_intervals is None
    sharding = _shard(name, Parallelism.MODEL)
    assert sharding.channel_intervals == tuple(box[-1] for box in sharding.writes.boxes)


def test_groups_stay_whole_and_bring_their_input_channels() -> None:
    sharding = _shard("grouped", Parallelism.MODEL)  # 4 groups of 2 -> 4 channels over 3 ranks
    assert [box[-1] for box in sharding.reads[0].boxes] == [(0, 4), (4, 6), (6, 8)]
    assert sharding.channel_intervals == ((0, 8), (8, 12), (12, 16))
    assert [spec.groups for spec in sharding.specs if isinstance(spec, Conv2dSpec)] == [2, 1, 1]


def test_ranks_without_channels_compute_nothing() -> None:
    sharding = _shard("conv", Parallelism.MODEL, (1, 1, 1, 1, 0, 0, 0))  # 5 channels over 7 ranks
    assert [isinstance(spec, NothingSpec) for spec in sharding.specs] == [False] * 5 + [True] * 2


def test_statistics_are_merged_over_who_shares_the_channels() -> None:
    def merge(use: Parallelism, synchronised: bool) -> Any:
        node = Node("bn", BatchNormSpec(8, synchronised=synchronised), (0,), 1)
        inputs = [layout.samples(IMAGES, (2, 1, 1))]
        spec = shard(node, inputs, IMAGES, use, SplitContext((2, 1, 1), (3, 1))).specs[0]
        assert isinstance(spec, BatchNormSpec)
        return spec.synchronised, spec.merge

    assert merge(Parallelism.BATCH, True) == (True, "all")
    assert merge(Parallelism.DOMAIN, True) == (True, "all")
    assert merge(Parallelism.MODEL, True) == (True, "data")
    assert merge(Parallelism.BATCH, False) == (False, "all")
    assert merge(Parallelism.DOMAIN, False) == (True, "split")
    assert merge(Parallelism.MODEL, False)[0] is False


def test_masks_know_where_they_lie() -> None:
    for use in Parallelism:
        sharding = _shard("dropout", use)
        for box, spec in zip(sharding.writes.boxes, sharding.specs, strict=True):
            assert isinstance(spec, DropoutSpec)
            assert spec.first_sample == box[0][0]
            if use is not Parallelism.BATCH:
                assert spec.unsplit_shape == IMAGES[1:]
                assert spec.origin == tuple(start for start, _ in box[1:])


def test_masks_of_whole_samples_have_no_place_in_them() -> None:
    node = Node("drop", DropoutSpec(0.5, "drop", per_sample=True), (0,), 1)
    for use in Parallelism:
        sharding = shard(node, [layout.samples(IMAGES, (2, 1, 1))], IMAGES, use, SplitContext((2, 1, 1), (3, 1)))
        for box, spec in zip(sharding.writes.boxes, sharding.specs, strict=True):
            assert spec == replace(node.spec, first_sample=box[0][0])


def test_global_pooling_of_tiles_is_a_sum_of_parts() -> None:
    sharding = _shard("global pool", Parallelism.DOMAIN)
    assert sharding.summed
    assert sharding.specs == (PartialMeanSpec(9 * 6),) * 3


def test_only_the_last_tile_has_the_window_that_reaches_beyond() -> None:
    spec = PoolSpec("average", Window((3, 3), (2, 2), (0, 0, 0, 0)), ceil_mode=True)  # 6 rows: the third window has 2
    shape = (1, 6, 7, 2)
    node = Node("pool", spec, (0,), 1)
    sharding = shard(node, [layout.tiles(shape, (3, 1))], (1, 3, 3, 2), Parallelism.DOMAIN, SplitContext((1, 0, 0), (3, 1)))
    assert [spec.ceil_mode for spec in sharding.specs if isinstance(spec, PoolSpec)] == [False, False, True]


def _split(shape: tuple[int, ...]) -> Layout:
    return layout.channels(shape, [(0, 5), (5, 8)])


def test_channels_stay_where_they_are() -> None:
    """What is done per channel follows an uneven split, so nothing moves."""
    for name in ("max pool", "batch norm", "relu", "add", "dropout", "global pool"):
        spec, shape = SPECS[name]
        inputs = 2 if name == "add" else 1
        output = spec.output(*(TensorSpec(shape, "float64"),) * inputs).shape
        node = Node(name, spec, tuple(range(inputs)), inputs)
        sharding = shard(node, [_split(shape)] * inputs, output, Parallelism.MODEL, SplitContext((4, 0), (2, 1)))
        assert all(read.same_boxes(_split(shape)) for read in sharding.reads)
        assert [box[-1] for box in sharding.writes.boxes] == [(0, 5), (5, 8)]
