"""Sizes of the catalogue's models, from their declarations, graphs and plans. No array is allocated."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpctrain.backend.graph import Graph, GraphBuilder
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.specs import Conv2dSpec, LinearSpec, TensorSpec
from hpctrain.models import catalogue
from hpctrain.nn.compile.compiler import compile_graph
from hpctrain.nn.layers import Layer

_BATCH = 64  # large enough that scratch memory of a fixed size hardly counts


@dataclass(frozen=True)
class ModelSize:
    """Size of a model with its default options, for the images that it is designed for.

    Attributes:
        image_shape: (H, W, C) of the images.
        parameters: number of trained elements.
        flops: floating-point operations of the convolutions and linear layers in the forward pass of one image; a multiply-add
            counts as two.
        memory_bytes: bytes per image of the arena of a float32 training step, which holds activations and scratch, for a large
            batch with NumPy's kernels. That of oneDNN's kernels differs, mostly by at most a fifth.
    """

    image_shape: tuple[int, int, int]
    parameters: int
    flops: int
    memory_bytes: int


def size_of_model(name: str) -> ModelSize:
    """Return the size of a model of the catalogue.

    Raises:
        ConfigError: there is no model of this name, or it has no size of images.
    """
    model, shape = catalogue.build(name, {}), catalogue.image_shape(name)
    plan = compile_graph(_graph(model, _BATCH, shape), NumpyKernelSet(), training=True)
    sample = _graph(model, 1, shape)
    return ModelSize(
        image_shape=shape,
        parameters=sum(math.prod(spec.shape) for _, layer in model.walk() for spec in layer.parameters().values()),
        flops=sum(
            node.spec.flops(*(sample.tensors[tensor] for tensor in node.inputs))
            for node in sample.nodes
            if isinstance(node.spec, Conv2dSpec | LinearSpec)
        ),
        memory_bytes=plan.arena_bytes // _BATCH,
    )


def _graph(model: Layer, batch: int, image_shape: tuple[int, int, int]) -> Graph:
    builder = GraphBuilder(TensorSpec((batch, *image_shape)))
    return builder.build(model.lower(builder, 0, ""))
