"""Max, average and adaptive average pooling.

Max and average pooling process blocks of the output, tap by tap. Adaptive average pooling is one matrix product per dim.
"""

from __future__ import annotations

import math

import numpy as np

from hpctrain.backend.numpy.operator import NumpyOperator
from hpctrain.backend.numpy.windows import OutputBlock, PlaneBlock, Planes, blocks, split
from hpctrain.backend.operators import Buffers, Request, StepContext
from hpctrain.backend.specs import AdaptiveAveragePoolSpec, PoolSpec, TensorSpec

_BLOCK_ELEMENTS = 1 << 15


class _Pool(NumpyOperator):
    """Base of max and average pooling, which process the output in blocks, tap by tap. Scratch 0 holds the planes of a block."""

    def __init__(self, spec: PoolSpec, x: TensorSpec, *, training: bool) -> None:
        super().__init__(spec, (x,), training=training)
        self.pool = spec
        # whether windows do not overlap
        self.apart = all(step >= extent for step, extent in zip(spec.window.stride, spec.window.extent, strict=True))
        self.outputs = (self.output.shape[1], self.output.shape[2])
        self.blocks = list(blocks(x.shape[0], self.outputs, _BLOCK_ELEMENTS // max(1, x.shape[3])))
        self.planes = Planes(x.shape, self.dtype, spec.window, self.outputs, self.blocks)
        row = self.outputs[1] * x.shape[3]
        self.largest = max(((block.n1 - block.n0) * (block.o1 - block.o0) * row for block in self.blocks), default=0)

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        self.x = self.planes.bind(buffers.inputs[0], self.scratch[0])
        grad = self.input_grad()
        self.dx = [] if grad is None else self.planes.bind(grad, self.scratch[0])

    def backward_input(self) -> None:
        grad = self.input_grad()
        if grad is None:
            return
        if not self.accumulates():
            grad.fill(0)
        for block, planes in zip(self.blocks, self.dx, strict=True):
            planes.all.fill(0)
            self._scatter(block, planes)
            if self.apart and not self.accumulates():
                planes.store()
            else:
                planes.add_to_image()

    def _scatter(self, block: OutputBlock, planes: PlaneBlock) -> None:
        """Write the gradient of one block to its planes, which contain zeros."""
        raise NotImplementedError

    def _work(self, i: int, like: np.ndarray) -> np.ndarray:
        """Return scratch array i as a view of the shape of `like`."""
        return self.scratch[i][: like.size].reshape(like.shape)


class NumpyMaxPool(_Pool):
    """Max pooling. The first maximum of a window in row-major order receives the gradient (as in torch).

    For each output, forward saves the code R * S - t of the winning tap t. NaN in a window makes the output NaN.
    """

    def __init__(self, spec: PoolSpec, x: TensorSpec, *, training: bool) -> None:
        super().__init__(spec, x, training=training)
        self.total = math.prod(spec.window.kernel)
        code = "uint8" if self.total < 256 else "uint32"
        block = (self.largest,)
        work: list[Request] = [(block, "bool"), (block, code), (block, self.dtype)] if training else []
        self.declare(saved=[(self.output.shape, code)] if training else [], scratch=[self.planes.scratch, *work])

    def forward(self, context: StepContext) -> None:
        for block, planes in zip(self.blocks, self.x, strict=True):
            planes.load(-np.inf)
            y = self.buffers.output[block.images, block.rows]
            np.copyto(y, planes.taps[-1])
            if self.training:
                winners = self.saved[0][block.images, block.rows]
                winners.fill(1)
                self._contest(planes, y, winners)
            else:
                for values in planes.taps[:-1]:
                    np.maximum(y, values, out=y)

    def _contest(self, planes: PlaneBlock, y: np.ndarray, winners: np.ndarray) -> None:
        """Find the maximum and the winning tap of each output.

        The taps are compared from last to first, so that "greater or equal" selects the first maximum, and codes only grow.
        """
        wins, codes = self._work(1, y), self._work(2, y)
        for code, values in enumerate(reversed(planes.taps[:-1]), start=2):
            np.greater_equal(values, y, out=wins)
            np.multiply(wins.view(np.uint8), codes.dtype.type(code), out=codes)
            np.maximum(winners, codes, out=winners)
            np.maximum(y, values, out=y)

    def _scatter(self, block: OutputBlock, planes: PlaneBlock) -> None:
        dy = self.output_grad[block.images, block.rows]
        winners = self.saved[0][block.images, block.rows]
        wins, share = self._work(1, dy), self._work(3, dy)
        for number, target in enumerate(planes.taps):
            np.equal(winners, winners.dtype.type(self.total - number), out=wins)
            if self.apart:
                np.multiply(dy, wins, out=target)
            else:
                np.multiply(dy, wins, out=share)
                np.add(target, share, out=target)


class NumpyAveragePool(_Pool):
    """Average pooling. The divisor is the number of window elements inside the image, padding included if `count_include_pad`."""

    def __init__(self, spec: PoolSpec, x: TensorSpec, *, training: bool) -> None:
        super().__init__(spec, x, training=training)
        rows, columns = (self._counts(dim) for dim in (0, 1))
        self.factor = (1.0 / (rows[:, None, None] * columns[:, None])).astype(self.dtype)
        self.declare(scratch=[self.planes.scratch, ((self.largest if training else 0,), self.dtype)])

    def _counts(self, dim: int) -> np.ndarray:
        """Return the number of taps of each window that count in one dim, int64 (Ho,) or (Wo,).

        If a window reaches beyond the padding in ceil mode, only the taps inside the padding count, as in torch.
        """
        window, size = self.pool.window, self.inputs[0].shape[1 + dim]
        before, after = window.padding[2 * dim : 2 * dim + 2]
        start = np.arange(self.outputs[dim])[:, None] * window.stride[dim] - before
        position = start + np.arange(window.kernel[dim]) * window.dilation[dim]
        counted = position < size + after if self.pool.count_include_pad else (position >= 0) & (position < size)
        return np.asarray(np.maximum(counted.sum(axis=1), 1))

    def forward(self, context: StepContext) -> None:
        for block, planes in zip(self.blocks, self.x, strict=True):
            planes.load(0)
            y = self.buffers.output[block.images, block.rows]
            np.copyto(y, planes.taps[0])
            for values in planes.taps[1:]:
                np.add(y, values, out=y)
            np.multiply(y, self.factor[block.rows], out=y)

    def _scatter(self, block: OutputBlock, planes: PlaneBlock) -> None:
        dy = self.output_grad[block.images, block.rows]
        share = self._work(1, dy)
        np.multiply(dy, self.factor[block.rows], out=share)
        for target in planes.taps:
            np.add(target, share, out=target)


_ADAPTIVE_BLOCK_ELEMENTS = 1 << 18


def averaging_matrix(outputs: int, size: int, dtype: str) -> np.ndarray:
    """Return a matrix (outputs, size) whose row i averages inputs [floor(i size / outputs), ceil((i + 1) size / outputs))."""
    i = np.arange(outputs)[:, None]
    start, stop = i * size // outputs, -(-(i + 1) * size // outputs)
    position = np.arange(size)
    inside = (position >= start) & (position < stop)
    return np.asarray(inside / np.maximum(stop - start, 1), dtype)


class NumpyAdaptiveAveragePool(NumpyOperator):
    """Adaptive average pooling, as matrix products: y (N, Ho, Wo, C) = rows (Ho, H) x columns (Wo, W)^T of x (N, H, W, C).

    An image without pixels averages to 0.
    """

    def __init__(self, spec: AdaptiveAveragePoolSpec, x: TensorSpec, *, training: bool) -> None:
        super().__init__(spec, (x,), training=training)
        n, h, w, c = x.shape
        ho, wo = spec.size
        self.rows = averaging_matrix(ho, h, self.dtype)
        self.columns = averaging_matrix(wo, w, self.dtype)
        self.images = min(n, max(1, _ADAPTIVE_BLOCK_ELEMENTS // max(1, h * w * c)))
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
