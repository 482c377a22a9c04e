"""ReLU, the residual sum, dropout and stochastic depth.

The masks of dropout (Srivastava et al., JMLR 2014) and of stochastic depth (Huang et al., ECCV 2016), which keeps or drops whole
samples, do not depend on how the activation is split.
"""

from __future__ import annotations

import math

import numpy as np

from hpctrain.backend.counter_random import Key, keep_mask, key
from hpctrain.backend.numpy.operator import NumpyOperator, RowBlocks
from hpctrain.backend.numpy.windows import split
from hpctrain.backend.operators import (
    Accumulating,
    Buffers,
    InPlace,
    Operator,
    OutputReadOnce,
    Request,
    StepContext,
    SufficientFactors,
    aligned,
)
from hpctrain.backend.specs import AddSpec, DropoutSpec, ReluSpec, Shape, TensorSpec, WithRelu


def flat_blocks(array: np.ndarray) -> list[np.ndarray]:
    """Return the elements of a contiguous array as 2-D views that fit a near cache."""
    return RowBlocks((array.size, 1)).views(array)


class Relu(InPlace, NumpyOperator):
    """Rectified linear unit: y = max(x, 0); the gradient at 0 is 0. Backward reads only the output."""

    def __init__(self, spec: ReluSpec, x: TensorSpec, *, training: bool) -> None:
        super().__init__(spec, (x,), training=training)
        self.needs_output = training
        self.declare(scratch=_mask_and_product(x.size, self.dtype) if training else [])

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        self.y = flat_blocks(buffers.output)
        self.dy = [] if buffers.output_grad is None else flat_blocks(buffers.output_grad)
        grad = self.input_grad()
        self.dx = [] if grad is None else flat_blocks(grad)
        self.x = flat_blocks(buffers.inputs[0])
        self.zeros = zero_row(self.x, self.dtype)

    def forward(self, context: StepContext) -> None:
        for x, y in zip(self.x, self.y, strict=True):
            np.maximum(x, self.zeros[: x.shape[1]], out=y)

    def backward_input(self) -> None:
        for y, dy, dx in zip(self.y, self.dy, self.dx, strict=False):
            mask, product = (part[: y.size].reshape(y.shape) for part in self.scratch)
            np.greater(y, 0, out=mask)
            if self.accumulates():
                np.multiply(dy, mask, out=product)
                np.add(dx, product, out=dx)
            else:
                np.multiply(dy, mask, out=dx)


class Add(InPlace, NumpyOperator):
    """Residual sum: y = a + b, then ReLU if the spec has `relu` set. The gradient passes to both inputs."""

    def __init__(self, spec: AddSpec, *inputs: TensorSpec, training: bool) -> None:
        super().__init__(spec, inputs, training=training)
        self.relu = spec.relu
        self.needs_output = training and spec.relu
        self.declare(scratch=_mask_and_product(inputs[0].size, self.dtype) if self.needs_output else [])

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        self.a, self.b, self.y = (flat_blocks(array) for array in (*buffers.inputs, buffers.output))
        self.dy = [] if buffers.output_grad is None else flat_blocks(buffers.output_grad)
        self.targets = [
            (flat_blocks(grad), self.accumulates(i))
            for i, grad in enumerate(buffers.input_grads)
            # A gradient in the buffer of dy is already complete, unless the ReLU changes it.
            if grad is not None and (self.relu or not np.may_share_memory(grad, self.output_grad))
        ]
        self.zeros = zero_row(self.y, self.dtype)

    def forward(self, context: StepContext) -> None:
        for a, b, y in zip(self.a, self.b, self.y, strict=True):
            np.add(a, b, out=y)
            if self.relu:
                np.maximum(y, self.zeros[: y.shape[1]], out=y)

    def backward_input(self) -> None:
        for i, dy in enumerate(self.dy):
            passed = dy
            if self.relu:
                mask, product = (part[: dy.size].reshape(dy.shape) for part in self.scratch)
                np.greater(self.y[i], 0, out=mask)
                passed = np.multiply(dy, mask, out=product)
            for views, add in self.targets:
                if add:
                    np.add(views[i], passed, out=views[i])
                else:
                    np.copyto(views[i], passed)


class RectifiedOperator(Accumulating, OutputReadOnce, Operator):
    """An operator with a ReLU after it: y = max(inner(x), 0), in place, in plain memory.

    Both halves of backward read the masked gradient, and either may come first. Each therefore calls `finish_output_grad`, which
    masks the output's gradient once per backward.

    Args:
        inner: operator of `spec.inner`, which can accumulate gradients.
    """

    needs_output = True

    def __init__(self, spec: WithRelu, inner: Operator) -> None:
        self.spec, self._inner = spec, inner
        self.inputs, self.output = inner.inputs, inner.output
        self.needs_inputs = inner.needs_inputs
        self.saved_bytes, self._own_bytes = inner.saved_bytes, aligned(inner.scratch_bytes)
        self.scratch_bytes = self._own_bytes + self.output.size
        self._masked = False
        self._inactive = np.empty(0, bool)

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        self._inner.bind(buffers)
        self._bind_mask(buffers)

    def _bind_mask(self, buffers: Buffers) -> None:
        assert buffers.scratch is not None
        self._inactive = buffers.scratch[self._own_bytes :].view("bool").reshape(buffers.output.shape)

    def forward(self, context: StepContext) -> None:
        self._inner.forward(context)
        np.maximum(self.buffers.output, 0, out=self.buffers.output)
        self._masked = False

    def finish_output_grad(self) -> None:
        if not self._masked:
            assert self.buffers.output_grad is not None
            with np.errstate(invalid="ignore"):  # only in bfloat16, a comparison with NaN warns
                np.less_equal(self.buffers.output, 0, out=self._inactive)
            np.copyto(self.buffers.output_grad, 0, where=self._inactive)
            self._masked = True

    def backward_parameters(self) -> None:
        self.finish_output_grad()
        self._inner.backward_parameters()

    def backward_input(self) -> None:
        self.finish_output_grad()
        self._inner.backward_input()


class RectifiedLinear(RectifiedOperator, SufficientFactors):
    """A rectified linear layer, whose sufficient factors are its input and the masked gradient."""


def zero_row(views: list[np.ndarray], dtype: str) -> np.ndarray:
    """Return a row of zeros as wide as the widest block. With the number 0 instead, np.maximum takes three times as long."""
    return np.zeros(max((view.shape[1] for view in views), default=0), dtype)


def _mask_and_product(size: int, dtype: str) -> list[Request]:
    block = RowBlocks((size, 1)).largest
    return [((block,), "bool"), ((block,), dtype)]


def _stream(spec: DropoutSpec, context: StepContext, samples: int) -> tuple[Key, np.ndarray]:
    """Return the key of a layer's random numbers in this step, and the ids of its local samples (samples,)."""
    ids = context.sample_ids[spec.first_sample : spec.first_sample + samples]
    assert len(ids) == samples, "dropout needs the id of every sample"
    return key("dropout", spec.seed, context.step, spec.layer), ids


_BLOCK_ELEMENTS = 1 << 16  # elements of a gradient that are added at a time; they fit a near cache


class NumpyStochasticDepth(InPlace, NumpyOperator):
    """Stochastic depth: y = x * keep / (1 - rate), with `keep` drawn per sample. Forward saves these factors of x, (N, 1)."""

    def __init__(self, spec: DropoutSpec, x: TensorSpec, *, training: bool) -> None:
        super().__init__(spec, (x,), training=training)
        self.dropout = spec
        self.scale = 1.0 / (1.0 - spec.rate)
        self.samples = x.shape[0]
        self.elements = math.prod(x.shape[1:])
        self.step = max(1, _BLOCK_ELEMENTS // max(1, self.elements))
        block = min(self.step, self.samples) * self.elements
        self.declare(saved=[((self.samples, 1), self.dtype)], scratch=[((block,), self.dtype)])

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        shape = self.samples, self.elements
        self.x, self.y = buffers.inputs[0].reshape(shape), buffers.output.reshape(shape)
        grad = self.input_grad()
        self.dx = None if grad is None else grad.reshape(shape)

    def forward(self, context: StepContext) -> None:
        if not context.training:
            np.copyto(self.y, self.x)
            return
        factors = self.saved[0]
        stream, ids = _stream(self.dropout, context, self.samples)
        np.multiply(keep_mask(stream, ids, range(1), self.dropout.rate), self.scale, out=factors, casting="same_kind")
        np.multiply(self.x, factors, out=self.y)

    def backward_input(self) -> None:
        if self.dx is None:
            return
        dy, factors = self.output_grad.reshape(self.dx.shape), self.saved[0]
        if not self.accumulates():
            np.multiply(dy, factors, out=self.dx)
            return
        for low in range(0, self.samples, self.step):
            rows = slice(low, min(low + self.step, self.samples))
            product = self.scratch[0][: (rows.stop - low) * self.elements].reshape(-1, self.elements)
            np.multiply(dy[rows], factors[rows], out=product)
            np.add(self.dx[rows], product, out=self.dx[rows])


_MASK_ELEMENTS = 1 << 18


def sample_indices(shape: Shape, unsplit_shape: Shape | None, origin: Shape) -> range | np.ndarray:
    """Return the indices of one sample's block in its unsplit activation: a range if they are contiguous, otherwise int64.

    Args:
        shape: shape of the block.
        unsplit_shape: shape of the unsplit activation; None if it is not split.
        origin: index of the block's first element in the unsplit activation.
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
    """Dropout: y = x * keep / (1 - rate). Forward saves the mask `keep`, one byte per element."""

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
        stream, ids = _stream(self.dropout, context, self.keep.shape[0])
        for low, high in split(self.keep.shape[0], self.samples):
            keep_mask(stream, ids[low:high], self.indices, self.dropout.rate, out=self.keep[low:high])

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
