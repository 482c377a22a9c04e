"""Adaptive average pooling: a matrix product per dim."""

from __future__ import annotations

import numpy as np

from hpctrain.backend.operators import Buffers, StepContext
from hpctrain.backend.numpy.operator import NumpyOperator
from hpctrain.backend.numpy.windows import split
from hpctrain.backend.specs import AdaptiveAveragePoolSpec, TensorSpec

_BLOCK_ELEMENTS = 1 << 18


def averaging_matrix(outputs: int, size: int, dtype: str) -> np.ndarray:
    """(outputs, size): row i averages the inputs [floor(i size / outputs), ceil((i + 1) size / outputs))."""
    i = np.arange(outputs)[:, None]
    start, stop = i * size // outputs, -(-(i + 1) * size // outputs)
    position = np.arange(size)
    inside = (position >= start) & (position < stop)
    return np.asarray(inside / np.maximum(stop - start, 1), dtype)


class NumpyAdaptiveAveragePool(NumpyOperator):
    """y (N, Ho, Wo, C) = rows (Ho, H) x columns (Wo, W)^T of x (N, H, W, C). An image without pixels averages to 0."""

    def __init__(self, spec: AdaptiveAveragePoolSpec, x: TensorSpec, *, training: bool) -> None:
        super().__init__(spec, (x,), training=training)
        n, h, w, c = x.shape
        ho, wo = spec.size
        self.rows = averaging_matrix(ho, h, self.dtype)
        self.columns = averaging_matrix(wo, w, self.dtype)
        self.images = min(n, max(1, _BLOCK_ELEMENTS // max(1, h * w * c)))
        middle = ((self.images, ho, w * c), self.dtype)
        self.declare(scratch=[middle, ((self.images if training else 0, h, w * c), self.dtype)])

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        n, h, w, c = self.inputs[0].shape
        ho, wo = self.rows.shape[0], self.columns.shape[0]
        self.x = buffers.inputs[0].reshape(n, h, w * c)
        self.y = buffers.output.reshape(n, ho, wo, c)
        grad = self.input_grad()
        self.dx = None if grad is None else grad.reshape(n, h, w * c)

    def forward(self, context: StepContext) -> None:
        n, _, w, c = self.inputs[0].shape
        for low, high in split(n, self.images):
            middle = self.scratch[0][: high - low]
            np.matmul(self.rows, self.x[low:high], out=middle)
            np.matmul(self.columns, middle.reshape(high - low, self.rows.shape[0], w, c), out=self.y[low:high])

    def backward_input(self) -> None:
        n, _, w, c = self.inputs[0].shape
        if self.dx is None:
            return
        for low, high in split(n, self.images):
            middle = self.scratch[0][: high - low]
            np.matmul(self.columns.T, self.output_grad[low:high], out=middle.reshape(high - low, self.rows.shape[0], w, c))
            if not self.accumulates():
                np.matmul(self.rows.T, middle, out=self.dx[low:high])
                continue
            part = self.scratch[1][: high - low]
            np.matmul(self.rows.T, middle, out=part)
            np.add(self.dx[low:high], part, out=self.dx[low:high])
