"""Convolution by matrix products on chunks of im2col."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hpctrain.backend.numpy.operator import NumpyOperator, column_sums
from hpctrain.backend.numpy.windows import COLUMN_BYTES, ColumnChunk, Columns, OutputBlock, blocks, taps
from hpctrain.backend.operators import Buffers, Request, StepContext, carve, total_bytes
from hpctrain.backend.specs import Conv2dSpec, TensorSpec, Window

#: function that writes the product of its first two arrays, (groups, m, k) and (groups, k, n), to the third, (groups, m, n)
Multiply = Callable[[np.ndarray, np.ndarray, np.ndarray], object]

#: Minimum number of weights that do not stay in the near caches between two uses. Reading them then costs more than a product
#: with few pixels.
MANY_WEIGHTS = 1 << 18


class NumpyConv2d(NumpyOperator):
    """Convolution y (N, Ho, Wo, K) of x (N, H, W, C) with weight (K, R, S, C / groups) and bias (K).

    The input's gradient of a stride-1 convolution is the convolution of dy with the flipped weights. For other strides, and for
    many weights and few pixels, it is a matrix product whose columns are added to their pixels of origin (col2im). A 1x1
    convolution is one product.

    Args:
        multiply: function that computes the products; default: `np.matmul`.
    """

    def __init__(self, spec: Conv2dSpec, x: TensorSpec, *, training: bool, multiply: Multiply = np.matmul) -> None:
        super().__init__(spec, (x,), training=training)
        self.conv, self.multiply = spec, multiply
        self.needs_inputs = (training,)
        weight_size = math.prod(spec.weight_shape)
        # Every chunk except the first adds to the weights' gradient. Large chunks make the products outweigh these sums.
        column_bytes = max(COLUMN_BYTES, weight_size * self.inputs[0].item_bytes)
        self.columns = Columns(
            x.shape, self.dtype, spec.window, _pair(self.output), groups=spec.groups, column_bytes=column_bytes
        )
        partial = weight_size if self.columns.count > 1 else 0
        self._weight_scratch: list[Request] = [*self.columns.scratch, ((partial,), self.dtype)]
        self.scratch_bytes = total_bytes(self._weight_scratch if training else self.columns.scratch)
        self.back: _Flipped | _Scattered | None = None
        if training:
            # With many weights and few pixels, flipping the weights takes longer than the product with them.
            costs = weight_size >= MANY_WEIGHTS and math.prod(self.output.shape[:3]) < self.conv.channels_out
            kind = _Flipped if spec.window.stride == (1, 1) and not costs else _Scattered
            self.back = kind(spec, self.inputs[0], self.output, column_bytes)
            self.scratch_bytes = max(self.scratch_bytes, total_bytes(self.back.scratch))

    def bind(self, buffers: Buffers) -> None:
        self.buffers = buffers
        spec = self.conv
        column, padded, *partial = carve(buffers.scratch, self._weight_scratch if self.training else self.columns.scratch)
        self.chunks = self.columns.bind(buffers.inputs[0], column, padded)
        self.weight = _grouped_weight(buffers.parameters["weight"], spec)
        self.out = _grouped_pixels(buffers.output, spec.groups)
        if self.training and buffers.output_grad is not None:
            self.d_out = _grouped_pixels(self.output_grad, spec.groups)
            self.d_weight = _grouped_weight(buffers.gradients["weight"], spec)
            self.partial = partial[0].reshape(self.d_weight.shape) if partial[0].size else partial[0]
            grad = self.input_grad()
            if self.back is not None and grad is not None:
                self.back.bind(buffers, self.output_grad, grad, add=self.accumulates())

    def forward(self, context: StepContext) -> None:
        weight = self.weight.transpose(0, 2, 1)
        flat = self.buffers.output.reshape(-1, self.conv.channels_out)
        for chunk in self.chunks:
            chunk.fill()
            self.multiply(chunk.matrix, weight, self.out[:, chunk.pixels])
            if self.conv.bias:
                rows = flat[chunk.pixels]
                np.add(rows, self.buffers.parameters["bias"], out=rows)

    def backward_parameters(self) -> None:
        for i, chunk in enumerate(self.chunks):
            chunk.fill()
            target = self.partial if i else self.d_weight
            self.multiply(self.d_out[:, chunk.pixels].transpose(0, 2, 1), chunk.matrix, target)
            if i:
                np.add(self.d_weight, self.partial, out=self.d_weight)
        if not self.chunks:
            self.d_weight.fill(0)
        if self.conv.bias:
            column_sums(self.output_grad.reshape(-1, self.conv.channels_out), self.buffers.gradients["bias"])

    def backward_input(self) -> None:
        if self.back is not None and self.input_grad() is not None:
            self.back.run(self.multiply)


@dataclass
class _Flipped:
    """The input's gradient of a stride-1 convolution: im2col of dy times the weights, flipped, with K and C exchanged."""

    spec: Conv2dSpec
    x: TensorSpec
    y: TensorSpec
    column_bytes: int

    def __post_init__(self) -> None:
        window, groups = self.spec.window, self.spec.groups
        (extent_h, extent_w), (top, _, left, _) = window.extent, window.padding
        turned = Window(window.kernel, (1, 1), (extent_h - 1 - top, 0, extent_w - 1 - left, 0), window.dilation)
        self.columns = Columns(self.y.shape, self.x.dtype, turned, _pair(self.x), groups=groups, column_bytes=self.column_bytes)
        r, s = window.kernel
        weight = (groups, r, s, self.spec.channels_out // groups, self.spec.channels_in // groups)
        self.limit = max(1, COLUMN_BYTES // (self.spec.channels_in * self.x.item_bytes))
        sums = (groups, min(self.limit, self.columns.largest), self.spec.channels_in // groups)
        self.scratch: list[Request] = [*self.columns.scratch, (weight, self.x.dtype), (sums, self.x.dtype)]

    def bind(self, buffers: Buffers, d_out: np.ndarray, grad: np.ndarray, *, add: bool) -> None:
        spec = self.spec
        column, padded, self.turned, self.sums = carve(buffers.scratch, self.scratch)
        self.chunks: list[ColumnChunk] = self.columns.bind(d_out, column, padded)
        weight = buffers.parameters["weight"].reshape(spec.groups, -1, *spec.weight_shape[1:])
        self.source = weight[:, :, ::-1, ::-1].transpose(0, 2, 3, 1, 4)
        self.matrix = self.turned.reshape(spec.groups, -1, self.turned.shape[4])
        self.grad, self.add = _grouped_pixels(grad, spec.groups), add

    def run(self, multiply: Multiply) -> None:
        np.copyto(self.turned, self.source)
        for chunk in self.chunks:
            chunk.fill()
            target = self.grad[:, chunk.pixels]
            if not self.add:
                multiply(chunk.matrix, self.matrix, target)
                continue
            for start in range(0, chunk.stop - chunk.start, self.limit):
                rows = slice(start, min(start + self.limit, chunk.stop - chunk.start))
                sums = self.sums[:, : rows.stop - start]
                multiply(chunk.matrix[:, rows], self.matrix, sums)
                np.add(target[:, rows], sums, out=target[:, rows])


@dataclass
class _Part:
    """One block of output pixels in `_Scattered`.

    Attributes:
        d_out: the block's part of dy, factor of the product.
        columns: memory for the product.
        additions: for each tap, the pixels of dx and the columns that are added to them.
    """

    d_out: np.ndarray
    columns: np.ndarray
    additions: list[tuple[np.ndarray, np.ndarray]]


@dataclass
class _Scattered:
    """The input's gradient of a strided convolution: dy times the weights, added tap by tap to the pixels that the taps read."""

    spec: Conv2dSpec
    x: TensorSpec
    y: TensorSpec
    column_bytes: int

    def __post_init__(self) -> None:
        n, ho, wo, _ = self.y.shape
        r, s = self.spec.window.kernel
        pixel_bytes = r * s * self.spec.channels_in * self.x.item_bytes
        self.blocks = list(blocks(n, (ho, wo), self.column_bytes // pixel_bytes))
        self.largest = max((_pixels(block, wo) for block in self.blocks), default=0)
        depth = r * s * self.spec.channels_in // self.spec.groups
        self.scratch: list[Request] = [((self.spec.groups * self.largest * depth,), self.x.dtype)]

    def bind(self, buffers: Buffers, d_out: np.ndarray, grad: np.ndarray, *, add: bool) -> None:
        (self.buffer,) = carve(buffers.scratch, self.scratch)
        self.weight = _grouped_weight(buffers.parameters["weight"], self.spec)
        self.d_out = _grouped_pixels(d_out, self.spec.groups)
        self.grad, self.add = grad, add
        self.parts = [self._part(block) for block in self.blocks]

    def _part(self, block: OutputBlock) -> _Part:
        """Return the product of one block, and the additions of its columns to pixels."""
        spec, (_, ho, wo, _) = self.spec, self.y.shape
        groups, depth = spec.groups, self.weight.shape[2]
        start, size = (block.n0 * ho + block.o0) * wo, _pixels(block, wo)
        columns = self.buffer[: groups * size * depth].reshape(groups, size, depth)
        shape = (groups, block.n1 - block.n0, block.o1 - block.o0, wo, math.prod(spec.window.kernel), -1)
        windows = columns.reshape(shape)
        pixels = self.grad[block.images].reshape(*self.grad[block.images].shape[:3], groups, -1).transpose(3, 0, 1, 2, 4)
        additions = []
        for tap in taps(spec.window, _pair(self.x), (ho, wo)):
            rows = tap.rows.within(block.o0, block.o1)
            if not rows.empty:
                source = windows[:, :, rows.outputs, tap.columns.outputs, tap.number]
                additions.append((pixels[:, :, rows.inputs, tap.columns.inputs], source))
        return _Part(self.d_out[:, start : start + size], columns, additions)

    def run(self, multiply: Multiply) -> None:
        if not self.add:
            self.grad.fill(0)
        for part in self.parts:
            multiply(part.d_out, self.weight, part.columns)
            for target, source in part.additions:
                np.add(target, source, out=target)


def _pair(image: TensorSpec) -> tuple[int, int]:
    return image.shape[1], image.shape[2]


def _pixels(block: OutputBlock, columns: int) -> int:
    return (block.n1 - block.n0) * (block.o1 - block.o0) * columns


def _grouped_weight(weight: np.ndarray, spec: Conv2dSpec) -> np.ndarray:
    """Return weights (K, R, S, C / groups) as a view (groups, K / groups, R * S * C / groups)."""
    return weight.reshape(spec.groups, spec.channels_out // spec.groups, -1)


def _grouped_pixels(image: np.ndarray, groups: int) -> np.ndarray:
    """Return an image (N, H, W, C) as a view (groups, N * H * W, C / groups)."""
    return image.reshape(math.prod(image.shape[:3]), groups, image.shape[3] // groups).transpose(1, 0, 2)
