"""Bytes, FLOP and launches of each operation on a GPU, as the cuda kernel set does them: from specs, without a device.

A tensor that an operation reads or writes counts once each time that one of its kernels passes over it; caches are taken to keep
nothing from one kernel to the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hpctrain.backend.cuda.conv2d import CudaPatchConv2d, CudaPointwiseConv2d
from hpctrain.backend.graph import Graph, Node
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
    WithRelu,
    item_bytes,
)

Phase = Literal["forward", "backward"]
_PACK_BYTES = 16
GRADIENT_BYTES = 4  # of a parameter's gradient, value or momentum


@dataclass(frozen=True)
class Work:
    """Kernels of one kind that one operation starts.

    kind: what they do. products: whether they are convolutions or matrix products, whose time also depends on `flops`. Each of
    these counts as one launch, though a plan may take several.
    """

    phase: Phase
    kind: str
    launches: int
    bytes: int
    flops: int = 0
    products: bool = False


@dataclass(frozen=True)
class Sizes:
    """Bytes of an element.

    activation: of images, activations, their gradients, and weights as products read them. cast: weight gradients come out of
    cuDNN's plans in that dtype too, and are cast to float32.
    """

    activation: int
    cast: bool

    @property
    def dtype(self) -> str:
        """The dtype of activations."""
        return "bfloat16" if self.cast else "float32"

    @classmethod
    def of(cls, precision: str) -> Sizes:
        """Return the sizes of "bfloat16", "tf32" or "float32"."""
        activation = item_bytes("float32" if precision == "tf32" else precision)
        return cls(activation, activation < GRADIENT_BYTES)


@dataclass(frozen=True)
class Context:
    """One node in its graph.

    inputs, output: elements. wants: whether the gradient of each input is asked for. adds: whether it is added to what another
    reader of that input has written before.
    """

    inputs: tuple[int, ...]
    output: int
    wants: tuple[bool, ...]
    adds: tuple[bool, ...]
    sizes: Sizes

    def passes(self, phase: Phase, kind: str, elements: int, launches: int = 1) -> Work:
        """Return the work of kernels that read and write `elements` activations in total."""
        return Work(phase, kind, launches, elements * self.sizes.activation)

    def added(self) -> int:
        """Return the number of elements that are read once more because the first input's gradient is added to."""
        return self.inputs[0] if self.adds[0] else 0


def costs(graph: Graph, precision: str) -> Iterator[tuple[Node, Work]]:
    """Yield the work of all nodes of a fused graph for a training step, in forward order."""
    wanted = needed_gradients(graph)
    for node in graph.nodes:
        tensors = [graph.tensors[number] for number in node.inputs]
        last = [graph.consumers(number)[-1] is node for number in node.inputs]
        context = Context(
            tuple(math.prod(tensor.shape) for tensor in tensors),
            math.prod(graph.tensors[node.output].shape),
            tuple(number in wanted for number in node.inputs),
            tuple(not is_last for is_last in last),
            Sizes.of(precision),
        )
        for work in of_spec(node.spec, tensors, context):
            yield node, work


def needed_gradients(graph: Graph) -> set[int]:
    """Return the tensors whose gradient a step computes: those with a parameter before them."""
    wanted: set[int] = set()
    for node in graph.nodes:
        if node.parameters or wanted.intersection(node.inputs):
            wanted.add(node.output)
    return wanted


def of_spec(spec: Spec, tensors: Sequence[TensorSpec], context: Context) -> Iterator[Work]:
    """Yield the work of one operation."""
    match spec:
        case WithRelu():
            yield from _product(spec.inner, tensors[0], context, relu=True)
        case Conv2dSpec() | LinearSpec():
            yield from _product(spec, tensors[0], context, relu=False)
        case BatchNormSpec():
            yield from _batch_norm(spec, context)
        case PoolSpec() | AdaptiveAveragePoolSpec():
            yield from _pool(spec, context)
        case AddSpec() | ReluSpec() | DropoutSpec():
            yield from _elementwise(spec, context)
        case FlattenSpec():
            return
        case _:
            yield from _unknown(spec, context)


def _product(spec: Conv2dSpec | LinearSpec, x: TensorSpec, context: Context, *, relu: bool) -> Iterator[Work]:
    """Yield the work of y = x w. Each of the three products reads two of x, w and y and writes the third.

    Matrix products write float32 gradients of weights from bfloat16, and add to the input's gradient. cuDNN's plans do neither.
    """
    linear = isinstance(spec, LinearSpec)
    if not linear and not relu and CudaPatchConv2d.fits(spec, _activations(x, context), input_gradient=context.wants[0]):
        yield from _patches(spec, context, spec.flops(x))
        return
    name, matrices = "linear" if linear else "convolution", linear or (not relu and CudaPointwiseConv2d.fits(spec))
    item, weight, flops = context.sizes.activation, math.prod(spec.weight_shape), spec.flops(x)
    tensors = item * (context.inputs[0] + context.output)
    yield Work("forward", f"{name} forward", 1, tensors + item * weight, flops, products=True)
    if (linear and spec.bias) or (relu and not spec.bias):  # else the convolution's plan adds the bias and applies the ReLU
        yield context.passes("forward", "bias and ReLU", 2 * context.output)
    if spec.bias or relu:
        rows = context.output // spec.weight_shape[1 if linear else 0]
        launches = _sum_launches(rows, context.output // rows, item)
        yield context.passes("backward", "bias and ReLU", (3 if relu else 1) * context.output, launches)
    written = GRADIENT_BYTES if matrices else item
    yield Work("backward", f"{name} weight", 1, tensors + written * weight, flops, products=True)
    if context.sizes.cast and not matrices:
        yield Work("backward", "cast of gradients", 1, weight * (item + GRADIENT_BYTES))
    if context.wants[0]:
        added = item * context.added() if matrices else 0
        yield Work("backward", f"{name} input", 1, tensors + item * weight + added, flops, products=True)
        if context.adds[0] and not matrices:
            yield context.passes("backward", "sum of gradients", 3 * context.inputs[0])


def _patches(spec: Conv2dSpec, context: Context, flops: int) -> Iterator[Work]:
    """Yield the work of a convolution as a product of patches.

    One kernel writes the patches, and two products read them. Rows of patches, of weights and of their gradient are filled up to
    whole packs.
    """
    item, weight, channels = context.sizes.activation, math.prod(spec.weight_shape), spec.channels_out
    pack = _PACK_BYTES // item
    width = -(-weight // channels // pack) * pack
    patches, padded = context.output // channels * width, channels * width
    tensors = item * (patches + context.output)
    yield Work("forward", "patches", 3, item * (context.inputs[0] + patches + padded + 2 * weight))
    yield Work("forward", "convolution forward", 1, tensors + item * padded, flops, products=True)
    yield Work("backward", "convolution weight", 1, tensors + GRADIENT_BYTES * padded, flops, products=True)
    yield Work("backward", "patches", 1, 2 * GRADIENT_BYTES * weight)


def _activations(x: TensorSpec, context: Context) -> TensorSpec:
    """Return `x` in the dtype of activations; graphs are built without it."""
    return TensorSpec(x.shape, context.sizes.dtype)


def _sum_launches(rows: int, columns: int, item: int) -> int:
    """Return the launches of a sum over rows: 2 if one block with four rows per thread does not reach all rows."""
    width = _PACK_BYTES // item
    packs = columns // (width if columns % width == 0 else 1)
    wide = min(32, 1 << (packs - 1).bit_length())
    return 1 if rows * wide <= 4 * 256 else 2


def _batch_norm(spec: BatchNormSpec, context: Context) -> Iterator[Work]:
    """Yield moments and their finish, then the output; sums and their finish, then the input's gradient.

    Backward computes from x again what the ReLU has stopped. After an addition, forward keeps it, one byte for each 16 bytes of
    activations.
    """
    y, add, item = context.output, int(spec.add), context.sizes.activation
    mask = y * item // _PACK_BYTES if spec.add and spec.relu else 0
    added = sum(y for adds in context.adds if adds)
    yield Work("forward", "batch norm", 2, y * item)
    yield Work("forward", "batch norm", 1, (2 + add) * y * item + mask)
    yield Work("backward", "batch norm", 2, 2 * y * item + mask)
    yield Work("backward", "batch norm", 1, ((3 + add) * y + added) * item + mask)


def _pool(spec: PoolSpec | AdaptiveAveragePoolSpec, context: Context) -> Iterator[Work]:
    """Max pooling writes the winning tap of each output, one byte, and reads it in backward."""
    taps = context.output if isinstance(spec, PoolSpec) and spec.kind == "max" else 0
    size_bytes = (context.inputs[0] + context.output) * context.sizes.activation + taps
    yield Work("forward", "pooling", 1, size_bytes)
    if context.wants[0]:
        yield Work("backward", "pooling", 1, size_bytes + context.added() * context.sizes.activation)


def _elementwise(spec: AddSpec | ReluSpec | DropoutSpec, context: Context) -> Iterator[Work]:
    """Forward reads all inputs; backward reads the output's gradient, and the output as mask, and writes each gradient."""
    y, targets = context.output, sum(context.wants)
    mask = isinstance(spec, ReluSpec) or (isinstance(spec, AddSpec) and spec.relu)
    yield context.passes("forward", "elementwise", (len(context.inputs) + 1) * y)
    if targets:
        added = sum(wants and adds for wants, adds in zip(context.wants, context.adds, strict=True))
        yield context.passes("backward", "elementwise", (1 + mask + targets + added) * y)


def _unknown(spec: Spec, context: Context) -> Iterator[Work]:
    """One pass over inputs and output each way: a lower bound for what has no line of its own here."""
    elements = sum(context.inputs) + context.output
    yield context.passes("forward", f"{type(spec).__name__} (lower bound)", elements)
    if any(context.wants):
        yield context.passes("backward", f"{type(spec).__name__} (lower bound)", elements)


def update(parameters: int, sizes: Sizes) -> Work:
    """SGD with momentum: reads gradient, value and momentum, writes both, and the weights that products read."""
    shadow = sizes.activation if sizes.cast else 0
    return Work("backward", "update", 1, parameters * (5 * GRADIENT_BYTES + shadow))


def loss(logits: int, sizes: Sizes) -> Work:
    """Softmax cross entropy: two passes over the logits, and the gradient of them."""
    return Work("backward", "loss", 2, 3 * logits * sizes.activation)
