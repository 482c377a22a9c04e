"""ReLU and the residual sum."""

from __future__ import annotations

import numpy as np

from hpctrain.backend.kernels.abilities import InPlace
from hpctrain.backend.operators import Buffers, StepContext
from hpctrain.backend.kernels.numpy.memory import Request
from hpctrain.backend.numpy.operator import NumpyOperator
from hpctrain.backend.kernels.numpy.rows import RowBlocks
from hpctrain.backend.specs import AddSpec, ReluSpec, TensorSpec


def flat_blocks(array: np.ndarray) -> list[np.ndarray]:
    """The elements of a contiguous array, in 2-D views that a near cache holds."""
    return RowBlocks((array.size, 1)).views(array)


class Relu(InPlace, NumpyOperator):
    """y = max(x, 0); the gradient at 0 is 0. In place where the program likes; backward reads the output only."""

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
        self.zeros = zeros_beside(self.x, self.dtype)

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
    """y = a + b, then ReLU where the spec says so. The gradient passes to both inputs."""

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
            # What shares the buffer of dy is complete already, unless the ReLU changes it.
            if grad is not None and (self.relu or not np.may_share_memory(grad, self.output_grad))
        ]
        self.zeros = zeros_beside(self.y, self.dtype)

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


def zeros_beside(views: list[np.ndarray], dtype: str) -> np.ndarray:
    """Zeros as wide as the widest block: the maximum of two arrays is three times as fast as that of an array and a number."""
    return np.zeros(max((view.shape[1] for view in views), default=0), dtype)


def _mask_and_product(size: int, dtype: str) -> list[Request]:
    block = RowBlocks((size, 1)).largest
    return [((block,), "bool"), ((block,), dtype)]
