"""Dropout (Srivastava et al., JMLR 2014) with masks that any split of the activation draws alike."""

from __future__ import annotations

import math

import numpy as np

from hpctrain.backend.counter_random import keep_mask, key
from hpctrain.backend.kernels.abilities import InPlace
from hpctrain.backend.operators import Buffers, Operator, StepContext
from hpctrain.backend.numpy.elementwise import flat_blocks
from hpctrain.backend.kernels.numpy.flatten import View
from hpctrain.backend.numpy.operator import NumpyOperator
from hpctrain.backend.kernels.numpy.rows import RowBlocks
from hpctrain.backend.kernels.numpy.stochastic_depth import NumpyStochasticDepth
from hpctrain.backend.numpy.windows import split
from hpctrain.backend.specs import DropoutSpec, Shape, TensorSpec

_MASK_ELEMENTS = 1 << 18


def make_dropout(spec: DropoutSpec, x: TensorSpec, *, training: bool) -> Operator:
    """Dropout, or the identity where nothing is dropped."""
    if not training or spec.rate == 0:
        return View(spec, x)
    if spec.per_sample:
        return NumpyStochasticDepth(spec, x, training=training)
    return NumpyDropout(spec, x, training=training)


def sample_indices(shape: Shape, unsplit_shape: Shape | None, origin: Shape) -> range | np.ndarray:
    """Where the elements of one sample's block lie in its unsplit activation: a range of neighbours, else int64 (size,).

    Args:
        shape: of the block. unsplit_shape: of the whole, None where it is not split. origin: the block's first corner.
    """
    size = math.prod(shape)
    if unsplit_shape is None:
        return range(size)
    index = np.zeros((1,) * len(shape), np.int64)
    for dim, (length, first) in enumerate(zip(shape, origin, strict=True)):
        stride = math.prod(unsplit_shape[dim + 1 :])
        positions = (np.arange(length) + first) * stride
        index = index + positions.reshape(-1, *(1,) * (len(shape) - dim - 1))
    flat = index.reshape(-1)
    if size and flat[-1] - flat[0] + 1 == size:
        return range(int(flat[0]), int(flat[-1]) + 1)
    return flat


class NumpyDropout(InPlace, NumpyOperator):
    """y = x * keep / (1 - rate). Saved: the mask, one byte per element."""

    def __init__(self, spec: DropoutSpec, x: TensorSpec, *, training: bool) -> None:
        super().__init__(spec, (x,), training=training)
        self.dropout = spec
        self.scale = 1.0 / (1.0 - spec.rate)
        self.indices = sample_indices(x.shape[1:], spec.unsplit_shape, spec.origin)
        self.samples = max(1, _MASK_ELEMENTS // max(1, len(self.indices)))
        self.declare(saved=[(x.shape, "bool")], scratch=[((RowBlocks((x.size, 1)).largest,), self.dtype)])

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        self.keep = self.saved[0].reshape(self.inputs[0].shape[0], len(self.indices))
        self.x, self.y, self.mask = (flat_blocks(array) for array in (buffers.inputs[0], buffers.output, self.saved[0]))
        self.dy = [] if buffers.output_grad is None else flat_blocks(buffers.output_grad)
        grad = self.input_grad()
        self.dx = [] if grad is None else flat_blocks(grad)

    def forward(self, context: StepContext) -> None:
        if not context.training:
            for x, y in zip(self.x, self.y, strict=True):
                np.copyto(y, x)
            return
        self._draw(context)
        for x, y, mask in zip(self.x, self.y, self.mask, strict=True):
            self._apply(x, mask, y)

    def _draw(self, context: StepContext) -> None:
        spec = self.dropout
        ids = context.sample_ids[spec.first_sample : spec.first_sample + self.keep.shape[0]]
        assert len(ids) == self.keep.shape[0], "dropout needs the id of every sample"
        stream = key("dropout", spec.seed, context.step, spec.layer)
        for low, high in split(self.keep.shape[0], self.samples):
            keep_mask(stream, ids[low:high], self.indices, spec.rate, out=self.keep[low:high])

    def _apply(self, values: np.ndarray, mask: np.ndarray, out: np.ndarray) -> None:
        np.multiply(values, mask, out=out)
        np.multiply(out, self.scale, out=out)

    def backward_input(self) -> None:
        for dy, mask, dx in zip(self.dy, self.mask, self.dx, strict=False):
            if self.accumulates():
                part = self.scratch[0][: dy.size].reshape(dy.shape)
                self._apply(dy, mask, part)
                np.add(dx, part, out=dx)
            else:
                self._apply(dy, mask, dx)
