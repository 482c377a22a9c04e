"""The convolutions of a model as a GPU is asked for them: from its graph, every direction, none that nobody needs."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.gpu.convolutions import AskedDevice, convolutions, graph_of, random_convolutions
from hpctrain.backend.kernels.specs import Conv2dSpec


def test_every_convolution_of_the_graph_is_asked_for_in_three_directions_but_the_images_get_no_gradient() -> None:
    keys = convolutions("resnet20", 2, "bfloat16")
    graph = graph_of("resnet20", 2, "bfloat16")
    specs = {
        (graph.tensors[node.inputs[0]].shape, node.spec.weight_shape, node.spec.window)
        for node in graph.nodes
        if isinstance(node.spec, Conv2dSpec)
    }
    kinds = Counter(key.kind for key in keys)
    assert kinds == {"forward": len(specs), "weight": len(specs), "input": len(specs) - 1}
    assert {key.x for key in keys if key.kind == "input"} == {shape for shape, *_ in specs if shape[3] != 3}
    assert {(key.dtype, key.precision) for key in keys} == {("bfloat16", "bfloat16")}


@pytest.mark.parametrize(("precision", "dtype"), [("float32", "float32"), ("tf32", "float32")])
def test_keys_say_the_precision_and_the_batch(precision: str, dtype: str) -> None:
    keys = convolutions("small", 3, precision)
    assert {(key.dtype, key.precision, key.x[0]) for key in keys} == {(dtype, precision, 3)}


def test_a_convolution_that_was_only_asked_for_cannot_be_run() -> None:
    device = AskedDevice()
    (key, *_) = convolutions("small", 1, "float32")
    with pytest.raises(NotImplementedError, match="only asked for"):
        device.convolution(key).run()
    assert list(device.keys) == [key]


def test_random_geometries_are_many_and_the_same_each_time() -> None:
    keys = random_convolutions(40, "bfloat16")
    assert keys == random_convolutions(40, "bfloat16") != random_convolutions(40, "bfloat16", seed=1)
    assert Counter(key.kind for key in keys) == {"forward": 40, "input": 40, "weight": 40}
    forward = [key for key in keys if key.kind == "forward"]
    assert {key.fused for key in forward} == {"", "bias", "bias_relu"}
    assert any(key.groups > 1 for key in forward)
    assert any(key.padding[0] != key.padding[1] for key in forward)
    assert any(key.dilation != (1, 1) for key in forward)
    assert any(key.x[3] % 8 for key in forward)
