"""Plans: which use a layer has, how operations are sharded and layouts cut, and where a partitioned graph moves data."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.backend.graph import Graph, GraphBuilder, Node
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.specs import (
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
from hpctrain.core.errors import ConfigError
from hpctrain.core.intervals import even_intervals, relative, shape_of, whole
from hpctrain.models import catalogue
from hpctrain.nn.compile.compiler import compile_graph
from hpctrain.nn.layers import Conv2d, Flatten, Layer, Linear, ReLU, Residual, Sequential
from hpctrain.optim.optimizers import Sgd
from hpctrain.parallel import layout
from hpctrain.parallel.layout import Layout, LayoutKind, local_window, receptive_field, window_receptive_field
from hpctrain.parallel.moves import NothingSpec, PartialMeanSpec, RedistributeSpec, ReduceScatterSpec, transfer, unused_group
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.partition_graph import PartitionedGraph, partition_graph
from hpctrain.parallel.rank_graph import LocalGraph, local_graphs, training_plan, whole_graph
from hpctrain.parallel.sharding_rules import OperatorSharding, SplitContext, shard
from tests.support import nets
from tests.support.distributed import Double
from tests.support.planned import job_of
from tests.support.sampling import amount
from tests.support.training import Task


def test_the_last_matching_pattern_decides() -> None:
    plan = ParallelPlan(
        2, 3, Parallelism.BATCH, {"features.*": Parallelism.DOMAIN, "features.2*": Parallelism.MODEL, "*.fc": Parallelism.MODEL}
    )
    uses = {name: plan.use_of(name).value for name in ("features.0", "features.28", "classifier.0", "head.deep.fc")}
    assert uses == {"features.0": "domain", "features.28": "model", "classifier.0": "batch", "head.deep.fc": "model"}


def test_a_pattern_without_a_layer_is_refused_with_the_nearest() -> None:
    plan = ParallelPlan(2, 1, use={"feature.*": Parallelism.DOMAIN})
    with pytest.raises(ConfigError, match=r"'feature\.\*'; the nearest is .features\.0."):
        plan.check(["classifier", "features.0"])
    ParallelPlan(2, 1, use={"features.?": Parallelism.DOMAIN}).check(["classifier", "features.0"])


def test_tiles_must_multiply_to_the_split_group() -> None:
    with pytest.raises(ConfigError, match=r"2 x 2 make 4 parts, but must make 6"):
        ParallelPlan(6, 1, tiles=(2, 2))
    assert ParallelPlan(6, 1, tiles=(2, 3)).image_tiles == (2, 3)
    assert ParallelPlan(6, 1).image_tiles == (6, 1)


def test_uses_may_be_given_as_plain_strings() -> None:
    plan = ParallelPlan(2, 1, "model", {"c": "domain"})  # type: ignore[arg-type, dict-item]
    assert plan == ParallelPlan(2, 1, Parallelism.MODEL, {"c": Parallelism.DOMAIN})
    assert plan.default is Parallelism.MODEL
    assert plan.use_of("c") is Parallelism.DOMAIN


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"use": {"c": "domian"}}, r"'domian'; the nearest is .domain. \(of .batch., .model., .domain.\)\."),
        ({"default": None}, "cannot be None; there are .batch., .model., .domain."),
        ({"rows": 0}, "grid.rows is 0, but must be an integer of at least 1"),
        ({"cols": -1}, "grid.cols is -1,"),
        ({"rows": True}, "grid.rows is True,"),
        ({"cols": 2.0}, r"grid.cols is 2\.0,"),
    ],
)
def test_what_is_no_plan_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ParallelPlan(**given)


def _owners(found: Layout) -> np.ndarray:
    """How many ranks hold each element."""
    held = np.zeros(found.shape, int)
    for box in found.boxes:
        held[relative(box, whole(found.shape))] += 1
    return held


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(0, 5), st.integers(0, 5), st.integers(1, 9))
def test_every_element_has_one_owner(counts: list[int], height: int, width: int, channels: int) -> None:
    shape, ranks = (sum(counts), height, width, channels), len(counts)
    made = [
        layout.samples(shape, counts),
        layout.channels(shape, even_intervals(channels, ranks)),
        layout.tiles(shape, (ranks, 1)),
        layout.tiles(shape, (1, ranks)),
    ]
    for found in made:
        assert found.is_partition
        assert len(found.boxes) == ranks
        assert (_owners(found) == 1).all()


def test_tiles_count_along_the_rows_first() -> None:
    found = layout.tiles((2, 5, 7, 3), (2, 3))
    assert [(box[1], box[2]) for box in found.boxes] == [
        ((0, 3), (0, 3)), ((0, 3), (3, 5)), ((0, 3), (5, 7)),
        ((3, 5), (0, 3)), ((3, 5), (3, 5)), ((3, 5), (5, 7)),
    ]  # fmt: skip
    assert (_owners(found) == 1).all()


def test_what_is_needed_is_no_partition() -> None:
    everything = layout.everything((2, 3), 3)
    assert not everything.is_partition
    assert (_owners(everything) == 3).all()
    assert everything.kind is LayoutKind.NEEDED


def test_layouts_agree_where_all_ranks_hold_the_same() -> None:
    shape = (4, 2, 2, 6)
    assert layout.samples(shape, (2, 2)).same_boxes(layout.needed(shape, layout.samples(shape, (2, 2)).boxes))
    assert not layout.samples(shape, (2, 2)).same_boxes(layout.samples(shape, (3, 1)))


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
    name: str,
    use: Parallelism,
    counts: tuple[int, ...] = (3, 0, 1),
    tiles: tuple[int, int] | None = None,
    reads: Callable[[tuple[int, ...]], Layout] | None = None,
) -> OperatorSharding:
    """Of an operator that reads samples, or what `reads` makes of their shape."""
    spec, shape = SPECS[name]
    inputs = 2 if name == "add" else 1
    output = spec.output(*(TensorSpec(shape, "float64"),) * inputs).shape
    read = layout.samples(shape, counts) if reads is None else reads(shape)
    node = Node(name, spec, tuple(range(inputs)), inputs)
    return shard(node, [read] * inputs, output, use, SplitContext(counts, tiles or (len(counts), 1)))


@pytest.mark.parametrize("use", Parallelism)
@pytest.mark.parametrize("name", SPECS)
def test_every_rank_writes_what_its_layout_says(name: str, use: Parallelism) -> None:
    """Each rank's own spec, applied to what it reads, returns its part of the output: all shapes agree."""
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
        sharding = _shard(name, Parallelism.MODEL, (4, 0), reads=_split)
        assert all(read.same_boxes(_split(SPECS[name][1])) for read in sharding.reads)
        assert [box[-1] for box in sharding.writes.boxes] == [(0, 5), (5, 8)]


_B, _D, _M = Parallelism.BATCH, Parallelism.DOMAIN, Parallelism.MODEL


def _graph(model: Layer, shape: tuple[int, ...]) -> Graph:
    builder = GraphBuilder(TensorSpec(shape, "float64"))
    return builder.build(model.lower(builder, 0, ""))


def _partitioned(model: Layer, shape: tuple[int, ...], plan: ParallelPlan, counts: tuple[int, ...]) -> PartitionedGraph:
    return partition_graph(_graph(model, shape), plan, counts)


def _moves(partitioned: PartitionedGraph) -> list[str]:
    return [step.name for step in partitioned.steps if step.move is not None]


def test_samples_alone_need_no_move() -> None:
    for name in ("vgg16_bn", "resnet50", "resnet20"):
        partitioned = _partitioned(catalogue.build(name, {}), (5, 64, 64, 3), ParallelPlan(3, 1), (2, 2, 1))
        assert _moves(partitioned) == []
        assert all(layout.kind is LayoutKind.SAMPLES for layout in partitioned.layouts)


def test_halos_only_where_windows_reach_beyond_their_tile() -> None:
    partitioned = _partitioned(catalogue.build("resnet18", {}), (4, 64, 64, 3), ParallelPlan(2, 1, _D), (2, 2))
    names = _moves(partitioned)
    expected = {f"layer{stage}.{block}.conv{number}.halo" for stage in range(1, 5) for block in (0, 1) for number in (1, 2)}
    assert set(names) == {"maxpool.halo", "avgpool.sum", *expected}  # a 1x1 of stride 2 reads its own rows
    assert len(names) == len(set(names))


def test_what_is_per_channel_is_done_before_the_gather() -> None:
    partitioned = _partitioned(catalogue.build("vgg16_bn", {}), (4, 64, 64, 3), ParallelPlan(2, 1, _M), (2, 2))
    gathers = [step for step in partitioned.steps if step.move is not None and step.name.startswith("features")]
    assert len(gathers) == 12  # one for each convolution but the first, which reads images
    heights = [step.move[0].shape[1] for step in gathers if step.move is not None]
    assert heights == [64, 32, 32, 16, 16, 16, 8, 8, 8, 4, 4, 4]  # pooled where a pool is
    assert partitioned.layouts[0].boxes == (((0, 4), (0, 64), (0, 64), (0, 3)),) * 2


def test_both_branches_of_a_block_take_one_layout() -> None:
    for use in (_D, _M, _B):
        partitioned = _partitioned(catalogue.build("resnet50", {}), (4, 65, 65, 3), ParallelPlan(3, 1, use), (2, 2, 0))
        for step in partitioned.steps:
            if step.node is not None and len(step.inputs) == 2:
                a, b = (partitioned.layouts[tensor] for tensor in step.inputs)
                assert a.boxes == b.boxes
                assert partitioned.layouts[step.output].kind is a.kind
        assert not [name for name in _moves(partitioned) if "add" in name]


def test_readers_of_the_same_elements_share_a_move() -> None:
    """The projection of a block reads what its first convolution reads, wholly: gathered once."""
    block = Residual({"conv1": Conv2d(4, 6, 3, padding=1)}, Conv2d(4, 6, 1), activation=ReLU())
    partitioned = _partitioned(Sequential({"double": Double(), "block": block}), (3, 5, 5, 4), ParallelPlan(3, 1, _M), (1, 1, 1))
    assert sum(name != "output.move" for name in _moves(partitioned)) == 1


def test_images_are_read_with_the_halo_of_the_first_layer() -> None:
    partitioned = _partitioned(catalogue.build("resnet18", {}), (3, 225, 225, 3), ParallelPlan(3, 1, _D), (1, 1, 1))
    assert [box[1] for box in partitioned.layouts[0].boxes] == [(0, 78), (73, 154), (149, 225)]  # 38, 38 and 37 of 113 rows
    assert _moves(partitioned)[0] == "maxpool.halo"


def test_an_input_with_several_readers_lies_as_samples() -> None:
    partitioned = _partitioned(
        Residual({"conv": Conv2d(3, 3, 1)}, None, activation=ReLU()), (2, 4, 4, 3), ParallelPlan(2, 1, _D), (1, 1)
    )
    assert partitioned.layouts[0].kind is LayoutKind.SAMPLES


@pytest.mark.parametrize("use", Parallelism)
@pytest.mark.parametrize("counts", [(4, 3), (0, 7), (0, 0), (3, 1, 2, 0, 0, 1)], ids=str)
def test_the_output_ends_as_samples(use: Parallelism, counts: tuple[int, ...]) -> None:
    partitioned = _partitioned(nets.residual(), (sum(counts), 9, 7, 3), ParallelPlan(len(counts), 1, use), counts)
    output = partitioned.layouts[partitioned.output]
    assert [shape_of(box) for box in output.boxes] == [(count, 5) for count in counts]
    assert output.is_partition


@pytest.mark.parametrize("use", Parallelism)
def test_shards_do_not_depend_on_the_samples(use: Parallelism) -> None:
    """Parameters lie the same for a full batch, a short one, and none."""
    plan = ParallelPlan(3, 1, use, {"layer2.*": _M, "bn1": _M})
    partitioned = [
        _partitioned(nets.residual(), (sum(counts), 9, 7, 3), plan, counts).shards()
        for counts in ((5, 5, 5), (1, 0, 0), (0, 0, 0))
    ]
    assert partitioned[0] == partitioned[1] == partitioned[2]
    assert partitioned[0]["layer2.conv1.weight"] == ((0, 4), (4, 8), (8, 12))


def test_a_mixed_plan_moves_at_each_change_of_use_only() -> None:
    model = Sequential(
        {
            "conv1": Conv2d(3, 4, 1), "relu1": ReLU(), "conv2": Conv2d(4, 6, 1), "relu2": ReLU(), "flatten": Flatten(),
            "fc1": Linear(6 * 36, 8), "relu3": ReLU(), "fc2": Linear(8, 5),
        }
    )  # fmt: skip
    plan = ParallelPlan(2, 1, _D, {"conv2": _M, "relu2": _M, "fc1": _M, "relu3": _M, "fc2": _B})
    partitioned = _partitioned(model, (4, 6, 6, 3), plan, (2, 2))
    assert [name.split(".")[0] for name in _moves(partitioned)] == ["conv2", "flatten", "fc1", "fc2"]


@st.composite
def _windows(draw: st.DrawFn) -> tuple[int, int, int, int, tuple[int, int]]:
    """(size, kernel, dilation, stride, padding) with at least one output."""
    kernel, dilation = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    extent = dilation * (kernel - 1) + 1
    padding = draw(st.tuples(st.integers(0, extent + 2), st.integers(0, extent + 2)))
    size = draw(st.integers(max(1, extent - sum(padding)), 40))
    return size, kernel, dilation, draw(st.integers(1, 3)), padding


@settings(max_examples=amount(133, 400))
@given(_windows(), st.integers(1, 8), st.booleans())
def test_what_is_read_is_what_the_taps_touch(
    found: tuple[int, int, int, int, tuple[int, int]], ranks: int, ceil_mode: bool
) -> None:
    size, kernel, dilation, stride, padding = found
    window = Window((kernel, 1), (stride, 1), (*padding, 0, 0), (dilation, 1))
    ceil_mode = ceil_mode and 2 * max(padding) <= kernel and dilation == 1  # pools only
    outputs = window.output_size((size, 1), ceil_mode=ceil_mode)[0]
    for begin, end in even_intervals(outputs, ranks):
        part = receptive_field(size, (begin, end), extent=window.extent[0], stride=stride, padding=padding)
        taps = [o * stride - padding[0] + k * dilation for o in range(begin, end) for k in range(kernel)]
        inside = [tap for tap in taps if 0 <= tap < size]
        if begin == end:
            assert part.start == part.stop
            continue
        # The rows from the first to the last tap's, without the padding; the first output starts where its padding does.
        assert part.start - part.before == taps[0]
        read = range(part.start, part.stop)
        assert set(inside) <= set(read)
        if len(read) > 1 or 0 <= part.start < size:
            assert part.start >= 0
            assert part.stop <= size
        else:
            assert not inside  # one row of zeros stands for the padding
        # The local window returns as many outputs as were asked for.
        local = Window((kernel, 1), (stride, 1), (part.before, part.after, 0, 0), (dilation, 1))
        assert local.output_size((len(read), 1), ceil_mode=part.ceil)[0] == end - begin
        assert not part.ceil or ceil_mode


def test_both_dims_and_the_padding_that_is_left() -> None:
    window = Window((3, 3), (1, 1), (1, 1, 1, 1))
    vertical, horizontal = window_receptive_field(window, (8, 6), ((0, 4), (3, 6)))
    assert (vertical.start, vertical.stop, horizontal.start, horizontal.stop) == (0, 5, 2, 6)
    local = local_window(window, vertical, horizontal)
    assert local.padding == (1, 0, 0, 1)
    assert local.output_size((5, 4)) == (4, 3)


KERNELS = NumpyKernelSet()


def graphs_of_ranks(
    rows: int,
    use: Parallelism,
    samples: int,
    net: Callable[[], Layer] = nets.plain,
    image_shape: tuple[int, int, int] = (9, 7, 3),
) -> list[LocalGraph]:
    job = job_of(Task(net, KERNELS, Sgd, image_shape))
    counts = tuple(samples for _ in range(rows))
    return local_graphs(partition_graph(job.graph_of(samples * rows), ParallelPlan(rows, 1, use), counts), range(rows))


@pytest.mark.parametrize("use", Parallelism)
@pytest.mark.parametrize("rows", [2, 3, 5])
def test_equal_graphs_need_the_same_memory_and_do_the_same(rows: int, use: Parallelism) -> None:
    by_graph: dict[LocalGraph, tuple[object, ...]] = {}
    for local in graphs_of_ranks(rows, use, 2):
        plan = compile_graph(local.graph, KERNELS, training=True)
        facts = plan.arena_bytes, plan.forward, plan.backward, [step.name for step in plan.steps], plan.tensors
        assert by_graph.setdefault(local, facts) == facts
        assert training_plan(local, KERNELS).arena_bytes == plan.arena_bytes
    assert len(by_graph) <= rows


@pytest.mark.parametrize("use", Parallelism)
def test_moves_have_the_words_of_their_pieces(use: Parallelism) -> None:
    group = unused_group()
    job = job_of(Task(nets.plain, KERNELS, Sgd))
    partitioned = partition_graph(job.graph_of(6), ParallelPlan(3, 1, use), (3, 2, 1))
    for rank, local in enumerate(local_graphs(partitioned, range(3))):
        for node in partitioned.local(rank, group).nodes:
            spec = node.spec
            if isinstance(spec, RedistributeSpec):
                share = transfer(spec.source, spec.target, rank)
                assert (local.moves[node.output].sent, local.moves[node.output].received) == (share.send_size, share.receive_size)
            elif isinstance(spec, ReduceScatterSpec):
                share = transfer(spec.target, spec.everything, rank)
                assert (local.moves[node.output].received, local.moves[node.output].sent) == (share.send_size, share.receive_size)
            else:
                assert node.output not in local.moves


def test_ranks_inside_of_an_image_are_equal_and_those_at_its_edges_are_not() -> None:
    top, *inside, bottom = graphs_of_ranks(8, Parallelism.DOMAIN, 1, nets.residual, (64, 4, 3))
    assert len({*inside}) < len(inside)
    assert not {top, bottom} & {*inside}


def test_a_graph_of_other_samples_or_names_is_another() -> None:
    job = job_of(Task(nets.plain, KERNELS, Sgd))
    other = job_of(Task(nets.residual, KERNELS, Sgd))
    assert whole_graph(job.graph_of(2)) == whole_graph(job.graph_of(2))
    assert len({whole_graph(one) for one in (job.graph_of(2), job.graph_of(3), other.graph_of(2))}) == 3


def test_dropouts_that_begin_elsewhere_are_alike() -> None:
    job = job_of(Task(lambda: nets.plain(dropout=0.5), KERNELS, Sgd))
    partitioned = partition_graph(job.graph_of(4), ParallelPlan(2, 1), (2, 2))
    assert len(set(local_graphs(partitioned, range(2)))) == 1


def test_plans_of_equal_graphs_are_one_and_share_operators_of_equal_layers() -> None:
    job = job_of(Task(nets.residual, KERNELS, Sgd, (8, 8, 3)))
    plan = training_plan(whole_graph(job.graph_of(2)), KERNELS)
    assert training_plan(whole_graph(job.graph_of(2)), KERNELS) is plan
    assert len({id(step.operator) for step in plan.steps}) < len(plan.steps)
    alone = compile_graph(job.graph_of(2), KERNELS, training=True)
    for part in ("memory", "forward", "backward", "tensors"):
        assert getattr(plan, part) == getattr(alone, part)
    assert [type(step.operator) for step in plan.steps] == [type(step.operator) for step in alone.steps]
