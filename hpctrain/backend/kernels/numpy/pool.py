"""Max and average pooling."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpctrain.backend.kernels.base import Buffers, Operator, StepContext
from hpctrain.backend.kernels.numpy.operator import NumpyOperator
from hpctrain.backend.kernels.numpy.taps import Block, blocks, taps
from hpctrain.backend.kernels.specs import PoolSpec, TensorSpec

_BLOCK_ELEMENTS = 1 << 15


def make_pool(spec: PoolSpec, x: TensorSpec, *, training: bool) -> Operator:
    """The operator of either kind."""
    kind = MaxPool if spec.kind == "max" else AveragePool
    return kind(spec, x, training=training)


@dataclass
class _Tap:
    """What one tap of the window touches in a block: the pixels it reads, and the outputs it serves."""

    number: int
    pixels: np.ndarray
    outputs: tuple[slice, slice, slice]


class _Pool(NumpyOperator):
    """Goes over the output in blocks, and over each block tap by tap."""

    def __init__(self, spec: PoolSpec, x: TensorSpec, *, training: bool) -> None:
        super().__init__(spec, (x,), training=training)
        self.pool = spec
        self.size = (x.shape[1], x.shape[2])
        self.outputs = (self.output.shape[1], self.output.shape[2])
        channels = x.shape[3]
        self.blocks = list(blocks(x.shape[0], self.outputs, _BLOCK_ELEMENTS // max(1, channels)))
        row = self.outputs[1] * channels
        self.largest = max(((block.n1 - block.n0) * (block.o1 - block.o0) * row for block in self.blocks), default=0)

    def _part(self, array: np.ndarray, block: Block) -> np.ndarray:
        """A block of an array of the output's shape, contiguous."""
        return array[block.images, block.rows]

    def _taps(self, image: np.ndarray, block: Block) -> list[_Tap]:
        """The taps of a block's windows on `image` (N, H, W, C), in row-major order."""
        found = []
        for tap in taps(self.pool.window, self.size, self.outputs):
            rows = tap.rows.within(block.o0, block.o1)
            if not rows.empty:
                pixels = image[block.images, rows.inputs, tap.columns.inputs]
                found.append(_Tap(tap.number, pixels, (slice(None), rows.outputs, tap.columns.outputs)))
        return found

    def _clear(self) -> None:
        """Zero the input's gradient, unless it is to be added to."""
        grad = self.input_grad()
        if grad is not None and not self.accumulates():
            grad.fill(0)


class MaxPool(_Pool):
    """y = maximum over the window, whose first largest element in row-major order receives the gradient (as in torch).

    Saved: per output the winning tap, counted down from R * S; 0 where no element won (an empty window, or NaN).
    """

    def __init__(self, spec: PoolSpec, x: TensorSpec, *, training: bool) -> None:
        super().__init__(spec, x, training=training)
        self.total = spec.window.kernel[0] * spec.window.kernel[1]
        self.code = "uint8" if self.total < 256 else "uint32"
        saved = [(self.output.shape, self.code)] if training else []
        block = (self.largest,)
        self.declare(saved=saved, scratch=[(block, "bool"), (block, self.code), (block, self.dtype)] if training else [])

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        self.parts = [self._taps(buffers.inputs[0], block) for block in self.blocks]
        grad = self.input_grad()
        self.grad_parts = [] if grad is None else [self._taps(grad, block) for block in self.blocks]

    def _work(self, i: int, shape: tuple[int, ...]) -> np.ndarray:
        size = int(np.prod(shape))
        return self.scratch[i][:size].reshape(shape)

    def forward(self, context: StepContext) -> None:
        for block, parts in zip(self.blocks, self.parts, strict=True):
            y = self._part(self.buffers.output, block)
            y.fill(-np.inf)
            winners = self._part(self.saved[0], block) if self.training else None
            if winners is not None:
                winners.fill(0)
            # From the last tap to the first: "greater or equal" then leaves the first of equals, and the codes grow.
            for tap in reversed(parts):
                part = y[tap.outputs]
                if winners is not None:
                    wins, codes = self._work(0, part.shape), self._work(1, part.shape)
                    np.greater_equal(tap.pixels, part, out=wins)
                    np.multiply(wins.view(np.uint8), self.total - tap.number, out=codes, dtype=self.code, casting="unsafe")
                    np.maximum(winners[tap.outputs], codes, out=winners[tap.outputs])
                np.maximum(part, tap.pixels, out=part)

    def backward_input(self) -> None:
        self._clear()
        for block, parts in zip(self.blocks, self.grad_parts, strict=True):
            dy = self._part(self.output_grad, block)
            winners = self._part(self.saved[0], block)
            for tap in parts:
                part = dy[tap.outputs]
                wins, share = self._work(0, part.shape), self._work(2, part.shape)
                np.equal(winners[tap.outputs], self.total - tap.number, out=wins)
                np.multiply(part, wins, out=share)
                np.add(tap.pixels, share, out=tap.pixels)


class AveragePool(_Pool):
    """y = sum over the window / its divisor: the elements inside the image, or inside the padded image."""

    def __init__(self, spec: PoolSpec, x: TensorSpec, *, training: bool) -> None:
        super().__init__(spec, x, training=training)
        rows, columns = (self._counts(dim) for dim in (0, 1))
        self.factor = (1.0 / (rows[:, None, None] * columns[:, None])).astype(self.dtype)
        self.declare(scratch=[((self.largest,), self.dtype)] if training else [])

    def _counts(self, dim: int) -> np.ndarray:
        """Taps of each window that count in one dim, int64 (Ho,) or (Wo,). A window that ceil mode lets reach beyond the padding
        counts only what lies inside it, as in torch."""
        window, size = self.pool.window, self.size[dim]
        before, after = window.padding[2 * dim : 2 * dim + 2]
        start = np.arange(self.outputs[dim])[:, None] * window.stride[dim] - before
        position = start + np.arange(window.kernel[dim]) * window.dilation[dim]
        counted = position < size + after if self.pool.count_include_pad else (position >= 0) & (position < size)
        return np.asarray(np.maximum(counted.sum(axis=1), 1))

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        self.parts = [self._taps(buffers.inputs[0], block) for block in self.blocks]
        grad = self.input_grad()
        self.grad_parts = [] if grad is None else [self._taps(grad, block) for block in self.blocks]

    def forward(self, context: StepContext) -> None:
        for block, parts in zip(self.blocks, self.parts, strict=True):
            y = self._part(self.buffers.output, block)
            y.fill(0)
            for tap in parts:
                part = y[tap.outputs]
                np.add(part, tap.pixels, out=part)
            np.multiply(y, self.factor[block.rows], out=y)

    def backward_input(self) -> None:
        self._clear()
        for block, parts in zip(self.blocks, self.grad_parts, strict=True):
            dy = self._part(self.output_grad, block)
            share = self.scratch[0][: dy.size].reshape(dy.shape)
            np.multiply(dy, self.factor[block.rows], out=share)
            for tap in parts:
                np.add(tap.pixels, share[tap.outputs], out=tap.pixels)
