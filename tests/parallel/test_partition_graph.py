"""Partitioned graphs: moves where layouts differ, none where they agree, and one for all readers of the same elements."""

import pytest

from hpctrain.backend.kernels.graph import Graph, GraphBuilder
from hpctrain.backend.kernels.specs import TensorSpec
from hpctrain.boxes import shape_of
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import SingleCommunicator
from hpctrain.errors import ConfigError
from hpctrain.models import catalogue
from hpctrain.nn.layer import Layer
from hpctrain.nn.layers.conv2d import Conv2d
from hpctrain.nn.layers.flatten import Flatten
from hpctrain.nn.layers.linear import Linear
from hpctrain.nn.layers.relu import ReLU
from hpctrain.nn.layers.residual import Residual
from hpctrain.nn.layers.sequential import Sequential
from hpctrain.parallel.layout import LayoutKind
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.partition_graph import PartitionedGraph, partition_graph
from hpctrain.parallel.rank_graph import GridDistribution
from hpctrain.parallel.split_group import SplitGroup
from tests.support import nets
from tests.support.distributed import Double

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


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    comm = SingleCommunicator()
    group = SplitGroup(comm, ProgressEngine(rank=0, deadline_seconds=5, abort=comm.abort))
    with pytest.raises(ConfigError, match=r"'layer9\.\*'; the nearest is .layer"):
        GridDistribution(ParallelPlan(1, 1, use={"layer9.*": _D}), group).prepare(_graph(nets.residual(), (1, 9, 7, 3)))
