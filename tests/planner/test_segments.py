"""Segments are all nodes in order, one tensor between two of them, and at most one choice for a residual block."""

import pytest

from hpctrain.backend.kernels.specs import AddSpec, Conv2dSpec, LinearSpec
from hpctrain.planner.segments import segments
from tests.support.planner_jobs import job_of


@pytest.mark.parametrize(
    ("model", "count"), [("alexnet", 8), ("vgg16", 16), ("resnet18", 10), ("resnet152", 52), ("resnet20", 11)]
)
def test_segments_are_layers_with_weights_and_blocks(model: str, count: int) -> None:
    graph = job_of(model, (96, 96, 3), 1, {"width": 0.1}).graph_of(1)
    pieces = segments(graph)
    assert len(pieces) == count
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
    assert pieces[-1].stop == len(graph.nodes)
    for piece in pieces:
        nodes = piece.nodes(graph)
        assert any(isinstance(node.spec, Conv2dSpec | LinearSpec) for node in nodes)
        made = {piece.source, *(node.output for node in nodes)}
        assert all(tensor in made for node in nodes for tensor in node.inputs)
        outside = [node for node in graph.nodes if node not in nodes and made & set(node.inputs) - {piece.source}]
        assert all(set(node.inputs) & made <= {piece.output} for node in outside)
        sums = sum(isinstance(node.spec, AddSpec) for node in nodes)
        assert sums <= 1
