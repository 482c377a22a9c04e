"""Strategy `sparse`: what is refused, which slices are compressed, and what a step posts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import pytest

from hpctrain.averaging.collective_schedule import CollectiveSchedule, OperationKind, Stream
from hpctrain.averaging.slices import Compression
from hpctrain.averaging.strategies.sparse import Sparse, SparseOptions
from hpctrain.comm.link import LinkModel
from hpctrain.errors import HpctrainError, OptionError
from hpctrain.nn.parameter import GroupLayout, ParameterSpec
from hpctrain.optim.base import NormsNeeded
from tests.support.averaging import make_group, planned

NODES = {"4 of 1": (0, 1, 2, 3), "2 of 2": (0, 1, 0, 1), "2 of 3": (0, 0, 0, 1, 1, 1)}


def _layout(*shapes: tuple[int, ...]) -> GroupLayout:
    specs = {
        f"l{i}.weight": ParameterSpec(shape, lambda random, shape: random.standard_normal(shape), decay=len(shape) > 1)
        for i, shape in enumerate(shapes)
    }
    return GroupLayout(specs, "float32")


def _schedule(layout: GroupLayout, nodes: Sequence[int], link: LinkModel | None = None, **options: object) -> CollectiveSchedule:
    schedule = planned(Sparse, layout, len(nodes), nodes=nodes, **options).plan(link)
    assert schedule is not None
    return schedule


def _compressed(schedule: CollectiveSchedule) -> set[str]:
    return {name for piece in schedule.slices if piece.compression for name in piece.parameters}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"density": 0.0}, "density is 0.0, but must be above 0 and at most 1"),
        ({"density": 1.5}, "density is 1.5, but must be above 0 and at most 1"),
        ({"density": float("nan")}, "density is nan, but must be above 0 and at most 1"),
        ({"density": 0.1, "warmup_density": 0.05, "warmup_steps": 9}, "from density, 0.1, to 1; the nearest legal value is 0.1"),
        ({"warmup_density": 2.0, "warmup_steps": 9}, "the nearest legal value is 1.0"),
        ({"warmup_steps": -1}, "warmup_steps is -1, but must be at least 0"),
        ({"least_elements": 0}, "least_elements is 0"),
        ({"momentum_correction": 1.0}, "momentum_correction is 1.0, but must be in [0, 1)"),
        ({"sizes": "measured", "bucket_bytes": 9}, "sizes is measured, but bucket_bytes is 9"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(OptionError, match=re.escape(sentence)):
        SparseOptions(**options)  # type: ignore[arg-type]


def test_one_node_is_refused_but_not_one_rank() -> None:
    with pytest.raises(HpctrainError, match=r"all 3 ranks are on one node; choose sharded, or set averager.two_level to false"):
        planned(Sparse, make_group(), 3, nodes=(0, 0, 0))
    planned(Sparse, make_group(), 3, nodes=(0, 0, 0), two_level=False)
    assert _compressed(_schedule(_layout((100, 100)), (0,), compress="always")) == set()


def test_two_momenta_are_refused() -> None:
    with pytest.raises(OptionError, match=r"momentum_correction is 0.9, but the optimizer has a momentum of 0.5, too"):
        planned(Sparse, make_group(), 3, momentum=0.5, momentum_correction=0.9)
    planned(Sparse, make_group(), 3, momentum=0.5)
    planned(Sparse, make_group(), 3, momentum_correction=0.9)


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
@pytest.mark.parametrize("compress", ["auto", "always"])
def test_every_element_is_in_one_slice_and_small_ones_are_dense(nodes: tuple[int, ...], compress: str) -> None:
    layout = _layout((300, 300), (9000,), (40, 40), (7, 500, 500), (20,))
    schedule = _schedule(layout, nodes, compress=compress, bucket_bytes=4096)
    assert schedule.slices[0].start == 0
    assert schedule.slices[-1].stop == layout.size
    assert all(a.stop == b.start for a, b in pairwise(schedule.slices))
    assert _compressed(schedule) == {"l0.weight", "l3.weight"}  # not l1, which has no decay, nor l2, which is small
    compressions = {piece.compression for piece in schedule.slices}
    assert compressions == {None, Compression(len(set(nodes)), 0.01)}


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_a_density_that_does_not_pay_sends_everything_whole(nodes: tuple[int, ...]) -> None:
    """2 b_v / (m (b_v + b_i)) = 1 / m for float32."""
    layout, turn = _layout((3000, 3000)), 1 / len(set(nodes))
    assert _compressed(_schedule(layout, nodes, density=turn * 0.95)) == {"l0.weight"}
    assert _compressed(_schedule(layout, nodes, density=turn * 1.05)) == set()
    assert _compressed(_schedule(layout, nodes, density=1.0, compress="always")) == {"l0.weight"}


def test_on_a_measured_link_the_work_of_choosing_counts() -> None:
    layout, nodes = _layout((3000, 3000)), NODES["4 of 1"]
    slow, fast = LinkModel(100e-6, 1 / 25e6), LinkModel(1e-6, 1 / 10e9)
    assert _compressed(_schedule(layout, nodes, slow, sizes="measured")) == {"l0.weight"}
    assert _compressed(_schedule(layout, nodes, fast, sizes="measured")) == set()
    assert _compressed(_schedule(layout, nodes, fast)) == {"l0.weight"}  # by rule: the same on any link


@pytest.mark.parametrize("norms", NormsNeeded)
@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_sums_within_nodes_come_before_what_crosses_them(nodes: tuple[int, ...], norms: NormsNeeded) -> None:
    options = {"compress": "always", "least_elements": 4, "bucket_bytes": 100, "norms_needed": norms}
    schedule = _schedule(make_group(), nodes, **options)
    sums: set[OperationKind] = {OperationKind.SPARSE}
    if len(nodes) > len(set(nodes)):
        sums.add(OperationKind.REDUCE_SCATTER)
    assert any(piece.compression for piece in schedule.slices)
    for k, piece in enumerate(schedule.slices):
        of_slice = [operation for operation in schedule.operations if operation.slice == k]
        kinds = {operation.kind for operation in of_slice} - {OperationKind.NORMS}
        expected = sums if piece.compression else {OperationKind.REDUCE_SCATTER}
        assert kinds == expected | {OperationKind.ALLGATHER}
        streams = {operation.stream for operation in of_slice if operation.kind is OperationKind.SPARSE}
        assert streams == ({Stream.NODES} if piece.compression else set())


@pytest.mark.parametrize(
    "options",
    [{"density": 0.02}, {"compress": "always"}, {"least_elements": 10}, {"bucket_bytes": 50}, {"two_level": False}],
    ids=str,
)
def test_a_stored_schedule_is_of_the_same_options(options: dict[str, object]) -> None:
    nodes = NODES["2 of 2"]
    stored = _schedule(make_group(), nodes)
    assert planned(Sparse, make_group(), 4, nodes=nodes, warmup_steps=3, momentum_correction=0.5).accepts(stored)
    assert not planned(Sparse, make_group(), 4, nodes=nodes, **options).accepts(stored)
